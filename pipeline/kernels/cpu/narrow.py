"""float32 linears whose weight is read as narrow as it was stored: bfloat16, or 4-bit integers in groups.

Widening either to float32 rounds nothing, so these compute what the dense float32 weight would. With few tokens the
time of a linear is that of reading its weight, and a half or an eighth of the bytes takes as much less of it. With
many tokens it is the multiply, and that is BLAS's: on a dense float32 copy where there is the memory for one, else on
some columns at a time, widened into a buffer that stays in the processor's cache. The border is measured at load for
each shape.
"""

import threading
from abc import ABC, abstractmethod

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.kernels.cpu import compiled_linear
from pipeline.kernels.cpu.compiled import use_threads
from pipeline.kernels.cpu.crossover import crossover
from pipeline.quant.packed import GroupIntWeight

LANES = (128, 64, 32)  # of a tile: the widest that leaves every thread some tiles
TILES_A_THREAD = 4
BUFFER_ELEMENTS = 1 << 18
PARALLEL_PRODUCTS = 1 << 18
"""Products below this stay on one thread: waking another one would take longer than it saves."""

_local = threading.local()


class NarrowLinear(ABC):
    """y = x @ weight.T + bias in float32, the weight in tiles of `lanes` outputs."""

    most_tokens: int  # that `few` is the faster way for
    weight_NK: torch.Tensor | None = None  # the dense copy

    def __init__(self, shape_NK: tuple[int, int], bias_N: torch.Tensor | None, lanes: int) -> None:
        self.shape_NK, self.lanes = shape_NK, lanes
        self.bias_N = None if bias_N is None else bias_N.to(torch.float32)

    def prepared(self, weight_NK: torch.Tensor | None) -> "NarrowLinear":
        """To be called once, when the weight is packed; `weight_NK` is the dense copy to keep."""
        self.weight_NK = weight_NK
        key = type(self).__name__, self.shape_NK, self.lanes, weight_NK is None
        self.most_tokens = crossover(key, self.few, self.many, self.shape_NK[1], torch.float32)
        return self

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        return self.few(x_MK) if len(x_MK) <= self.most_tokens else self.many(x_MK)

    def few(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Widened in registers."""
        num_outputs, num_inputs = self.shape_NK
        out_MN = x_MK.new_empty(len(x_MK), num_outputs)
        use_threads(len(x_MK) * num_outputs * num_inputs >= PARALLEL_PRODUCTS)
        self._multiply(x_MK.contiguous().numpy(), out_MN.numpy())
        return out_MN if self.bias_N is None else out_MN.add_(self.bias_N)

    def many(self, x_MK: torch.Tensor) -> torch.Tensor:
        """By BLAS: the dense copy, or some columns at a time."""
        if self.weight_NK is not None:
            return F.linear(x_MK, self.weight_NK, self.bias_N)
        num_outputs, num_inputs = self.shape_NK
        out_MN = x_MK.new_empty(len(x_MK), num_outputs)
        tiles = max(1, BUFFER_ELEMENTS // (num_inputs * self.lanes))
        for start in range(0, num_outputs, tiles * self.lanes):
            stop = min(num_outputs, start + tiles * self.lanes)
            width = -(-(stop - start) // self.lanes) * self.lanes
            columns_KC = _buffer(num_inputs * width).view(num_inputs, width)
            use_threads(columns_KC.numel() >= PARALLEL_PRODUCTS)
            self._widen(start // self.lanes, columns_KC.numpy())
            torch.mm(x_MK, columns_KC[:, : stop - start], out=out_MN[:, start:stop])
        return out_MN if self.bias_N is None else out_MN.add_(self.bias_N)

    @abstractmethod
    def _multiply(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None: ...

    @abstractmethod
    def _widen(self, first_tile: int, out_KC: np.ndarray) -> None: ...


class Bfloat16Linear(NarrowLinear):
    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        """`weight_NK` in bfloat16, its inputs a multiple of 8."""
        num_outputs, num_inputs = weight_NK.shape
        super().__init__((num_outputs, num_inputs), bias_N, lanes_of(num_outputs))
        pair_NWJ = weight_NK.contiguous().view(torch.uint16).numpy().reshape(num_outputs, num_inputs // 2, 2)
        self.words_TWL = _tiles(_join(pair_NWJ), self.lanes)

    def _multiply(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        compiled_linear.multiply_bfloat16(x_MK, self.words_TWL, out_MN)

    def _widen(self, first_tile: int, out_KC: np.ndarray) -> None:
        compiled_linear.widen_bfloat16(self.words_TWL, first_tile, out_KC)


class GroupInt4Linear(NarrowLinear):
    def __init__(self, weight: GroupIntWeight) -> None:
        super().__init__((weight.out_features, weight.in_features), weight.bias_N, lanes_of(weight.out_features))
        nibble_NWJ = weight.q_NK.numpy().reshape(weight.out_features, -1, 8)
        self.words_TWL = _tiles(_join(nibble_NWJ), self.lanes)
        self.scales_TGL = _tiles(weight.scales_NG.to(torch.float32).numpy(), self.lanes)
        self.zeros_TGL = _tiles(weight.zeros_NG.to(torch.float32).numpy(), self.lanes)

    def _multiply(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        compiled_linear.multiply_int4(x_MK, self.words_TWL, self.scales_TGL, self.zeros_TGL, out_MN)

    def _widen(self, first_tile: int, out_KC: np.ndarray) -> None:
        compiled_linear.widen_int4(self.words_TWL, self.scales_TGL, self.zeros_TGL, first_tile, out_KC)


def as_bfloat16(weight_NK: torch.Tensor) -> torch.Tensor | None:
    """The weight in bfloat16 where that loses nothing and its inputs come in eights."""
    if weight_NK.shape[1] % compiled_linear.INPUTS:
        return None
    if weight_NK.dtype == torch.bfloat16:
        return weight_NK
    narrow = weight_NK.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(weight_NK.dtype), weight_NK) else None


def lanes_of(num_outputs: int) -> int:
    """The width of a tile for this many outputs on this process's threads."""
    wanted = TILES_A_THREAD * torch.get_num_threads()
    return next((lanes for lanes in LANES if num_outputs >= wanted * lanes), LANES[-1])


def _join(part_NWJ: np.ndarray) -> np.ndarray:
    """(N, W, J) integers of 32 / J bits -> (N, W) words, the first one lowest."""
    parts = part_NWJ.shape[2]
    words_NW = part_NWJ[:, :, 0].astype(np.uint32)
    for j in range(1, parts):
        words_NW |= part_NWJ[:, :, j].astype(np.uint32) << np.uint32(32 // parts * j)
    return words_NW


def _tiles(values_NW: np.ndarray, lanes: int) -> np.ndarray:
    """(N, W) -> (T, W, L), the last tile filled up with zeros."""
    missing = -len(values_NW) % lanes
    padded_NW = np.pad(values_NW, ((0, missing), (0, 0))) if missing else values_NW
    return np.ascontiguousarray(padded_NW.reshape(-1, lanes, values_NW.shape[1]).transpose(0, 2, 1))


def _buffer(num_elements: int) -> torch.Tensor:
    """This thread's buffer, kept from call to call: fresh memory would cost a page fault for every 4 KiB."""
    held = getattr(_local, "buffer", None)
    if held is None or len(held) < num_elements:
        held = _local.buffer = torch.empty(num_elements)
    return held[:num_elements]
