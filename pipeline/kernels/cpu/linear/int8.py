"""Linears of 4- and 8-bit weights on activations rounded to int8, for processors with AVX2. See `kernels/int8.py`."""

import numpy as np
import torch

from pipeline.kernels.activations.int8 import int8_block
from pipeline.kernels.contract import Linear, RoundedLinears
from pipeline.kernels.cpu.compile.threads import WHOLE
from pipeline.kernels.cpu.linear.array_linear import ArrayLinear
from pipeline.kernels.cpu.linear.compiled_int8 import FEW, Form, forms_here, multiply_in, round_to_bytes
from pipeline.kernels.cpu.linear.narrow import join, narrow_scales, tiles
from pipeline.kernels.cpu.linear.selection import ReorderedLinear
from pipeline.weights.packed import GroupIntWeight, LinearWeight

PARALLEL_BYTES = 1 << 21
"""Products below this stay on one thread: waking another one would take longer than it saves."""
UNPACKING = 2
"""Products that take as long as reading and unpacking one weight."""
_INPUTS_OF_WORD = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 1, 2, 3)}
"""By bits, the order in which a word's inputs are joined: see `compiled_int8.py`."""


class ByteLinear(ArrayLinear):
    """y = x @ weight.T + bias, x rounded block by block first. Computed in float32, of x in float32 or bfloat16."""

    def __init__(self, weight: GroupIntWeight, block: int, form: Form) -> None:
        """`block` as `int8_block` has it, `form` one of this processor's. x comes in the weight's order of inputs."""
        num_outputs, num_inputs = weight.out_features, weight.in_features
        super().__init__((num_outputs, num_inputs), None)  # the kernel adds the bias
        self.block, num_blocks = block, -(-num_inputs // block)
        order = _INPUTS_OF_WORD[weight.bits]
        filled_NK = np.pad(weight.q_NK.numpy(), ((0, 0), (0, num_blocks * block - num_inputs)))
        self.words_TWL = tiles(join(filled_NK.reshape(num_outputs, -1, len(order))[:, :, order]))
        group_B = np.arange(num_blocks) * block // weight.group_size
        self.scales_TBL = tiles(narrow_scales(weight.scales_NG)[:, group_B])
        self.zeros_TBL = tiles(weight.zeros_NG.to(torch.uint8).numpy()[:, group_B])
        bias_N = torch.zeros(num_outputs) if weight.bias_N is None else weight.bias_N.to(torch.float32)
        self.bias_TL = tiles(bias_N.numpy()[:, None])[:, 0]
        self._multiply_bytes = multiply_in(form, weight.bits)
        self._kept: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # of few tokens, from step to step

    def is_parallel(self, num_tokens: int) -> bool:
        return (num_tokens + UNPACKING) * self.shape_NK[0] * self.shape_NK[1] >= PARALLEL_BYTES

    def write(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        rounded = self._kept
        if rounded is None or len(rounded[0]) != len(x_MK):
            rounded = self._room(len(x_MK))
        if len(x_MK) < FEW:
            self._kept = rounded
        else:
            round_to_bytes(x_MK, self.block, *rounded, *WHOLE)
        weight = self.words_TWL, self.scales_TBL, self.zeros_TBL, self.bias_TL
        self._multiply_bytes(x_MK, self.block, *rounded, *weight, out_MN, *WHOLE)

    def _room(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For rounded tokens: their bytes, scales and sums."""
        shape_MB = num_tokens, self.scales_TBL.shape[1]
        byte_MK = np.empty((num_tokens, shape_MB[1] * self.block), np.int8)
        return byte_MK, np.empty(shape_MB, np.float32), np.empty(shape_MB, np.int32)


def byte_linears() -> RoundedLinears:
    """As `Kernels.rounded` has it, where `multiplies_bytes`."""
    form = forms_here()[0]

    def prepare(weight: LinearWeight) -> Linear | None:
        block = int8_block(weight)
        if block is None or not isinstance(weight, GroupIntWeight):
            return None
        linear = ByteLinear(weight, block, form)
        return linear if weight.input_order_K is None else ReorderedLinear(linear, weight.input_order_K)

    return RoundedLinears(prepare, f"numba, products of bytes ({form.name})")


def multiplies_bytes() -> bool:
    """Whether this processor has the instructions."""
    return bool(forms_here())
