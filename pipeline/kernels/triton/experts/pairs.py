"""Pairs of a token and one of its experts: their lists by expert, and the sum of a token's pairs.

Suffixes: T tokens, A experts of a token, P pairs (pair t * A + a), E experts, H hidden.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pipeline.kernels.triton.launch import Launch

_PAIRS = 256  # per program
_WIDTH = 1024  # outputs per program


@triton.jit(do_not_specialize=["num_pairs", "capacity"])
def _assign(expert_ptr, count_ptr, pair_ptr, num_pairs, capacity, PAIRS: tl.constexpr):
    """Append pairs to the lists of their experts. Their order differs from run to run; no product depends on it."""
    pair_P = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    expert_P = tl.load(expert_ptr + pair_P, mask=pair_P < num_pairs, other=-1)
    has_expert_P = expert_P >= 0
    rank_P = tl.atomic_add(count_ptr + expert_P, 1, mask=has_expert_P, sem="relaxed")
    tl.store(pair_ptr + expert_P * capacity + rank_P, pair_P, mask=has_expert_P)


@triton.jit
def _combine(y_ptr, weight_ptr, out_ptr, width, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    """Sum the outputs of a token's pairs in order, each times its weight."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        y = tl.load(y_ptr + pair * width + column, mask=inside, other=0.0).to(tl.float32)
        total += y * tl.load(weight_ptr + pair)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Pairs:
    """Pairs by expert: expert e has the pairs pair_ET[e, :count_E[e]], in any order. Both are None for one token, whose
    pairs have different experts. expert_P: int64; a pair with a negative expert is in no list.
    """

    expert_P: torch.Tensor
    num_experts: int
    count_E: torch.Tensor | None = None  # int32
    pair_ET: torch.Tensor | None = None  # int32

    def max_tiles(self, tile: int) -> int:
        """Return the maximum number of tiles of up to `tile` pairs of one expert."""
        num_pairs = len(self.expert_P)
        return num_pairs if self.count_E is None else min(num_pairs, self.num_experts) + num_pairs // tile


def pairs_by_expert(expert_TA: torch.Tensor, num_experts: int) -> Pairs:
    """List the pairs of each expert in one launch, without waiting for the device."""
    expert_P, num_tokens = expert_TA.flatten(), len(expert_TA)
    if num_tokens == 1:
        return Pairs(expert_P, num_experts)
    count_E = torch.zeros(num_experts, dtype=torch.int32, device=expert_P.device)
    pair_ET = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=expert_P.device)
    pairs = Pairs(expert_P, num_experts, count_E, pair_ET)
    assign_launch(pairs).run()
    return pairs


def assign_launch(pairs: Pairs) -> Launch:
    assert pairs.pair_ET is not None
    num_pairs, capacity = len(pairs.expert_P), pairs.pair_ET.shape[1]
    arguments = pairs.expert_P, pairs.count_E, pairs.pair_ET, num_pairs, capacity
    return Launch(_assign, (-(-num_pairs // _PAIRS),), arguments, {"PAIRS": _PAIRS})


def combine_launch(y_PH: torch.Tensor, weight_TA: torch.Tensor, out_TH: torch.Tensor) -> Launch:
    """Return the launch of out = sum over a token's pairs of weight * y, in float32, rounded once."""
    num_tokens, width = out_TH.shape
    assert weight_TA.is_contiguous()
    return Launch(
        _combine,
        (num_tokens, -(-width // _WIDTH)),
        (y_PH, weight_TA, out_TH, width),
        {"TOP_K": weight_TA.shape[1], "WIDTH": _WIDTH},
    )
