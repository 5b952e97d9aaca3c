"""Values that a quantized linear may take: symmetric integers with a scale per output and group of inputs, or 8-bit
floats with a scale per output.

Shape suffixes: N outputs, K inputs, g inputs of a group, G groups.
"""

from dataclasses import dataclass

import torch

SMALLEST_SCALE = 2.0**-24  # the smallest positive float16
LARGEST_FLOAT8 = 448.0  # of float8_e4m3fn; larger values become NaN


@dataclass(frozen=True)
class IntLinear:
    """Linear with weight[n, k] = (q[n, k] - 2^(bits - 1)) * scales[n, group_K[k]], q from 0 to 2^bits - 1.

    `scales_NG` has the type in which it is stored. `group_K` is k // g, unless inputs were grouped in another order.
    """

    q_NK: torch.Tensor  # uint8
    scales_NG: torch.Tensor
    group_K: torch.Tensor  # int32
    bits: int

    @property
    def group_size(self) -> int:
        return self.q_NK.shape[1] // self.scales_NG.shape[1]

    def dequantize(self) -> torch.Tensor:
        """Return the exact weight (N, K) in float32."""
        centered_NK = self.q_NK.float() - 2 ** (self.bits - 1)
        return centered_NK * self.scales_NG.float()[:, self.group_K.long()]

    def rows(self, row_N: torch.Tensor) -> "IntLinear":
        """Return these outputs, in this order."""
        return IntLinear(self.q_NK[row_N], self.scales_NG[row_N], self.group_K, self.bits)


def group_scales(weight_Ng: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale (N, 1) that maps the largest of a group's weights half a step inside the range, in `dtype`.

    scale = 2 max|w| / (2^bits - 1), as in GPTQ and compressed-tensors.
    """
    scale_N1 = weight_Ng.abs().amax(dim=1, keepdim=True) * (2 / (2**bits - 1))
    return scale_N1.clamp_min(SMALLEST_SCALE).to(dtype)


def to_grid(weight_Ng: torch.Tensor, scale_N1: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers (uint8) nearest to `weight_Ng`."""
    half = 2 ** (bits - 1)
    return (torch.round(weight_Ng / scale_N1.float()) + half).clamp(0, 2 * half - 1).to(torch.uint8)


def round_to_nearest(weight_NK: torch.Tensor, bits: int, group_size: int, dtype: torch.dtype) -> IntLinear:
    """Round every weight to the nearest integer of its group of `group_size` inputs, with scales in `dtype`."""
    n, k = weight_NK.shape
    weight_Xg = weight_NK.float().reshape(-1, group_size)
    scales_X1 = group_scales(weight_Xg, bits, dtype)
    q_NK = to_grid(weight_Xg, scales_X1, bits).view(n, k)
    group_K = torch.arange(k, dtype=torch.int32, device=weight_NK.device) // group_size
    return IntLinear(q_NK, scales_X1.view(n, -1), group_K, bits)


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
