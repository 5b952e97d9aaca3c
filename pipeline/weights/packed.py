"""Canonical weights of a linear layer: readers convert checkpoint formats to these, and kernels read only these.

Shapes: N output features, K input features, g group size, G groups, C entries of a codebook.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from pipeline.errors import ModelError

MIN_CUT_GROUP = 16
"""Minimum number of inputs per scale after `select_inputs`: the smallest group that kernels read packed (NVFP4)."""


@dataclass(frozen=True)
class DenseWeight:
    """Dense weight `weight_NK` in a floating type; y = x @ weight.T + bias."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.weight_NK.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight_NK.shape[1]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`."""
        return self.weight_NK.to(dtype)


@dataclass(frozen=True)
class GroupIntWeight:
    """Unsigned 4- or 8-bit integers with a scale and a zero point per output and group of `group_size` inputs.

    weight = (q_NK - zeros_NG) * scales_NG, with the group index k // group_size. `q_NK` has one value per byte. Zero
    points have the type of the scales (float32). They are integers, in symmetric checkpoints 8 or 128, except for GGUF
    types with a minimum per group, where they are -minimum / scale. One scale per output means one group of K inputs.
    If `input_order_K` is given, column j of `q_NK` is input input_order_K[j], for checkpoints whose groups are not
    contiguous: y = x[:, input_order_K] @ weight.T + bias.
    """

    q_NK: torch.Tensor
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor
    group_size: int
    bias_N: torch.Tensor | None = None
    bits: int = 4
    input_order_K: torch.Tensor | None = None  # int64

    @property
    def out_features(self) -> int:
        return self.q_NK.shape[0]

    @property
    def in_features(self) -> int:
        return self.q_NK.shape[1]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as a dense (N, K) tensor: exact in float32, rounded once if `dtype` is narrower."""
        n, k = self.q_NK.shape
        q_NGg = self.q_NK.view(n, k // self.group_size, self.group_size).to(torch.float32)
        q_NGg.sub_(self.zeros_NG.unsqueeze(-1)).mul_(self.scales_NG.unsqueeze(-1))  # in place: 4 bytes per weight
        w_NK = q_NGg.view(n, k).to(dtype)
        if self.input_order_K is None:
            return w_NK
        return torch.empty_like(w_NK).index_copy_(1, self.input_order_K, w_NK)


@dataclass(frozen=True)
class CodebookWeight:
    """4-bit codes of `codebook_C` (16 float32 values) with a scale per output and group of `group_size` inputs.

    weight = codebook_C[code_NK] * scales_NG, with the group index k // group_size; one code (0..15) per byte.
    """

    code_NK: torch.Tensor
    scales_NG: torch.Tensor
    codebook_C: torch.Tensor
    group_size: int
    bias_N: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.code_NK.shape[0]

    @property
    def in_features(self) -> int:
        return self.code_NK.shape[1]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as a dense (N, K) tensor, rounded to float32, and again if `dtype` is narrower."""
        n, k = self.code_NK.shape
        value_NGg = self.codebook_C[self.code_NK.to(torch.int32)].view(n, -1, self.group_size)
        return value_NGg.mul_(self.scales_NG.unsqueeze(-1)).view(n, k).to(dtype)


@dataclass(frozen=True)
class Fp8Weight:
    """float8_e4m3fn values with a float32 scale per block of `block` (outputs, inputs).

    weight[n, k] = value_NK[n, k] * scales_RG[n // block[0], k // block[1]]; the last blocks may be incomplete. A scale
    for the whole weight is a block of (N, K), one per output a block of (1, K).
    """

    value_NK: torch.Tensor
    scales_RG: torch.Tensor
    block: tuple[int, int]
    bias_N: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.value_NK.shape[0]

    @property
    def in_features(self) -> int:
        return self.value_NK.shape[1]

    @property
    def scales_NG(self) -> torch.Tensor:
        """Scales of each output: rows of blocks repeated for the outputs in them."""
        return self.scales_RG.repeat_interleave(self.block[0], 0)[: self.out_features]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as a dense (N, K) tensor, rounded to float32, and again if `dtype` is narrower."""
        scale_NK = self.scales_NG.repeat_interleave(self.block[1], 1)[:, : self.in_features]
        return self.value_NK.to(torch.float32).mul_(scale_NK).to(dtype)


@dataclass(frozen=True)
class StackedWeight:
    """Weights of several forms that read the same input; their outputs follow each other."""

    parts: tuple[DenseWeight | GroupIntWeight | CodebookWeight | Fp8Weight, ...]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def bias_N(self) -> torch.Tensor | None:
        return _joined_bias(self.parts)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as a dense (N, K) tensor, each part rounded like its own `dequantize`."""
        return torch.cat([part.dequantize(dtype) for part in self.parts])


LinearWeight = DenseWeight | GroupIntWeight | CodebookWeight | Fp8Weight | StackedWeight


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of a layer's experts, all of one shape: gate and up of each, fused as in a dense layer, and down."""

    gate_up: tuple[LinearWeight, ...]
    down: tuple[LinearWeight, ...]


def concatenate(parts: list[LinearWeight]) -> LinearWeight:
    """Fuse linears that read the same input (q, k, v; gate and up) into one, by concatenating their outputs.

    Neighbours of one form (kind, bits, group size, order of inputs) become one weight. If the forms differ, the result
    is a `StackedWeight`.
    """
    if (fused := _fused(parts)) is not None:
        return fused
    stack: list[Any] = []
    for part in parts:
        fused = _fused([stack[-1], part]) if stack else None
        stack[-1:] = [fused] if fused is not None else [*stack[-1:], part]
    return StackedWeight(tuple(stack))


def _fused(parts: list[LinearWeight]) -> LinearWeight | None:
    """Return one weight for parts of one form; else None."""
    bias_N = _joined_bias(parts)
    dense = [p for p in parts if isinstance(p, DenseWeight)]
    if len(dense) == len(parts):
        return DenseWeight(torch.cat([p.weight_NK for p in dense]), bias_N)
    return _fused_groups(parts, bias_N) or _fused_codebooks(parts, bias_N) or _fused_fp8(parts, bias_N)


def _joined_bias(parts: Sequence[LinearWeight]) -> torch.Tensor | None:
    biases = [p.bias_N for p in parts]
    if all(b is None for b in biases):
        return None
    device = next(b.device for b in biases if b is not None)
    filled = [b if b is not None else torch.zeros(p.out_features, device=device) for p, b in zip(parts, biases)]
    return torch.cat([b.to(torch.float32) for b in filled])


def select_outputs(weight: LinearWeight, row_N: torch.Tensor) -> LinearWeight:
    """Return the linear of these outputs (int64), in this order. For a `StackedWeight`, outputs of one part are
    consecutive, and parts keep their order."""
    if isinstance(weight, StackedWeight):
        ends = torch.tensor([part.out_features for part in weight.parts]).cumsum(0)
        part_N = torch.bucketize(row_N.cpu(), ends, right=True)
        assert bool((part_N.diff() >= 0).all()), "outputs of different forms are not mixed"
        starts = [0, *ends.tolist()]
        rows = [row_N[(part_N == index).to(row_N.device)] - starts[index] for index in range(len(weight.parts))]
        chosen = [select_outputs(part, of_part) for part, of_part in zip(weight.parts, rows, strict=True)]
        return StackedWeight(tuple(chosen))  # type: ignore[arg-type]
    bias_N = None if weight.bias_N is None else weight.bias_N[row_N]
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.weight_NK.index_select(0, row_N), bias_N)  # faster than an index
    if isinstance(weight, Fp8Weight):
        value_NK = weight.value_NK.view(torch.uint8)[row_N].view(weight.value_NK.dtype)
        return Fp8Weight(value_NK, weight.scales_NG[row_N], (1, weight.block[1]), bias_N)
    if isinstance(weight, CodebookWeight):
        codes_NK, scales_NG = weight.code_NK[row_N], weight.scales_NG[row_N]
        return CodebookWeight(codes_NK, scales_NG, weight.codebook_C, weight.group_size, bias_N)
    values = weight.q_NK[row_N], weight.scales_NG[row_N], weight.zeros_NG[row_N]
    return GroupIntWeight(*values, weight.group_size, bias_N, weight.bits, weight.input_order_K)


def select_inputs(weight: LinearWeight, start: int, stop: int) -> LinearWeight:
    """Return the linear that reads only inputs start:stop, without bias.

    The products over a partition of the inputs add up to the whole product. A group or block that `start` or `stop`
    cuts is replaced by smaller ones with its scale, which changes no weight. Raises ModelError if these would have
    fewer than MIN_CUT_GROUP inputs.
    """
    assert not isinstance(weight, StackedWeight), "only linears of one part are divided by inputs"
    if isinstance(weight, DenseWeight):
        return DenseWeight(_columns(weight.weight_NK, start, stop))
    if isinstance(weight, GroupIntWeight) and weight.input_order_K is not None:
        # The range has part of each group, and not the same number of inputs of each: no group size describes that.
        return DenseWeight(_columns(weight.dequantize(torch.float32), start, stop))
    if isinstance(weight, Fp8Weight):
        size, index_G = _cut_groups(weight, weight.block[1], start, stop)
        value_NK = _columns(weight.value_NK, start, stop)
        return Fp8Weight(value_NK, weight.scales_RG[:, index_G], (weight.block[0], size))
    size, index_G = _cut_groups(weight, weight.group_size, start, stop)
    scales_NG = weight.scales_NG[:, index_G]
    if isinstance(weight, CodebookWeight):
        return CodebookWeight(_columns(weight.code_NK, start, stop), scales_NG, weight.codebook_C, size)
    values = _columns(weight.q_NK, start, stop), scales_NG, weight.zeros_NG[:, index_G]
    return GroupIntWeight(*values, size, bits=weight.bits)


def _columns(values_NK: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return values_NK[:, start:stop].contiguous()  # a view would keep the whole weight in memory


def _cut_groups(weight: LinearWeight, group_size: int, start: int, stop: int) -> tuple[int, torch.Tensor]:
    """Return the size of the groups of inputs start:stop, and the index in `weight` of each group's scale."""
    if group_size >= weight.in_features:  # one scale per output
        return stop - start, torch.zeros(1, dtype=torch.int64)
    size = gcd(group_size, start, stop - start)
    if size < MIN_CUT_GROUP:
        raise ModelError(
            f"a weight of {weight.in_features:,} inputs with a scale per {group_size} inputs cannot be split at inputs "
            f"{start:,} and {stop:,}: a scale per {size} inputs is not supported, only per {MIN_CUT_GROUP} or more. "
            f"Choose an engine.tensor_parallel_size that gives each GPU a multiple of {MIN_CUT_GROUP} of these inputs, "
            "or a 16-bit checkpoint"
        )
    return size, torch.arange(start, stop, size) // group_size


def _fused_groups(parts: list[LinearWeight], bias_N: torch.Tensor | None) -> GroupIntWeight | None:
    groups = [p for p in parts if isinstance(p, GroupIntWeight)]
    if len(groups) < len(parts) or len({(p.bits, p.group_size) for p in groups}) > 1:
        return None
    orders, first = [p.input_order_K for p in groups], groups[0]
    if not all(_same_order(order, orders[0]) for order in orders):
        return None
    return GroupIntWeight(
        torch.cat([p.q_NK for p in groups]),
        torch.cat([p.scales_NG for p in groups]),
        torch.cat([p.zeros_NG for p in groups]),
        first.group_size,
        bias_N,
        first.bits,
        first.input_order_K,
    )


def _same_order(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _fused_codebooks(parts: list[LinearWeight], bias_N: torch.Tensor | None) -> CodebookWeight | None:
    coded = [p for p in parts if isinstance(p, CodebookWeight)]
    if len(coded) < len(parts) or len({p.group_size for p in coded}) > 1:
        return None
    if not all(torch.equal(p.codebook_C, coded[0].codebook_C) for p in coded):
        return None
    return CodebookWeight(
        torch.cat([p.code_NK for p in coded]),
        torch.cat([p.scales_NG for p in coded]),
        coded[0].codebook_C,
        coded[0].group_size,
        bias_N,
    )


def _fused_fp8(parts: list[LinearWeight], bias_N: torch.Tensor | None) -> Fp8Weight | None:
    """Fuse fp8 weights, with one row of scales per output if parts do not end at block borders."""
    floats = [p for p in parts if isinstance(p, Fp8Weight)]
    if len(floats) < len(parts) or len({p.block[1] for p in floats}) > 1:
        return None
    value_NK, (rows, columns) = torch.cat([p.value_NK for p in floats]), floats[0].block
    if all(p.block[0] == rows and p.out_features % rows == 0 for p in floats) and rows < floats[0].out_features:
        return Fp8Weight(value_NK, torch.cat([p.scales_RG for p in floats]), (rows, columns), bias_N)
    return Fp8Weight(value_NK, torch.cat([p.scales_NG for p in floats]), (1, columns), bias_N)
