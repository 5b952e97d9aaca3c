"""bfloat16 linears by products of pairs: for processors that have them (AVX-512 BF16) and no units for larger tiles.

One form of a weight serves every number of tokens: bfloat16 as it is, or 4 bits as they are stored. Weights of 4 bits
lie eight inputs a word, in such an order that bits 4 j to 4 j + 3 of a word's halves are inputs 2 j and 2 j + 1 of its
eight: 128 + q is then a pair of bfloat16 by one mask and the exponent's bits, and the 128 is taken out with the zero
point. Scales are multiplied in where a group ends, in float32, so the weight itself is never rounded.
"""

from dataclasses import replace

import numpy as np
import torch

from pipeline.kernels.cpu.compile.processor import MULTIPLIES_PAIRS, MULTIPLIES_TILES
from pipeline.kernels.cpu.linear.tiled_linear import Scratch, TiledLinear
from pipeline.kernels.cpu.tiles.weight_tiles import bf16_tiles, narrow_scales, tiles, word_tiles
from pipeline.weights.packed import GroupIntWeight, LinearWeight

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of a word's eight inputs, the one in each 4 bits from the lowest on."""


class Bf16Int4Linear(TiledLinear):
    """Groups of 4-bit weights, which are not rounded: only what comes out is."""

    def __init__(self, weight: GroupIntWeight) -> None:
        """Groups of a multiple of 8 inputs. x comes in the weight's order of inputs."""
        shape_NK, words_TWL = (weight.out_features, weight.in_features), word_tiles(weight.q_NK.numpy(), _ORDER)
        scales_TGL, zeros_TGL = tiles(narrow_scales(weight.scales_NG)), tiles(weight.zeros_NG.to(torch.uint8).numpy())
        super().__init__("bf16_int4", shape_NK, weight.bias_N, words_TWL, scales_TGL, zeros_TGL, weight.group_size)
        self.num_groups = scales_TGL.shape[1]

    def _scratch(self, x_MK: np.ndarray) -> Scratch:
        return None, None, np.empty((len(x_MK), self.num_groups), np.float32)


def bf16_linear(weight: LinearWeight) -> TiledLinear | None:
    """The linear that serves `weight` in bfloat16; None where its inputs do not come in eights."""
    if isinstance(weight, GroupIntWeight) and weight.bits == 4 and weight.group_size % 8 == 0:
        return Bf16Int4Linear(weight)
    if weight.in_features % 8:
        return None
    if isinstance(weight, GroupIntWeight):
        weight = replace(weight, input_order_K=None)  # x comes in that order
    shape_NK = weight.out_features, weight.in_features
    return TiledLinear("bf16", shape_NK, weight.bias_N, bf16_tiles(weight.dequantize(torch.bfloat16)))


def multiplies_pairs() -> bool:
    """Whether this processor has the instruction, and no units that multiply whole tiles of bfloat16 (AMX): oneDNN
    serves those better."""
    return MULTIPLIES_PAIRS and not MULTIPLIES_TILES
