"""Values that a quantized linear may take: integers with a scale and a zero point per output and group of inputs, or
8-bit floats with a scale per output.

Shape suffixes: N outputs, K inputs, g inputs of a group, G groups.
"""

from dataclasses import dataclass

import torch

SMALLEST_SCALE = 2.0**-24  # the smallest positive float16
LARGEST_FLOAT8 = 448.0  # of float8_e4m3fn; larger values become NaN


@dataclass(frozen=True)
class IntLinear:
    """Linear with weight[n, k] = (q[n, k] - zeros[n, k // g]) * scales[n, k // g], q and zeros from 0 to 2^bits - 1.

    `scales_NG` has the type in which it is stored.
    """

    q_NK: torch.Tensor  # uint8
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor  # uint8
    bits: int

    def dequantize(self) -> torch.Tensor:
        """Return the exact weight (N, K) in float32."""
        q_NGg = self.q_NK.float().view(*self.scales_NG.shape, -1)
        return ((q_NGg - self.zeros_NG[..., None]) * self.scales_NG.float()[..., None]).view_as(self.q_NK)

    def rows(self, row_N: torch.Tensor) -> "IntLinear":
        """Return these outputs, in this order."""
        return IntLinear(self.q_NK[row_N], self.scales_NG[row_N], self.zeros_NG[row_N], self.bits)


def group_grid(
    weight_NK: torch.Tensor, group_size: int, bits: int, dtype: torch.dtype, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales, in `dtype`, and zeros (uint8) (N, G), with which the integers cover the weights of each group.

    Their range is from the lowest weight to the highest, extended to include 0. symmetric: from -max|w| to max|w|, and
    the zero is 2^(bits - 1), so that they end half a step before max|w|. Both as in GPTQ and compressed-tensors.
    """
    top, weight_NGg = 2**bits - 1, weight_NK.view(len(weight_NK), -1, group_size)
    low_NG, high_NG = weight_NGg.amin(-1).clamp_max(0), weight_NGg.amax(-1).clamp_min(0)
    if symmetric:
        high_NG = torch.maximum(high_NG, -low_NG)
        low_NG = -high_NG
    scales_NG = ((high_NG - low_NG) / top).clamp_min(SMALLEST_SCALE).to(dtype)
    zeros_NG = torch.full_like(low_NG, 2 ** (bits - 1)) if symmetric else (-low_NG / scales_NG.float()).round()
    return scales_NG, zeros_NG.clamp(0, top).to(torch.uint8)


def to_grid(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers (uint8) nearest to weights, with their scales and zeros."""
    return (torch.round(weight / scale.float()) + zero).clamp(0, 2**bits - 1).to(torch.uint8)


def round_to_nearest(
    weight_NK: torch.Tensor, bits: int, group_size: int, dtype: torch.dtype, symmetric: bool = False
) -> IntLinear:
    """Round every weight to the nearest integer of its group of `group_size` inputs, with scales in `dtype`."""
    weight_NK = weight_NK.float()
    scales_NG, zeros_NG = group_grid(weight_NK, group_size, bits, dtype, symmetric)
    weight_NGg = weight_NK.view(len(weight_NK), -1, group_size)
    q_NGg = to_grid(weight_NGg, scales_NG[..., None], zeros_NG[..., None], bits)
    return IntLinear(q_NGg.view_as(weight_NK), scales_NG, zeros_NG, bits)


@dataclass(frozen=True)
class FloatLinear:
    """Linear with weight[n, k] = value[n, k] * scales[n, 0], values in float8_e4m3fn."""

    value_NK: torch.Tensor
    scales_N1: torch.Tensor

    def rows(self, row_N: torch.Tensor) -> "FloatLinear":
        """Return these outputs, in this order."""
        return FloatLinear(self.value_NK[row_N], self.scales_N1[row_N])


def to_float8(weight_NK: torch.Tensor, dtype: torch.dtype) -> FloatLinear:
    """Round every weight to the nearest 8-bit float, with an output's largest weight at 448, and scales in `dtype`."""
    weight_NK = weight_NK.float()
    scales_N1 = (weight_NK.abs().amax(dim=1, keepdim=True) / LARGEST_FLOAT8).clamp_min(SMALLEST_SCALE).to(dtype)
    value_NK = (weight_NK / scales_N1.float()).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return FloatLinear(value_NK.to(torch.float8_e4m3fn), scales_N1)
