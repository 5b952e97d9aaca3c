"""float32 linears whose weight is read as narrow as it was stored: bfloat16, integers or codes of 4 bits, integers or
floats of 8.

Widening either to float32 rounds nothing that the dense float32 weight would not round, so these compute what that
would. With few tokens the time of a linear is that of reading its weight, and a half or an eighth of the bytes takes as
much less of it; with many it is the multiply, for which widening is little work beside. Codes are looked up in a table
one by one, which is the slowest widening of them.
"""

from abc import abstractmethod

import numpy as np
import torch

from pipeline.kernels.cpu.compile.threads import WHOLE
from pipeline.kernels.cpu.linear import compiled_linear
from pipeline.kernels.cpu.linear.array_linear import ArrayLinear
from pipeline.kernels.cpu.linear.compiled_linear import LANES
from pipeline.weights.packed import CodebookWeight, DenseWeight, Fp8Weight, GroupIntWeight, LinearWeight

PARALLEL_PRODUCTS = 1 << 23
"""Work below this stays on one thread: waking another one would take longer than it saves."""
WIDENING = 12
"""Products that take as long as widening one weight (of 4 bits; others are quicker)."""
FLOAT8_SCALE_LIMIT = 128.0
"""Scales are kept times 2^120, which float32 holds below this."""


class NarrowLinear(ArrayLinear):
    """In float32, the weight in tiles of LANES outputs."""

    def write(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        self._multiply(x_MK, out_MN)
        if self.bias_N is not None:
            out_MN += self.bias_N.numpy()

    def is_parallel(self, num_tokens: int) -> bool:
        return (num_tokens + WIDENING) * self.shape_NK[0] * self.shape_NK[1] >= PARALLEL_PRODUCTS

    @abstractmethod
    def _multiply(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None: ...


class Bfloat16Linear(NarrowLinear):
    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        """`weight_NK` in bfloat16, its inputs a multiple of 8."""
        num_outputs, num_inputs = weight_NK.shape
        super().__init__((num_outputs, num_inputs), bias_N)
        self.words_TWL = pair_tiles(weight_NK)

    def _multiply(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        compiled_linear.multiply_bfloat16(x_MK, self.words_TWL, out_MN, *WHOLE)


class Float32Linear(NarrowLinear):
    """Of a weight that no narrower type holds, where the order of sums must not be the BLAS library's."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        num_outputs, num_inputs = weight_NK.shape
        super().__init__((num_outputs, num_inputs), bias_N)
        self.weight_TKL = tiles(weight_NK.numpy())

    def _multiply(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        compiled_linear.multiply_float32(x_MK, self.weight_TKL, out_MN, *WHOLE)


class GroupInt4Linear(NarrowLinear):
    def __init__(self, weight: GroupIntWeight) -> None:
        """Of 4 bits, groups of a multiple of 8 inputs. x comes in the weight's order of inputs."""
        super().__init__((weight.out_features, weight.in_features), weight.bias_N)
        nibble_NWJ = weight.q_NK.numpy().reshape(weight.out_features, -1, 8)
        self.words_TWL = tiles(join(nibble_NWJ))
        self.scales_TGL = tiles(weight.scales_NG.to(torch.float32).numpy())
        self.zeros_TGL = tiles(weight.zeros_NG.to(torch.float32).numpy())

    def _multiply(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        compiled_linear.multiply_int4(x_MK, self.words_TWL, self.scales_TGL, self.zeros_TGL, out_MN, *WHOLE)


class GroupInt8Linear(NarrowLinear):
    def __init__(self, weight: GroupIntWeight) -> None:
        """Of 8 bits, groups of a multiple of 4 inputs. x comes in the weight's order of inputs."""
        super().__init__((weight.out_features, weight.in_features), weight.bias_N)
        self.words_TWL = tiles(join(weight.q_NK.numpy().reshape(weight.out_features, -1, 4)))
        self.scales_TGL = tiles(weight.scales_NG.to(torch.float32).numpy())
        self.zeros_TGL = tiles(weight.zeros_NG.to(torch.float32).numpy())
        self.group_size = weight.group_size

    def _multiply(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        compiled_linear.multiply_int8(
            x_MK, self.words_TWL, self.scales_TGL, self.zeros_TGL, self.group_size, out_MN, *WHOLE
        )


class Float8Linear(NarrowLinear):
    def __init__(self, weight: Fp8Weight) -> None:
        """Of blocks of a multiple of 4 inputs (or of all), and scales below FLOAT8_SCALE_LIMIT."""
        super().__init__((weight.out_features, weight.in_features), weight.bias_N)
        byte_NWJ = weight.value_NK.view(torch.uint8).numpy().reshape(weight.out_features, -1, 4)
        self.words_TWL = tiles(join(byte_NWJ))
        self.scales_TGL = tiles(weight.scales_NG.numpy() * compiled_linear.FLOAT8_EXPONENT)
        self.block_inputs = weight.block[1]

    def _multiply(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        compiled_linear.multiply_float8(x_MK, self.words_TWL, self.scales_TGL, self.block_inputs, out_MN, *WHOLE)


class CodebookLinear(NarrowLinear):
    def __init__(self, weight: CodebookWeight) -> None:
        """Of groups of a multiple of 8 inputs."""
        super().__init__((weight.out_features, weight.in_features), weight.bias_N)
        self.words_TWL = tiles(join(weight.code_NK.numpy().reshape(weight.out_features, -1, 8)))
        self.scales_TGL = tiles(weight.scales_NG.numpy())
        self.codebook_C = weight.codebook_C.numpy()
        self.group_size = weight.group_size

    def _multiply(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        compiled_linear.multiply_coded4(
            x_MK, self.words_TWL, self.scales_TGL, self.codebook_C, self.group_size, out_MN, *WHOLE
        )


def narrow_linear(weight: LinearWeight) -> NarrowLinear | None:
    """The linear that reads `weight` as it is; None where none does and it has to be widened at load."""
    if isinstance(weight, DenseWeight):
        weight_NK = as_bfloat16(weight.weight_NK)
        return None if weight_NK is None else Bfloat16Linear(weight_NK, weight.bias_N)
    if isinstance(weight, GroupIntWeight):
        if weight.group_size % (32 // weight.bits):
            return None
        return GroupInt4Linear(weight) if weight.bits == 4 else GroupInt8Linear(weight)
    if isinstance(weight, CodebookWeight):
        return None if weight.group_size % 8 else CodebookLinear(weight)
    fits = weight.in_features % 4 == 0 and weight.block[1] % 4 == 0
    return Float8Linear(weight) if fits and float(weight.scales_RG.abs().max()) < FLOAT8_SCALE_LIMIT else None


def as_bfloat16(weight_NK: torch.Tensor) -> torch.Tensor | None:
    """The weight in bfloat16 where that loses nothing and its inputs come in eights."""
    if weight_NK.shape[1] % 8:
        return None
    if weight_NK.dtype == torch.bfloat16:
        return weight_NK
    narrow = weight_NK.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(weight_NK.dtype), weight_NK) else None


def join(part_NWJ: np.ndarray) -> np.ndarray:
    """(N, W, J) integers of 32 / J bits -> (N, W) words, the first one lowest."""
    parts = part_NWJ.shape[2]
    words_NW = part_NWJ[:, :, 0].astype(np.uint32)
    for j in range(1, parts):
        words_NW |= part_NWJ[:, :, j].astype(np.uint32) << np.uint32(32 // parts * j)
    return words_NW


def tiles(values_NW: np.ndarray) -> np.ndarray:
    """(N, W) -> (T, W, L), the last tile filled up with zeros."""
    missing = -len(values_NW) % LANES
    padded_NW = np.pad(values_NW, ((0, missing), (0, 0))) if missing else values_NW
    return np.ascontiguousarray(padded_NW.reshape(-1, LANES, values_NW.shape[1]).transpose(0, 2, 1))


def pair_tiles(weight_NK: torch.Tensor) -> np.ndarray:
    """bfloat16 weights, two neighbouring inputs a word, in tiles."""
    return tiles(join(weight_NK.contiguous().view(torch.uint16).numpy().reshape(len(weight_NK), -1, 2)))


def narrow_scales(scales_NG: torch.Tensor) -> np.ndarray:
    """The bits of float16 where that loses nothing, else float32: scales are read with the weight, an eighth of it."""
    narrow_NG = scales_NG.to(torch.float16)
    exact = torch.equal(narrow_NG.to(torch.float32), scales_NG.to(torch.float32))
    return narrow_NG.view(torch.uint16).numpy() if exact else scales_NG.to(torch.float32).numpy()
