"""The feed-forwards of a layer's experts in four launches. Implements `contract.Experts`.

One launch lists the pairs of a token and an expert by expert, one multiplies by gate and up and applies the activation,
one multiplies by down, and one sums a token's experts. A single token needs no list.

Suffixes are those of `kernels/contract.py`; P: pairs.
"""

from collections.abc import Sequence

import torch

from pipeline.kernels.triton.experts.grouped_product import grouped_launch, tile_for
from pipeline.kernels.triton.experts.pairs import combine_launch, pairs_by_expert
from pipeline.kernels.triton.experts.weights import GroupedWeights, interleaved
from pipeline.kernels.triton.launch import CompileTarget
from pipeline.weights.packed import DenseWeight, ExpertWeights, LinearWeight


class GroupedExperts:
    """Experts whose tokens are multiplied in one launch per linear."""

    def __init__(
        self,
        gate_up: GroupedWeights,
        down: GroupedWeights,
        activation: str,
        target: CompileTarget,
        is_fixed: bool = False,
    ) -> None:
        """gate_up: interleaved. is_fixed: a token's bits do not depend on the rest of the step."""
        self.gate_up, self.down, self.activation = gate_up, down, activation
        self.target, self.is_fixed = target, is_fixed

    def __call__(self, x_TH: torch.Tensor, expert_TA: torch.Tensor, weight_TA: torch.Tensor) -> torch.Tensor:
        y_TH, num_pairs = torch.empty_like(x_TH, memory_format=torch.contiguous_format), expert_TA.numel()
        if num_pairs == 0:
            return y_TH
        pairs = pairs_by_expert(expert_TA, self.gate_up.num_experts)
        up_PF = x_TH.new_empty(num_pairs, self.down.num_inputs)
        y_PH = x_TH.new_empty(num_pairs, self.down.num_outputs)
        for x, weights, pairs_per_row, out, activation in (
            (x_TH, self.gate_up, expert_TA.shape[1], up_PF, self.activation),
            (up_PF, self.down, 1, y_PH, None),
        ):
            tile = tile_for(num_pairs, weights, x_TH.dtype, self.target, self.is_fixed)
            grouped_launch(x, weights, pairs, pairs_per_row, out, self.target, activation, tile).run()
        combine_launch(y_PH, weight_TA, y_TH).run()
        return y_TH


def prepare_experts(
    weights: ExpertWeights, activation: str, dtype: torch.dtype, device: torch.device, deterministic: bool = False
) -> GroupedExperts:
    """Pack experts for a GPU. Weights in a form that the grouped product does not support are widened to `dtype`."""
    target = CompileTarget.from_device(device)

    def stacked(linears: Sequence[LinearWeight]) -> GroupedWeights:
        packed = GroupedWeights.stack(linears, dtype, device, target)
        if packed is None:
            widened = [DenseWeight(each.dequantize(dtype), each.bias_N) for each in linears]
            packed = GroupedWeights.stack(widened, dtype, device, target)
        assert packed is not None, "dense weights are supported"
        return packed

    gate_up, down = stacked(interleaved(weights.gate_up)), stacked(weights.down)
    return GroupedExperts(gate_up, down, activation, target, deterministic)
