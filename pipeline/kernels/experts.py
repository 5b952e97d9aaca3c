"""Experts in plain torch: the choice of experts, and a loop over the linears of each. The oracle of faster kernels.

Suffixes: T tokens, E experts, A experts of a token, H hidden, P pairs of a token and one of its experts.
"""

from collections.abc import Callable

import torch

from pipeline.kernels.linears import Linear
from pipeline.kernels.routing import Routing
from pipeline.weights.packed import ExpertWeights, LinearWeight

SMALLEST_SUM = 1e-20  # of sigmoid scores, which may all be 0


def route(
    logits_TE: torch.Tensor, routing: Routing, choice_bias_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Kernels.route`."""
    logits_TE = logits_TE.float()
    score_TE = logits_TE.softmax(-1) if routing.scoring == "softmax" else logits_TE.sigmoid()
    choice_TE = score_TE if choice_bias_E is None else score_TE + choice_bias_E
    if routing.num_groups > 1:
        choice_TGE = choice_TE.unflatten(1, (routing.num_groups, -1))
        group_TG = choice_TGE.topk(2, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
        is_eligible_TG = torch.zeros(choice_TGE.shape[:2], dtype=torch.bool, device=group_TG.device)
        is_eligible_TG.scatter_(1, group_TG, True)
        choice_TE = choice_TGE.masked_fill(~is_eligible_TG[..., None], float("-inf")).flatten(1)
    expert_TA = choice_TE.topk(routing.top_k, dim=-1).indices
    weight_TA = score_TE.gather(1, expert_TA)
    if routing.renormalize:
        weight_TA = weight_TA / (weight_TA.sum(-1, keepdim=True) + SMALLEST_SUM)
    return expert_TA, weight_TA * routing.scale


class LoopedExperts:
    """Experts one after the other, each for its tokens, by the linears of a kernel set."""

    def __init__(
        self,
        weights: ExpertWeights,
        activation: str,
        prepare_linear: Callable[[LinearWeight], Linear],
        gate_mul: Callable[[torch.Tensor, str], torch.Tensor],
    ) -> None:
        self.activation, self.gate_mul = activation, gate_mul
        self.gate_up = [prepare_linear(weight) for weight in weights.gate_up]
        self.down = [prepare_linear(weight) for weight in weights.down]

    def __call__(self, x_TH: torch.Tensor, expert_TA: torch.Tensor, weight_TA: torch.Tensor) -> torch.Tensor:
        """Implement `contract.Experts`. Sums are in float32, in the order of experts."""
        expert_P, order_P = expert_TA.flatten().sort(stable=True)
        token_P = order_P // expert_TA.shape[1]
        weight_P1 = weight_TA.flatten()[order_P, None]
        experts, counts = expert_P.unique_consecutive(return_counts=True)
        sum_TH, start = torch.zeros_like(x_TH, dtype=torch.float32), 0
        for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
            rows = slice(start, start + count)
            gate_up_P2F = self.gate_up[expert](x_TH[token_P[rows]])
            y_PH = self.down[expert](self.gate_mul(gate_up_P2F, self.activation))
            sum_TH.index_add_(0, token_P[rows], y_PH * weight_P1[rows])
            start += count
        return sum_TH.to(x_TH.dtype)
