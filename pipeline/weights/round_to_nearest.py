"""Quantization of a plain checkpoint at load: each weight is rounded to the nearest value of its form.

It needs no calibration, so no data and no time, but loses more than a checkpoint quantized with calibration. The output
embedding (`lm_head`) is not quantized, as in other tools.

fp8: float8_e4m3fn, one scale per output, the largest magnitude / 448. It declares activations in fp8, like vLLM's
`quantization: fp8`. int8: symmetric, q - 128 from -127 to 127, one scale per output. int4-rtn: q from 0 to 15 and a
zero point, in groups of 128 inputs. nf4: the 16 quantiles of a normal distribution in Dettmers et al., "QLoRA" (arXiv
2305.14314, appendix E), times the largest magnitude of a block of 64 inputs.
"""

from dataclasses import dataclass

import torch

from pipeline.errors import ModelError
from pipeline.weights.packed import CodebookWeight, DenseWeight, Fp8Weight, GroupIntWeight, LinearWeight
from pipeline.weights.tensor_reader import StoredLinear, groups_text

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_MAGNITUDE = 2.0**-80  # keeps quotients out of the subnormal range
METHODS: dict[str, tuple[int, int | None]] = {
    "fp8": (8, None),
    "int8": (8, None),
    "int4-rtn": (4, 128),
    "nf4": (4, 64),
}
"""Bits and inputs per scale, if the number of inputs is a multiple; None: all inputs of an output."""


@dataclass(frozen=True)
class RoundToNearest:
    """Quantization at load by one of METHODS."""

    method: str
    unused: tuple[str, ...] = ()

    @property
    def has_activations(self) -> bool:
        return self.activations is not None

    @property
    def activations(self) -> str | None:
        return "fp8" if self.method == "fp8" else None

    @property
    def has_codes(self) -> bool:
        return self.method == "nf4"

    @property
    def bits(self) -> int:
        return METHODS[self.method][0]

    @property
    def group_size(self) -> int | None:
        return METHODS[self.method][1]

    def __str__(self) -> str:
        return f"{self.method} made on load, {groups_text(self.group_size)}"

    def read_linear(self, linear: StoredLinear) -> LinearWeight:
        """Quantize one linear. Raises ModelError if it is not plain, or contains infinities or NaN."""
        dense = linear.dense()
        if linear.prefix == "lm_head":
            return dense
        return self.quantize(dense, f"{linear.prefix}.weight")

    def quantize(self, dense: DenseWeight, name: str) -> LinearWeight:
        """Quantize a weight of this name. Raises ModelError if it contains infinities or NaN."""
        weight_NK = dense.weight_NK.to(torch.float32).contiguous()
        if not bool(torch.isfinite(weight_NK).all()):
            raise ModelError(f"{name}: contains infinities or NaN")
        return {"fp8": fp8, "int8": int8, "int4-rtn": int4, "nf4": nf4}[self.method](weight_NK, dense.bias_N)


def fp8(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Fp8Weight:
    """Round each weight (N, K) in float32 to the nearest float8_e4m3fn times its output's scale, ties to even.
    Magnitudes below SMALLEST_MAGNITUDE count as that."""
    largest_N1 = torch.linalg.vector_norm(weight_NK, float("inf"), dim=1, keepdim=True)
    # Divide by a tensor: see `kernels/activations/fp8.py`.
    scale_N1 = largest_N1.clamp_min(SMALLEST_MAGNITUDE) / torch.full_like(largest_N1, LARGEST)
    return Fp8Weight((weight_NK / scale_N1).to(torch.float8_e4m3fn), scale_N1, (1, weight_NK.shape[1]), bias_N)


def int8(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> GroupIntWeight:
    """Round each weight (N, K) in float32 to the nearest of 255 values, with one scale per output."""
    scale_N1 = _not_zero(weight_NK.abs().amax(1, keepdim=True) / 127)
    q_NK = (weight_NK / scale_N1).round_().clamp_(-127, 127).add_(128)
    zeros_N1 = torch.full_like(scale_N1, 128.0)
    return GroupIntWeight(q_NK.to(torch.uint8), scale_N1, zeros_N1, weight_NK.shape[1], bias_N, 8)


def int4(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> GroupIntWeight:
    """Round each weight (N, K) in float32 to the nearest of 16 values, with a scale and a zero point per group.

    Zero is one of the values: the range of a group is extended to include it.
    """
    weight_NGg = _grouped(weight_NK, 128)
    low_NG1 = weight_NGg.amin(-1, keepdim=True).clamp_max(0)
    high_NG1 = weight_NGg.amax(-1, keepdim=True).clamp_min(0)
    scale_NG1 = _not_zero((high_NG1 - low_NG1) / 15)
    zero_NG1 = (-low_NG1 / scale_NG1).round_().clamp_(0, 15)
    q_NGg = (weight_NGg / scale_NG1).round_().add_(zero_NG1).clamp_(0, 15)
    q_NK = q_NGg.view_as(weight_NK).to(torch.uint8)
    return GroupIntWeight(q_NK, scale_NG1.squeeze(-1), zero_NG1.squeeze(-1), weight_NGg.shape[-1], bias_N)


def nf4(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> CodebookWeight:
    """Round each weight (N, K) in float32 to the nearest value of NF4, times its block's largest magnitude."""
    weight_NGg = _grouped(weight_NK, 64)
    scale_NG1 = _not_zero(weight_NGg.abs().amax(-1, keepdim=True))
    codebook_C = torch.tensor(NF4, device=weight_NK.device)
    borders = (codebook_C[1:] + codebook_C[:-1]) / 2
    code_NK = torch.bucketize(weight_NGg / scale_NG1, borders).view_as(weight_NK).to(torch.uint8)
    return CodebookWeight(code_NK, scale_NG1.squeeze(-1), codebook_C, weight_NGg.shape[-1], bias_N)


def _grouped(weight_NK: torch.Tensor, max_size: int) -> torch.Tensor:
    """Reshape to (N, G, g) with the largest g of `max_size` and its halves down to 32 that divides the inputs; else to
    one group."""
    inputs = weight_NK.shape[1]
    size = next((size for size in (128, 64, 32) if size <= max_size and inputs % size == 0), inputs)
    return weight_NK.view(len(weight_NK), -1, size)


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    """Replace scales of 0, of groups with only zeros, by 1."""
    return torch.where(scale == 0, 1.0, scale)
