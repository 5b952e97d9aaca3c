"""Experts' weights as the grouped product reads them: stacked, and in the order of its loop.

Suffixes: E experts, N outputs, K inputs, B blocks of 128 inputs, C chunks of 256, W words of a block, G groups of a
block or a chunk, F width between up and down.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F

from pipeline.kernels.triton.launch import CompileTarget
from pipeline.kernels.triton.linear import e4m3
from pipeline.kernels.triton.linear.e4m3 import TiledE4m3
from pipeline.kernels.triton.linear.int4 import (
    BLOCK,
    TiledInt4,
    adjacent_inputs,
    has_minima,
    narrowest,
    supports,
    words_of_codes,
)
from pipeline.kernels.triton.linear.minifloat import POWERS
from pipeline.weights.fp4 import E2M1
from pipeline.weights.packed import (
    CodebookWeight,
    DenseWeight,
    Fp8Weight,
    GroupIntWeight,
    LinearWeight,
    select_outputs,
)

_Weight = TypeVar("_Weight")


@dataclass(frozen=True)
class GroupedWeights:
    """Weights of one linear of all experts.

    form, value and scale: "dense", (E, N, K), None; "int4", the words and groups of `TiledInt4`, (E, B, N, W) and
    (E, C, N, G, 2); "e4m3" and "e2m1", words and scales of `minifloat.py`, (E, B, N, W) and (E, B, N) or (E, B, N, G).
    group_size: inputs that share a scale, up to a block. adjacent: order of words, see `linear/int4.py`.
    """

    form: str
    value: torch.Tensor
    scale: torch.Tensor | None
    bias_EN: torch.Tensor | None
    num_outputs: int
    num_inputs: int
    group_size: int = BLOCK
    adjacent: int = 2

    @property
    def num_experts(self) -> int:
        return len(self.value)

    @property
    def num_bytes(self) -> int:
        tensors = (self.value, self.scale, self.bias_EN)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    @classmethod
    def stack(
        cls, weights: Sequence[LinearWeight], dtype: torch.dtype, device: torch.device, target: CompileTarget
    ) -> "GroupedWeights | None":
        """Stack experts' weights on `device`; None if the grouped product does not support them."""
        adjacent = adjacent_inputs(target)
        packed = (
            _packed(weights, DenseWeight, lambda _: True, lambda each: (each.weight_NK.to(device, dtype),))
            or _packed(weights, GroupIntWeight, _is_int4, lambda each: _int4(each, device, adjacent))
            or _packed(weights, Fp8Weight, e4m3.supports, lambda each: _e4m3(each, device, adjacent))
            or _packed(weights, CodebookWeight, _is_e2m1, lambda each: _e2m1(each, dtype, device, adjacent))
        )
        if packed is None:
            return None
        first, biases = weights[0], [each.bias_N for each in weights]
        bias_EN = None
        if any(bias_N is not None for bias_N in biases):
            none_N = torch.zeros(first.out_features)
            bias_EN = _stacked((none_N if bias_N is None else bias_N).to(device, dtype) for bias_N in biases)
        form = {DenseWeight: "dense", GroupIntWeight: "int4", Fp8Weight: "e4m3", CodebookWeight: "e2m1"}[type(first)]
        group_size = first.group_size if isinstance(first, GroupIntWeight | CodebookWeight) else BLOCK
        return cls(
            *(form, packed[0], packed[1] if len(packed) > 1 else None, bias_EN),
            *(first.out_features, first.in_features, min(BLOCK, group_size), adjacent),
        )


def interleaved(weights: Sequence[LinearWeight]) -> list[LinearWeight]:
    """Alternate the outputs of gate and up, so that one program computes both of an output."""
    row_N = torch.arange(weights[0].out_features).view(2, -1).t().flatten()
    return [select_outputs(each, row_N) for each in weights]


def _packed(
    weights: Sequence[LinearWeight],
    form: type[_Weight],
    is_supported: Callable[[_Weight], bool],
    pack: Callable[[_Weight], tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...] | None:
    """Return each tensor that `pack` makes, stacked over experts; None unless all weights have this supported form."""
    of_form = [each for each in weights if isinstance(each, form)]
    group_sizes = {getattr(each, "group_size", None) for each in weights}
    if len(of_form) < len(weights) or len(group_sizes) > 1 or not all(map(is_supported, of_form)):
        return None
    packed = [pack(each) for each in of_form]
    # One type per tensor: experts' scales may be exact in different types.
    return tuple(_stacked(_of_widest_type(tensors)) for tensors in zip(*packed))


def _of_widest_type(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    types = {tensor.dtype for tensor in tensors}
    return [tensor.to(torch.float32) for tensor in tensors] if len(types) > 1 else list(tensors)


def _stacked(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).contiguous()


def _is_int4(weight: GroupIntWeight) -> bool:
    return weight.input_order_K is None and supports(weight) and not has_minima(weight)


def _int4(weight: GroupIntWeight, device: torch.device, adjacent: int) -> tuple[torch.Tensor, torch.Tensor]:
    tiled = TiledInt4.repack(weight, device, adjacent)
    return tiled.word_BNW, tiled.group_CNG2


def _e4m3(weight: Fp8Weight, device: torch.device, adjacent: int) -> tuple[torch.Tensor, torch.Tensor]:
    tiled = TiledE4m3.repack(weight, device, adjacent)
    return tiled.word_BNW, tiled.scale_BN


def _is_e2m1(weight: CodebookWeight) -> bool:
    """Return whether the codes are e2m1, and scales times the power (`POWERS`) are finite."""
    is_small = bool((weight.scales_NG.abs() <= 2).all())
    return weight.group_size in (16, 32) and is_small and weight.codebook_C.tolist() == [*E2M1]


def _e2m1(
    weight: CodebookWeight, dtype: torch.dtype, device: torch.device, adjacent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    code_NK = _padded(weight.code_NK.to(device))
    per_block = BLOCK // weight.group_size
    scale_NG = weight.scales_NG.to(device, torch.float32) * 2.0 ** POWERS[dtype]
    is_exact = torch.equal(scale_NG.to(dtype).to(torch.float32), scale_NG)
    scale_NG = scale_NG.to(dtype) if is_exact else narrowest(scale_NG)
    scale_NG = F.pad(scale_NG, (0, code_NK.shape[1] // weight.group_size - scale_NG.shape[1]))
    return words_of_codes(code_NK, 4, adjacent), scale_NG.unflatten(1, (-1, per_block)).transpose(0, 1).contiguous()


def _padded(code_NK: torch.Tensor) -> torch.Tensor:
    return F.pad(code_NK, (0, -code_NK.shape[1] % BLOCK))
