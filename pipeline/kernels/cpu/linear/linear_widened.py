"""float32 linears that read a weight in its stored type: bfloat16, 4-bit integers or codes, 8-bit integers or floats.

Widening each to float32 is exact where the dense float32 weight would be, so the results are the same. With few tokens
a linear takes as long as reading its weight, and half or an eighth of the bytes takes that much less time. With many
tokens the multiplication dominates, and widening adds little. Codes are looked up in a table one by one, which is the
slowest widening.
"""

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.kernels.cpu.linear.tiled_linear import TiledLinear
from pipeline.kernels.cpu.linear.widening import FLOAT8_EXPONENT
from pipeline.kernels.cpu.tiles.weight_tiles import bf16_tiles, tiles, word_tiles
from pipeline.weights.packed import CodebookWeight, DenseWeight, Fp8Weight, GroupIntWeight, LinearWeight

FLOAT8_SCALE_LIMIT = 128.0
"""Scales are stored times 2^120; float32 can represent the product below this limit."""


def widened_linear(weight: LinearWeight) -> TiledLinear | None:
    """Return the linear that reads `weight` in its stored type; None if it must be widened at load.

    x is passed in the weight's order of inputs.
    """
    shape_NK, bias_N = (weight.out_features, weight.in_features), weight.bias_N
    if isinstance(weight, DenseWeight):
        weight_NK = _as_bfloat16(weight.weight_NK)
        return None if weight_NK is None else TiledLinear("bfloat16", shape_NK, bias_N, bf16_tiles(weight_NK))
    if isinstance(weight, GroupIntWeight):
        if weight.group_size % (32 // weight.bits):
            return None
        words_TWL = word_tiles(weight.q_NK.numpy(), tuple(range(32 // weight.bits)))
        scales_TGL, zeros_TGL = (tiles(each.to(torch.float32).numpy()) for each in (weight.scales_NG, weight.zeros_NG))
        return TiledLinear(f"int{weight.bits}", shape_NK, bias_N, words_TWL, scales_TGL, zeros_TGL, weight.group_size)
    if isinstance(weight, CodebookWeight):
        if weight.group_size % 8:
            return None
        words_TWL = word_tiles(weight.code_NK.numpy(), tuple(range(8)))
        scales_TGL, codebook_C = tiles(weight.scales_NG.numpy()), weight.codebook_C.numpy()
        return TiledLinear("codebook4", shape_NK, bias_N, words_TWL, scales_TGL, codebook_C, weight.group_size)
    if not isinstance(weight, Fp8Weight):
        return None
    fits = weight.in_features % 4 == 0 and weight.block[1] % 4 == 0
    if not fits or float(weight.scales_RG.abs().max()) >= FLOAT8_SCALE_LIMIT:
        return None
    words_TWL = word_tiles(weight.value_NK.view(torch.uint8).numpy(), tuple(range(4)))
    scales_TGL = tiles(weight.scales_NG.numpy() * FLOAT8_EXPONENT)
    return TiledLinear("float8", shape_NK, bias_N, words_TWL, scales_TGL, None, weight.block[1])


class Float8Linear:
    """Linear of an fp8 weight in bfloat16, whose only copy is that of `stored` (`widened_linear`): multiplied by it up
    to `crossover` tokens, above that widened to bfloat16 in each call."""

    def __init__(self, weight: Fp8Weight, stored: TiledLinear, crossover: int) -> None:
        self.stored, self.scales_RG, self.block, self.crossover = stored, weight.scales_RG, weight.block, crossover
        self.bias_N = None if weight.bias_N is None else weight.bias_N.to(torch.bfloat16)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        if len(x_TK) <= self.crossover:
            return self.stored(x_TK.float()).to(x_TK.dtype)
        return F.linear(x_TK, self.widened(), self.bias_N)

    def widened(self) -> torch.Tensor:
        words_TWL, (num_outputs, num_inputs) = self.stored.words_TWL, self.stored.shape_NK
        byte_TWLJ = words_TWL.view(np.uint8).reshape(*words_TWL.shape, 4)  # processors are little-endian
        code_NK = byte_TWLJ.transpose(0, 2, 1, 3).reshape(-1, num_inputs)[:num_outputs]
        value_NK = torch.from_numpy(code_NK).view(torch.float8_e4m3fn)
        return Fp8Weight(value_NK, self.scales_RG, self.block).dequantize(torch.bfloat16)


def float32_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> TiledLinear:
    """Return the linear of a weight that needs float32, if the order of its sums must not be the BLAS library's."""
    num_outputs, num_inputs = weight_NK.shape
    return TiledLinear("float32", (num_outputs, num_inputs), bias_N, tiles(weight_NK.numpy()))


def _as_bfloat16(weight_NK: torch.Tensor) -> torch.Tensor | None:
    """Return the weight in bfloat16 if that is exact and the number of inputs is a multiple of 8; else None."""
    if weight_NK.shape[1] % 8:
        return None
    if weight_NK.dtype == torch.bfloat16:
        return weight_NK
    narrow = weight_NK.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(weight_NK.dtype), weight_NK) else None
