"""Argmax of each row of logits in two launches, which also detect rows that are not finite.

Suffixes: R rows, V vocabulary, P parts of a row.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

import torch
import triton
import triton.language as tl

from pipeline.kernels.triton.launch import Launch, power_of_two

_WIDTH = 8192  # tokens per part


@triton.jit(do_not_specialize=["num_parts"])
def _best_of_part(logits_ptr, value_ptr, token_ptr, stride, num_tokens, num_parts, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = token < num_tokens
    logit = tl.load(logits_ptr + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit != logit, float("inf"), logit)  # a maximum may ignore NaN
    best, at = tl.max(logit, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(value_ptr + row * num_parts + tl.program_id(1), best)
    tl.store(token_ptr + row * num_parts + tl.program_id(1), tl.program_id(1) * WIDTH + at)


@triton.jit(do_not_specialize=["num_parts"])
def _best_of_parts(value_ptr, token_ptr, token_and_finite_ptr, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    value = tl.load(value_ptr + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    token = tl.load(token_ptr + row * num_parts + part, mask=part < num_parts, other=0)
    best, at = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    finite = (best > float("-inf")) & (best < float("inf"))
    chosen = tl.sum(tl.where(part == at, token, 0), axis=0)
    tl.store(token_and_finite_ptr + row, tl.where(finite, chosen, 0).to(tl.int64))
    tl.store(token_and_finite_ptr + tl.num_programs(0) + row, finite.to(tl.int64))


def greedy(logits_RV: torch.Tensor) -> torch.Tensor:
    """Implement `contract.Kernels.greedy`. The result stays on the device; the token of a non-finite row is 0."""
    token_and_finite_2R = torch.empty(2, len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    if len(logits_RV):
        for launch in greedy_launches(logits_RV, token_and_finite_2R):
            launch.run()
    return token_and_finite_2R


def greedy_launches(logits_RV: torch.Tensor, token_and_finite_2R: torch.Tensor) -> tuple[Launch, Launch]:
    """Return the launches for float32, float16 or bfloat16 logits; rows may be strided."""
    num_rows, num_tokens = logits_RV.shape
    assert logits_RV.stride(1) == 1
    num_parts = -(-num_tokens // _WIDTH)
    value_RP = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits_RV.device)
    token_RP = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits_RV.device)
    parts = Launch(
        _best_of_part,
        (num_rows, num_parts),
        (logits_RV, value_RP, token_RP, logits_RV.stride(0), num_tokens, num_parts),
        {"WIDTH": _WIDTH},
        num_warps=8,
    )
    whole = Launch(
        _best_of_parts,
        (num_rows,),
        (value_RP, token_RP, token_and_finite_2R, num_parts),
        {"PARTS": power_of_two(num_parts)},
        num_warps=1,
    )
    return parts, whole
