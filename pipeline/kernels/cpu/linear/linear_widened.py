"""float32 linears that read a weight in its stored type: bfloat16, 4-bit integers or codes, 8-bit integers or floats.

Widening each to float32 is exact where the dense float32 weight would be, so the results are the same. With few tokens
a linear takes as long as reading its weight, and half or an eighth of the bytes takes that much less time. With many
tokens the multiplication dominates, and widening adds little. Codes are looked up in a table one by one, which is the
slowest widening.
"""

import torch

from pipeline.kernels.cpu.linear.tiled_linear import TiledLinear
from pipeline.kernels.cpu.linear.widening import FLOAT8_EXPONENT
from pipeline.kernels.cpu.tiles.weight_tiles import bf16_tiles, tiles, word_tiles
from pipeline.weights.packed import CodebookWeight, DenseWeight, GroupIntWeight, LinearWeight

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
    fits = weight.in_features % 4 == 0 and weight.block[1] % 4 == 0
    if not fits or float(weight.scales_RG.abs().max()) >= FLOAT8_SCALE_LIMIT:
        return None
    words_TWL = word_tiles(weight.value_NK.view(torch.uint8).numpy(), tuple(range(4)))
    scales_TGL = tiles(weight.scales_NG.numpy() * FLOAT8_EXPONENT)
    return TiledLinear("float8", shape_NK, bias_N, words_TWL, scales_TGL, None, weight.block[1])


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
