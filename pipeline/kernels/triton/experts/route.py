"""The choice of experts in one launch. Implements `contract.Route`.

Suffixes: T tokens, E experts, A experts of a token.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

import torch
import triton
import triton.language as tl

from pipeline.kernels import experts
from pipeline.kernels.experts import SMALLEST_SUM
from pipeline.kernels.routing import Routing
from pipeline.kernels.triton.launch import Launch, power_of_two

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_SMALLEST_SUM = tl.constexpr(SMALLEST_SUM)


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    expert_ptr,
    weight_ptr,
    stride,
    scale,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_TOP_K: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Route one token. Of equal scores the first expert wins."""
    token = tl.program_id(0).to(tl.int64)
    expert_E = tl.arange(0, PADDED_EXPERTS)
    inside_E = expert_E < EXPERTS
    logit_E = tl.load(logits_ptr + token * stride + expert_E, mask=inside_E, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        score_E = 1.0 / (1.0 + tl.exp(-logit_E))
    else:
        score_E = tl.exp(logit_E - tl.max(logit_E, axis=0))
        score_E = score_E / tl.sum(score_E, axis=0)
    choice_E = score_E
    if BIASED:
        choice_E += tl.load(bias_ptr + expert_E, mask=inside_E, other=0.0)
    # Chosen experts get -inf. NaN and -inf become larger, so that experts are different even then.
    choice_E = tl.where(choice_E > _LOWEST, choice_E, _LOWEST)
    choice_E = tl.where(inside_E, choice_E, float("-inf"))
    rank_A = tl.arange(0, PADDED_TOP_K)
    expert_A, weight_A = tl.zeros([PADDED_TOP_K], tl.int32), tl.zeros([PADDED_TOP_K], tl.float32)
    for rank in tl.static_range(TOP_K):
        _, chosen = tl.max(choice_E, axis=0, return_indices=True, return_indices_tie_break_left=True)
        weight = tl.sum(tl.where(expert_E == chosen, score_E, 0.0), axis=0)
        expert_A, weight_A = tl.where(rank_A == rank, chosen, expert_A), tl.where(rank_A == rank, weight, weight_A)
        choice_E = tl.where(expert_E == chosen, float("-inf"), choice_E)
    if RENORMALIZE:
        weight_A = weight_A / (tl.sum(weight_A, axis=0) + _SMALLEST_SUM)
    at_A, mask_A = token * TOP_K + rank_A, rank_A < TOP_K
    tl.store(expert_ptr + at_A, expert_A.to(tl.int64), mask=mask_A)
    tl.store(weight_ptr + at_A, weight_A * scale, mask=mask_A)


def route(
    logits_TE: torch.Tensor, routing: Routing, choice_bias_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Kernels.route`. Groups of experts are left to torch."""
    if routing.num_groups > 1:
        return experts.route(logits_TE, routing, choice_bias_E)
    num_tokens, device = len(logits_TE), logits_TE.device
    expert_TA = torch.empty(num_tokens, routing.top_k, dtype=torch.int64, device=device)
    weight_TA = torch.empty(num_tokens, routing.top_k, dtype=torch.float32, device=device)
    if num_tokens:
        route_launch(logits_TE, routing, choice_bias_E, expert_TA, weight_TA).run()
    return expert_TA, weight_TA


def route_launch(
    logits_TE: torch.Tensor,
    routing: Routing,
    choice_bias_E: torch.Tensor | None,
    expert_TA: torch.Tensor,
    weight_TA: torch.Tensor,
) -> Launch:
    """Return the launch that writes `expert_TA` and `weight_TA`. Rows of logits may be strided."""
    num_tokens, num_experts = logits_TE.shape
    assert logits_TE.stride(1) == 1
    padded = power_of_two(num_experts, 32)
    return Launch(
        _route,
        (num_tokens,),
        (logits_TE, choice_bias_E, expert_TA, weight_TA, logits_TE.stride(0), float(routing.scale)),
        {
            "EXPERTS": num_experts,
            "PADDED_EXPERTS": padded,
            "TOP_K": routing.top_k,
            "PADDED_TOP_K": power_of_two(routing.top_k),
            "IS_SIGMOID": routing.scoring == "sigmoid",
            "RENORMALIZE": routing.renormalize,
            "BIASED": choice_bias_E is not None,
        },
        num_warps=max(1, min(4, padded // 128)),
    )
