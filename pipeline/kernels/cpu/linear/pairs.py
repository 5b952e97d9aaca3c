"""bfloat16 linears by products of pairs: for processors that have them (AVX-512 BF16) and no units for larger tiles.

One form of a weight serves every number of tokens: bfloat16 as it is, or 4 bits as they are stored.
"""

from dataclasses import replace

import numpy as np
import torch

from pipeline.kernels.cpu.compile.processor import MULTIPLIES_PAIRS, MULTIPLIES_TILES
from pipeline.kernels.cpu.compile.threads import WHOLE
from pipeline.kernels.cpu.linear.array_linear import ArrayLinear
from pipeline.kernels.cpu.linear.compiled_pairs import multiply_pairs, multiply_pairs_int4
from pipeline.kernels.cpu.linear.narrow import join, narrow_scales, pair_tiles, tiles
from pipeline.weights.packed import GroupIntWeight, LinearWeight

PARALLEL_PRODUCTS = 1 << 23
"""Work below this stays on one thread: waking another one would take longer than it saves."""
READING = 12
"""Products that take as long as reading one weight."""
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of a word's eight inputs, the one in each 4 bits from the lowest on."""


class PairLinear(ArrayLinear):
    """y = x @ weight.T + bias, in and out bfloat16, sums in float32."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        """`weight_NK` in bfloat16, its inputs a multiple of 8."""
        num_outputs, num_inputs = weight_NK.shape
        super().__init__((num_outputs, num_inputs), bias_N)
        self.words_TWL = pair_tiles(weight_NK)

    def is_parallel(self, num_tokens: int) -> bool:
        return _is_parallel(self.shape_NK, num_tokens)

    def write(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        multiply_pairs(x_MK, self.words_TWL, _or_none(self.bias_N), out_MN, *WHOLE)


class PairInt4Linear(ArrayLinear):
    """The same of groups of 4-bit weights, which are not rounded: only what comes out is."""

    def __init__(self, weight: GroupIntWeight) -> None:
        """Groups of a multiple of 8 inputs. x comes in the weight's order of inputs."""
        super().__init__((weight.out_features, weight.in_features), weight.bias_N)
        nibble_NWJ = weight.q_NK.numpy().reshape(weight.out_features, -1, 8)[:, :, _ORDER]
        self.words_TWL = tiles(join(nibble_NWJ))
        self.scales_TGL = tiles(narrow_scales(weight.scales_NG))
        self.zeros_TGL = tiles(weight.zeros_NG.to(torch.uint8).numpy())

    def is_parallel(self, num_tokens: int) -> bool:
        return _is_parallel(self.shape_NK, num_tokens)

    def write(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        total_MG = np.empty((len(x_MK), self.scales_TGL.shape[1]), np.float32)
        weight = self.words_TWL, self.scales_TGL, self.zeros_TGL
        multiply_pairs_int4(x_MK, *weight, _or_none(self.bias_N), total_MG, out_MN, *WHOLE)


def _is_parallel(shape_NK: tuple[int, int], num_tokens: int) -> bool:
    return (num_tokens + READING) * shape_NK[0] * shape_NK[1] >= PARALLEL_PRODUCTS


_NO_BIAS = np.empty(0, np.float32)


def _or_none(bias_N: torch.Tensor | None) -> np.ndarray:
    return _NO_BIAS if bias_N is None else bias_N.numpy()


def pair_linear(weight: LinearWeight) -> ArrayLinear | None:
    """The linear that serves `weight` in bfloat16; None where its inputs do not come in eights."""
    if isinstance(weight, GroupIntWeight) and weight.bits == 4 and weight.group_size % 8 == 0:
        return PairInt4Linear(weight)
    if weight.in_features % 8:
        return None
    if isinstance(weight, GroupIntWeight):
        weight = replace(weight, input_order_K=None)  # x comes in that order
    return PairLinear(weight.dequantize(torch.bfloat16), weight.bias_N)


def multiplies_pairs() -> bool:
    """Whether this processor has the instruction, and no units that multiply whole tiles of bfloat16 (AMX): oneDNN
    serves those better."""
    return MULTIPLIES_PAIRS and not MULTIPLIES_TILES
