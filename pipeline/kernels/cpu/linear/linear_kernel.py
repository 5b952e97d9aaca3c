"""The kernel of all compiled linears, specialized by kind of weight.

    out = x @ weight.T + bias

The kind determines how a tile of the weight is multiplied:
- kinds of `widening.WIDENINGS`: widened to float32 a few inputs at a time; x and sums are float32;
- "bf16", "bf16_int4": as pairs of bfloat16; x is bits of bfloat16, sums are float32 (`tiles/bf16_tile.py`);
- INT8_KINDS: as bytes; x is of either type and first rounded to int8 block by block (`tiles/int8_tile.py`).
The order of a token's sums in the last two does not depend on the number of tokens.
"""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

from collections.abc import Callable
from functools import cache
from types import FunctionType

import numpy as np
from numba import njit
from numba.core.dispatcher import Dispatcher

from pipeline.kernels.cpu.compile.numerics import as_in, wide
from pipeline.kernels.cpu.compile.processor import HAS_WIDE_VECTORS
from pipeline.kernels.cpu.compile.threads import kernel, parallel_for
from pipeline.kernels.cpu.linear.round_int8 import FEW, round_token
from pipeline.kernels.cpu.linear.widening import WIDENINGS
from pipeline.kernels.cpu.tiles.bf16_tile import add_bf16_int4_products, add_bf16_products
from pipeline.kernels.cpu.tiles.int8_tile import AVX2, AVX512_VNNI, AVX_VNNI, STEP, Form, int8_products
from pipeline.kernels.cpu.tiles.tile_product import tile_product
from pipeline.kernels.cpu.tiles.weight_tiles import LANES, TOKENS

TILE_TOKENS = 4  # of a float32 product whose sums stay in registers; the remaining tokens are computed by two and one
BF16_DEPTH = 512  # pairs of a tile processed for all tokens before the next ones: they stay in the second cache
_DEPTH = 64  # inputs widened at a time: their float32 values stay in the first cache
_UNITS = 8 if HAS_WIDE_VECTORS else 2  # of 8 lanes, for a product of four tokens
_UNITS_OF_TWO = 8 if HAS_WIDE_VECTORS else 4
_INT4_AHEAD = 2048  # words of 4-bit weights to prefetch; for pairs it is the next BF16_DEPTH


def int8_kind(form: Form, bits: int) -> str:
    """Return the kind of a weight of `bits` bits that is multiplied in this form."""
    return f"int8_by_int{bits}_{form.name.lower().replace('-', '').replace(' ', '_')}"


INT8_KINDS = {int8_kind(form, bits): (form, bits) for form in (AVX2, AVX_VNNI, AVX512_VNNI) for bits in (4, 8)}
KINDS = (*WIDENINGS, "bf16", "bf16_int4", *INT8_KINDS)


@cache
def linear_kernel(kind: str) -> Dispatcher:
    """Return the kernel for a kind of weight.

    It is `_multiply` with other functions for two of its globals. numba's cache on disk would not find a closure.
    """
    if kind in INT8_KINDS:
        prepare, add_tile = _round_few, _int8_adder(*INT8_KINDS[kind])
    elif kind == "bf16_int4":
        prepare, add_tile = _sum_blocks, _add_bf16_int4
    else:
        prepare, add_tile = _nothing, _add_bf16 if kind == "bf16" else _widened_adder(kind)
    specialized = globals() | {"_prepare": prepare, "_add_tile": add_tile}
    multiply = FunctionType(_multiply.__code__, specialized, f"multiply_{kind}")
    multiply.__qualname__ = multiply.__name__
    return kernel()(multiply)


def _multiply(x_MK, out_MN, byte_MK, scale_MB, sum_MB, words_TWL, scales_TBL, zeros_TBL, block, bias_TL, begin, end):
    """Compute x @ weight.T + bias. Arrays that a kind does not use are None.

    byte_MK, scale_MB: rounded tokens. sum_MB: sums over each block of a token's inputs. scales_TBL, zeros_TBL: one per
    block of the weight's inputs, in float32; for "bf16_int4" and INT8_KINDS, bits of float16 and uint8. For
    "codebook4" zeros_TBL is the codebook. block: inputs that share a scale. bias_TL: float32.
    """
    num_tokens, num_tiles = len(x_MK), len(words_TWL)
    if end < 0:
        _prepare(x_MK, byte_MK, scale_MB, sum_MB, block)
        return parallel_for(num_tiles * ((num_tokens + TOKENS - 1) // TOKENS))
    for item in range(begin, end):
        t, first = item % num_tiles, item // num_tiles * TOKENS
        sum_ML = np.empty((min(TOKENS, num_tokens - first), LANES), np.float32)
        _begin_sums(sum_ML, bias_TL[t])
        _add_tile(sum_ML, x_MK, byte_MK, scale_MB, sum_MB, first, words_TWL, scales_TBL, zeros_TBL, t, block)
        _write_sums(sum_ML, out_MN, first, t * LANES)


def _prepare(x_MK, byte_MK, scale_MB, sum_MB, block):
    """Do the work that `_multiply` needs once, on one thread."""
    raise NotImplementedError("`linear_kernel` replaces this function")


def _add_tile(sum_ML, x_MK, byte_MK, scale_MB, sum_MB, first, words_TWL, scales_TBL, zeros_TBL, t, block):
    """Add all products with tile `t` of the weight to the sums of some tokens, from `first` on."""
    raise NotImplementedError("`linear_kernel` replaces this function")


@njit(inline="always")
def _begin_sums(sum_ML, bias_L):
    for m in range(len(sum_ML)):
        sum_L = sum_ML[m]
        for n in range(LANES):
            sum_L[n] = bias_L[n]


@njit(inline="always")
def _write_sums(sum_ML, out_MN, first_token, first):
    """Write the sums of a tile. The last tile has more lanes than there are outputs.

    The views begin at 0: the compiler then knows that indices are not negative, and vectorizes the loop.
    """
    for m in range(len(sum_ML)):
        sum_L, out_L = sum_ML[m], out_MN[first_token + m, first : first + LANES]
        for n in range(len(out_L)):
            out_L[n] = as_in(out_L, sum_L[n])


@njit(inline="always")
def _nothing(x_MK, byte_MK, scale_MB, sum_MB, block):
    pass


@njit(inline="always")
def _sum_blocks(x_MK, byte_MK, scale_MB, sum_MB, block):
    for m in range(len(x_MK)):
        for b in range(sum_MB.shape[1]):
            some, total = x_MK[m, b * block : (b + 1) * block], np.float32(0.0)
            for i in range(len(some)):
                total += wide(some[i])
            sum_MB[m, b] = total


@njit(inline="always")
def _round_few(x_MK, byte_MK, scale_MB, sum_MB, block):
    if len(x_MK) < FEW:
        for m in range(len(x_MK)):
            round_token(x_MK[m], block, byte_MK[m], scale_MB[m], sum_MB[m])


@njit(inline="always")
def _add_bf16(sum_ML, x_MK, byte_MK, scale_MB, sum_MB, first, words_TWL, scales_TBL, zeros_TBL, t, block):
    num_words = words_TWL.shape[1]
    arrays = sum_ML, x_MK, words_TWL[t], None, None, None
    for start in range(0, num_words, BF16_DEPTH):
        depth, x_at = min(BF16_DEPTH, num_words - start), first * num_words + start
        offsets = x_at, num_words, start * LANES, 0, 0, 0, depth
        add_bf16_products(arrays, offsets, len(sum_ML), BF16_DEPTH * LANES)


@njit(inline="always")
def _add_bf16_int4(sum_ML, x_MK, byte_MK, scale_MB, sum_MB, first, words_TWL, scales_TBL, zeros_TBL, t, block):
    num_pairs, num_blocks = x_MK.shape[1] // 2, sum_MB.shape[1]
    arrays = sum_ML, x_MK, words_TWL[t], scales_TBL[t], zeros_TBL[t], sum_MB
    for b in range(num_blocks):
        x_at, words_at = first * num_pairs + b * block // 2, b * block // 8 * LANES
        offsets = x_at, num_pairs, words_at, b * LANES, first * num_blocks + b, num_blocks, block // 8
        add_bf16_int4_products(arrays, offsets, len(sum_ML), _INT4_AHEAD)


def _int8_adder(form: Form, bits: int) -> Callable[..., None]:
    add_int8_products = int8_products(form, bits)

    @njit(inline="always")
    def add(sum_ML, x_MK, byte_MK, scale_MB, sum_MB, first, words_TWL, scales_TBL, zeros_TBL, t, block):
        arrays = sum_ML, byte_MK, scale_MB, sum_MB, words_TWL[t], scales_TBL[t], zeros_TBL[t]
        add_int8_products(arrays, (first, scale_MB.shape[1], block // STEP), len(sum_ML))

    return add


def _widened_adder(kind: str) -> Callable[..., None]:
    widen = WIDENINGS[kind]

    @njit(inline="always")
    def add(sum_ML, x_MK, byte_MK, scale_MB, sum_MB, first, words_TWL, scales_TBL, zeros_TBL, t, block):
        num_inputs = x_MK.shape[1]
        wide_DL = np.empty((_DEPTH, LANES), np.float32)
        for start in range(0, num_inputs, _DEPTH):
            depth = min(_DEPTH, num_inputs - start)
            weights = widen(words_TWL, scales_TBL, zeros_TBL, t, block, start, depth, wide_DL)
            _add_float_products(sum_ML, x_MK, first * num_inputs + start, num_inputs, len(sum_ML), weights, depth)

    return add


@njit(inline="always")
def _add_float_products(sums, x, at, x_row, count, weights, depth):
    """Add x (count, depth) @ weights (depth, LANES) to sums (count, LANES). x begins at element `at`; its row stride is
    x_row."""
    m = 0
    while m + 4 <= count:
        for n in range(0, LANES, 8 * _UNITS):
            tile_product(sums, m * LANES + n, LANES, x, at, x_row, 1, weights, n, LANES, depth, None, 4, _UNITS)
        m, at = m + 4, at + 4 * x_row
    if m + 2 <= count:
        for n in range(0, LANES, 8 * _UNITS_OF_TWO):
            tile_product(sums, m * LANES + n, LANES, x, at, x_row, 1, weights, n, LANES, depth, None, 2, _UNITS_OF_TWO)
        m, at = m + 2, at + 2 * x_row
    if m < count:
        tile_product(sums, m * LANES, LANES, x, at, x_row, 1, weights, 0, LANES, depth, None, 1, 8)
