"""bfloat16 linears by products of pairs, for processors with AVX-512 BF16 but without units for larger tiles.

One form of a weight serves every number of tokens: bfloat16, or 4 bits as stored. A word holds eight 4-bit weights,
ordered so that bits 4 j to 4 j + 3 of its halves are inputs 2 j and 2 j + 1 of the eight: one mask and the exponent's
bits turn 128 + q into a pair of bfloat16. The 128 is subtracted along with the zero point. Scales are applied in
float32 at the end of each group, so the weight itself is never rounded.
"""

from dataclasses import replace

import numpy as np
import torch

from pipeline.kernels.cpu.compile.processor import HAS_AMX, HAS_AVX512_BF16
from pipeline.kernels.cpu.linear.tiled_linear import Scratch, TiledLinear
from pipeline.kernels.cpu.tiles.weight_tiles import bf16_tiles, narrow_scales, narrow_zeros, tiles, word_tiles
from pipeline.weights.packed import GroupIntWeight, LinearWeight

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Order of a word's eight inputs, from its lowest 4 bits on."""


class Bf16Int4Linear(TiledLinear):
    """Linear of a grouped 4-bit weight. Only the output is rounded, not the weight."""

    def __init__(self, weight: GroupIntWeight) -> None:
        """`weight` needs groups of a multiple of 8 inputs. x is passed in the weight's order of inputs."""
        shape_NK, words_TWL = (weight.out_features, weight.in_features), word_tiles(weight.q_NK.numpy(), _ORDER)
        scales_TGL, zeros_TGL = tiles(narrow_scales(weight.scales_NG)), tiles(narrow_zeros(weight.zeros_NG))
        super().__init__("bf16_int4", shape_NK, weight.bias_N, words_TWL, scales_TGL, zeros_TGL, weight.group_size)
        self.num_groups = scales_TGL.shape[1]

    def _scratch(self, x_MK: np.ndarray) -> Scratch:
        return None, None, np.empty((len(x_MK), self.num_groups), np.float32)


def bf16_linear(weight: LinearWeight) -> TiledLinear | None:
    """Return the linear of `weight` in bfloat16; None unless the number of its inputs is a multiple of 8."""
    if isinstance(weight, GroupIntWeight) and weight.bits == 4 and weight.group_size % 8 == 0:
        return Bf16Int4Linear(weight)
    if weight.in_features % 8:
        return None
    if isinstance(weight, GroupIntWeight):
        weight = replace(weight, input_order_K=None)  # x is passed in that order
    shape_NK = weight.out_features, weight.in_features
    return TiledLinear("bf16", shape_NK, weight.bias_N, bf16_tiles(weight.dequantize(torch.bfloat16)))


def use_avx512_bf16() -> bool:
    """Return whether this processor multiplies pairs of bfloat16 but not whole tiles (AMX), where oneDNN is faster."""
    return HAS_AVX512_BF16 and not HAS_AMX
