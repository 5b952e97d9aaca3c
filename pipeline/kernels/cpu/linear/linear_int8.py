"""Linears of 4- and 8-bit weights on activations rounded to int8, for processors with AVX2.

`kernels/activations/int8.py` defines the result.
"""

import numpy as np

from pipeline.kernels.activations.int8 import int8_block
from pipeline.kernels.cpu.compile.threads import ALL_ITEMS
from pipeline.kernels.cpu.linear.linear_kernel import int8_kind
from pipeline.kernels.cpu.linear.round_int8 import FEW, round_to_int8
from pipeline.kernels.cpu.linear.selection import ReorderedLinear
from pipeline.kernels.cpu.linear.tiled_linear import Scratch, TiledLinear
from pipeline.kernels.cpu.tiles.int8_tile import Form, forms_here
from pipeline.kernels.cpu.tiles.weight_tiles import narrow_scales, narrow_zeros, tiles, word_tiles
from pipeline.kernels.linears import Linear, RoundedLinears
from pipeline.weights.packed import GroupIntWeight, LinearWeight

_ORDER = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 1, 2, 3)}
"""Order in which a word's inputs are joined, by bits. The first four 4-bit inputs are the low halves of its bytes, the
others the high halves, so the bytes of a token stay in their natural order."""


class Int8Linear(TiledLinear):
    """Linear that first rounds x block by block. Computes in float32 on x in float32 or bfloat16."""

    PARALLEL_PRODUCTS, READING = 1 << 21, 2

    def __init__(self, weight: GroupIntWeight, block: int, form: Form) -> None:
        """`block` is from `int8_block`, `form` from `forms_here`. x is passed in the weight's order of inputs."""
        shape_NK, num_blocks = (weight.out_features, weight.in_features), -(-weight.in_features // block)
        filled_NK = np.pad(weight.q_NK.numpy(), ((0, 0), (0, num_blocks * block - weight.in_features)))
        group_B = np.arange(num_blocks) * block // weight.group_size
        scales_TBL = tiles(narrow_scales(weight.scales_NG)[:, group_B])
        zeros_TBL = tiles(narrow_zeros(weight.zeros_NG)[:, group_B])
        words_TWL = word_tiles(filled_NK, _ORDER[weight.bits])
        kind = int8_kind(form, weight.bits)
        super().__init__(kind, shape_NK, weight.bias_N, words_TWL, scales_TBL, zeros_TBL, block)
        self.num_blocks = num_blocks
        self._small_buffers: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # buffers for few tokens, reused

    def _scratch(self, x_MK: np.ndarray) -> Scratch:
        num_tokens, rounded = len(x_MK), self._small_buffers
        if rounded is None or len(rounded[0]) != num_tokens:
            byte_MK = np.empty((num_tokens, self.num_blocks * self.block), np.int8)
            scale_MB, sum_MB = (np.empty((num_tokens, self.num_blocks), kind) for kind in (np.float32, np.int32))
            rounded = byte_MK, scale_MB, sum_MB
        if num_tokens < FEW:
            self._small_buffers = rounded
        else:
            round_to_int8(x_MK, self.block, *rounded, *ALL_ITEMS)
        return rounded


def int8_linears() -> RoundedLinears:
    """Return the int8 entry of `Kernels.rounded`. Requires `has_vnni`."""
    form = forms_here()[0]

    def prepare(weight: LinearWeight) -> Linear | None:
        block = int8_block(weight)
        if block is None or not isinstance(weight, GroupIntWeight):
            return None
        linear = Int8Linear(weight, block, form)
        return linear if weight.input_order_K is None else ReorderedLinear(linear, weight.input_order_K)

    return RoundedLinears(prepare, f"numba, products of bytes ({form.name})")


def has_vnni() -> bool:
    """Return whether this processor has the instructions."""
    return bool(forms_here())
