"""float32 linears whose weight is read as narrow as it was stored: bfloat16, integers or codes of 4 bits, integers or
floats of 8.

Widening either to float32 rounds nothing that the dense float32 weight would not round, so these compute what that
would. With few tokens the time of a linear is that of reading its weight, and a half or an eighth of the bytes takes as
much less of it. With many it is the multiplication; widening adds little. Codes are looked up in a table one by one,
which is the slowest widening.
"""

import torch

from pipeline.kernels.cpu.linear.tiled_linear import TiledLinear
from pipeline.kernels.cpu.linear.widening import FLOAT8_EXPONENT
from pipeline.kernels.cpu.tiles.weight_tiles import bf16_tiles, tiles, word_tiles
from pipeline.weights.packed import CodebookWeight, DenseWeight, GroupIntWeight, LinearWeight

FLOAT8_SCALE_LIMIT = 128.0
"""Scales are kept times 2^120, which float32 holds below this."""


def widened_linear(weight: LinearWeight) -> TiledLinear | None:
    """The linear that reads `weight` as it is; None where none does and it has to be widened at load. x comes in the
    weight's order of inputs."""
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
    """Of a weight that no narrower type holds, where the order of sums must not be the BLAS library's."""
    num_outputs, num_inputs = weight_NK.shape
    return TiledLinear("float32", (num_outputs, num_inputs), bias_N, tiles(weight_NK.numpy()))


def _as_bfloat16(weight_NK: torch.Tensor) -> torch.Tensor | None:
    """The weight in bfloat16 where that loses nothing and its inputs come in eights."""
    if weight_NK.shape[1] % 8:
        return None
    if weight_NK.dtype == torch.bfloat16:
        return weight_NK
    narrow = weight_NK.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(weight_NK.dtype), weight_NK) else None
