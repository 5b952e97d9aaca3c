"""The loops of linears whose weight stays narrow in memory, compiled by numba: widened in registers, computed in
float32.

A weight (N, K) lies in tiles of L outputs ("lanes"): words_TWL[tile, w] holds a few consecutive inputs of each lane
in 32 bits: two of bfloat16 (the even one in the low half), four of 8 bits or eight of 4 bits (input 8 w + j in bits 4 j
to 4 j + 3). Float32 weights lie in the same tiles, as they are.
So a tile is read from memory front to back, and every loop over lanes becomes
vector code. The last tile is filled up with zeros.

Suffixes: M tokens, K inputs, N outputs, G groups of inputs, T tiles, W words of a lane, L lanes.
"""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

import numpy as np
from numba import njit

from pipeline.kernels.cpu.compile.numerics import as_in
from pipeline.kernels.cpu.compile.processor import HAS_WIDE_VECTORS
from pipeline.kernels.cpu.compile.threads import kernel, share_out
from pipeline.kernels.cpu.tiles.float_tile import tile_product

LANES = 64  # of a tile
DEPTH = 64  # inputs that are widened at a time: their float32 values stay in the nearest cache
TOKENS = 256  # that go through a tile at a time: their sums stay in the second nearest
TILE_TOKENS = 4  # of a product whose sums stay in registers; the last ones go by two and one
_UNITS = 8 if HAS_WIDE_VECTORS else 2  # of 8 lanes, of such a product of TILE_TOKENS
_UNITS_OF_TWO = 8 if HAS_WIDE_VECTORS else 4

_NIBBLES = tuple(np.uint32(0xF << 4 * j) for j in range(8))
_INVERSES = tuple(np.float32(16.0**-j) for j in range(8))
_BYTES = tuple(np.uint32(0xFF << 8 * j) for j in range(4))
_BYTE_INVERSES = tuple(np.float32(256.0**-j) for j in range(4))
_MAGNITUDES = tuple(np.uint32(0x7F << 8 * j) for j in range(4))
_SIGNS = tuple(np.uint32(0x80 << 8 * j) for j in range(4))
FLOAT8_EXPONENT = np.float32(2.0**120)
"""A float8_e4m3fn's exponent and fraction in their places of a float32 are its value times 2^-120."""
_HIGH_HALF = np.uint32(0xFFFF0000)
_HALF = np.uint32(16)


@njit(inline="always")
def _add_product(sums, x, first_token, count, num_inputs, start, wide, depth):
    """sums (count, LANES) += x (M, K)[first_token :, start : start + depth] @ wide (depth, LANES), all of them flat."""
    m, at = 0, first_token * num_inputs + start
    while m + TILE_TOKENS <= count:
        for n in range(0, LANES, 8 * _UNITS):
            tile_product(sums, m * LANES + n, LANES, x, at, num_inputs, 1, wide, n, LANES, depth, TILE_TOKENS, _UNITS)
        m, at = m + TILE_TOKENS, at + TILE_TOKENS * num_inputs
    if m + 2 <= count:
        for n in range(0, LANES, 8 * _UNITS_OF_TWO):
            tile_product(sums, m * LANES + n, LANES, x, at, num_inputs, 1, wide, n, LANES, depth, 2, _UNITS_OF_TWO)
        m, at = m + 2, at + 2 * num_inputs
    if m < count:
        tile_product(sums, m * LANES, LANES, x, at, num_inputs, 1, wide, 0, LANES, depth, 1, 8)


@njit(inline="always")
def write_tile(sum_ML, out_MN, first_token, first):
    """The sums of some tokens and one tile to their places, in the type of those. The last tile has more
    lanes than there are outputs.

    Views that begin at 0: then indices are seen to be no negative ones, and the loop becomes vector code.
    """
    for m in range(len(sum_ML)):
        sum_L, out_L = sum_ML[m], out_MN[first_token + m, first : first + LANES]
        for n in range(len(out_L)):
            out_L[n] = as_in(out_L, sum_L[n])


@kernel()
def multiply_bfloat16(x_MK, words_TWL, out_MN, begin, end):
    """out = x @ weight.T; x and out float32."""
    (num_tokens, num_inputs), x = x_MK.shape, x_MK.reshape(-1)
    num_pieces = (num_tokens + TOKENS - 1) // TOKENS
    if end < 0:
        return share_out(len(words_TWL) * num_pieces)
    for item in range(begin, end):
        t, first_token = item % len(words_TWL), item // len(words_TWL) * TOKENS
        count = min(TOKENS, num_tokens - first_token)
        words_WL, sum_ML = words_TWL[t], np.zeros((count, LANES), np.float32)
        wide_DL = np.empty((DEPTH, LANES), np.float32)
        bits_DL, sums, wide = wide_DL.view(np.uint32), sum_ML.reshape(-1), wide_DL.reshape(-1)
        for start in range(0, num_inputs, DEPTH):
            depth = min(DEPTH, num_inputs - start)
            for d in range(0, depth, 2):
                word, low, high = words_WL[(start + d) // 2], bits_DL[d], bits_DL[d + 1]
                for n in range(LANES):
                    low[n] = word[n] << _HALF
                    high[n] = word[n] & _HIGH_HALF
            _add_product(sums, x, first_token, count, num_inputs, start, wide, depth)
        write_tile(sum_ML, out_MN, first_token, t * LANES)


@kernel()
def multiply_float32(x_MK, weight_TKL, out_MN, begin, end):
    """out = x @ weight.T, all of them float32: nothing is widened."""
    (num_tokens, num_inputs), x = x_MK.shape, x_MK.reshape(-1)
    num_pieces = (num_tokens + TOKENS - 1) // TOKENS
    if end < 0:
        return share_out(len(weight_TKL) * num_pieces)
    for item in range(begin, end):
        t, first_token = item % len(weight_TKL), item // len(weight_TKL) * TOKENS
        count = min(TOKENS, num_tokens - first_token)
        sum_ML, weight = np.zeros((count, LANES), np.float32), weight_TKL[t].reshape(-1)
        sums = sum_ML.reshape(-1)
        for start in range(0, num_inputs, DEPTH):
            depth = min(DEPTH, num_inputs - start)
            _add_product(sums, x, first_token, count, num_inputs, start, weight[start * LANES :], depth)
        write_tile(sum_ML, out_MN, first_token, t * LANES)


@kernel()
def multiply_int4(x_MK, words_TWL, scales_TGL, zeros_TGL, out_MN, begin, end):
    """out = x @ weight.T, each weight as `GroupIntWeight.dequantize` rounds it; x and out float32.

    Integers are masked, not shifted: q * 16^j is exact in float32, and so is what makes q - zero of it.
    """
    (num_tokens, num_inputs), x = x_MK.shape, x_MK.reshape(-1)
    num_pieces, size = (num_tokens + TOKENS - 1) // TOKENS, num_inputs // scales_TGL.shape[1]
    if end < 0:
        return share_out(len(words_TWL) * num_pieces)
    for item in range(begin, end):
        t, first_token = item % len(words_TWL), item // len(words_TWL) * TOKENS
        count = min(TOKENS, num_tokens - first_token)
        words_WL, sum_ML = words_TWL[t], np.zeros((count, LANES), np.float32)
        wide_DL = np.empty((DEPTH, LANES), np.float32)
        sums, wide = sum_ML.reshape(-1), wide_DL.reshape(-1)
        for start in range(0, num_inputs, DEPTH):
            depth = min(DEPTH, num_inputs - start)
            for d in range(0, depth, 8):
                word, group = words_WL[(start + d) // 8], (start + d) // size
                scale, zero = scales_TGL[t, group], zeros_TGL[t, group]
                w0, w1, w2, w3 = wide_DL[d], wide_DL[d + 1], wide_DL[d + 2], wide_DL[d + 3]
                w4, w5, w6, w7 = wide_DL[d + 4], wide_DL[d + 5], wide_DL[d + 6], wide_DL[d + 7]
                for n in range(LANES):
                    bits, z, s = word[n], zero[n], scale[n]
                    w0[n] = (np.float32(np.int32(bits & _NIBBLES[0])) - z) * s
                    w1[n] = (np.float32(np.int32(bits & _NIBBLES[1])) * _INVERSES[1] - z) * s
                    w2[n] = (np.float32(np.int32(bits & _NIBBLES[2])) * _INVERSES[2] - z) * s
                    w3[n] = (np.float32(np.int32(bits & _NIBBLES[3])) * _INVERSES[3] - z) * s
                    w4[n] = (np.float32(np.int32(bits & _NIBBLES[4])) * _INVERSES[4] - z) * s
                    w5[n] = (np.float32(np.int32(bits & _NIBBLES[5])) * _INVERSES[5] - z) * s
                    w6[n] = (np.float32(np.int32(bits & _NIBBLES[6])) * _INVERSES[6] - z) * s
                    w7[n] = (np.float32(np.int32(bits >> np.uint32(28))) - z) * s  # masked it would be negative
            _add_product(sums, x, first_token, count, num_inputs, start, wide, depth)
        write_tile(sum_ML, out_MN, first_token, t * LANES)


@kernel()
def multiply_int8(x_MK, words_TWL, scales_TGL, zeros_TGL, size, out_MN, begin, end):
    """`multiply_int4` of integers of 8 bits; `size` inputs share a scale."""
    (num_tokens, num_inputs), x = x_MK.shape, x_MK.reshape(-1)
    num_pieces = (num_tokens + TOKENS - 1) // TOKENS
    if end < 0:
        return share_out(len(words_TWL) * num_pieces)
    for item in range(begin, end):
        t, first_token = item % len(words_TWL), item // len(words_TWL) * TOKENS
        count = min(TOKENS, num_tokens - first_token)
        words_WL, sum_ML = words_TWL[t], np.zeros((count, LANES), np.float32)
        wide_DL = np.empty((DEPTH, LANES), np.float32)
        sums, wide = sum_ML.reshape(-1), wide_DL.reshape(-1)
        for start in range(0, num_inputs, DEPTH):
            depth = min(DEPTH, num_inputs - start)
            for d in range(0, depth, 4):
                word, group = words_WL[(start + d) // 4], (start + d) // size
                scale, zero = scales_TGL[t, group], zeros_TGL[t, group]
                w0, w1, w2, w3 = wide_DL[d], wide_DL[d + 1], wide_DL[d + 2], wide_DL[d + 3]
                for n in range(LANES):
                    bits, z, s = word[n], zero[n], scale[n]
                    w0[n] = (np.float32(np.int32(bits & _BYTES[0])) - z) * s
                    w1[n] = (np.float32(np.int32(bits & _BYTES[1])) * _BYTE_INVERSES[1] - z) * s
                    w2[n] = (np.float32(np.int32(bits & _BYTES[2])) * _BYTE_INVERSES[2] - z) * s
                    w3[n] = (np.float32(np.int32(bits >> np.uint32(24))) - z) * s  # masked it would be negative
            _add_product(sums, x, first_token, count, num_inputs, start, wide, depth)
        write_tile(sum_ML, out_MN, first_token, t * LANES)


@kernel()
def multiply_float8(x_MK, words_TWL, scales_TGL, size, out_MN, begin, end):
    """out = x @ weight.T of float8_e4m3fn weights, each as `Fp8Weight.dequantize` rounds it; x and out float32.

    `scales_TGL` are the weight's times FLOAT8_EXPONENT; `size` inputs share one, the last group may have fewer.
    """
    (num_tokens, num_inputs), x = x_MK.shape, x_MK.reshape(-1)
    num_pieces = (num_tokens + TOKENS - 1) // TOKENS
    if end < 0:
        return share_out(len(words_TWL) * num_pieces)
    for item in range(begin, end):
        t, first_token = item % len(words_TWL), item // len(words_TWL) * TOKENS
        count = min(TOKENS, num_tokens - first_token)
        words_WL, sum_ML = words_TWL[t], np.zeros((count, LANES), np.float32)
        wide_DL = np.empty((DEPTH, LANES), np.float32)
        bits_DL, sums, wide = wide_DL.view(np.uint32), sum_ML.reshape(-1), wide_DL.reshape(-1)
        for start in range(0, num_inputs, DEPTH):
            depth = min(DEPTH, num_inputs - start)
            for d in range(0, depth, 4):
                word, scale = words_WL[(start + d) // 4], scales_TGL[t, (start + d) // size]
                b0, b1, b2, b3 = bits_DL[d], bits_DL[d + 1], bits_DL[d + 2], bits_DL[d + 3]
                for n in range(LANES):
                    bits = word[n]
                    b0[n] = (bits & _MAGNITUDES[0]) << np.uint32(20) | (bits & _SIGNS[0]) << np.uint32(24)
                    b1[n] = (bits & _MAGNITUDES[1]) << np.uint32(12) | (bits & _SIGNS[1]) << np.uint32(16)
                    b2[n] = (bits & _MAGNITUDES[2]) << np.uint32(4) | (bits & _SIGNS[2]) << np.uint32(8)
                    b3[n] = (bits & _MAGNITUDES[3]) >> np.uint32(4) | (bits & _SIGNS[3])
                w0, w1, w2, w3 = wide_DL[d], wide_DL[d + 1], wide_DL[d + 2], wide_DL[d + 3]
                for n in range(LANES):
                    s = scale[n]
                    w0[n] *= s
                    w1[n] *= s
                    w2[n] *= s
                    w3[n] *= s
            _add_product(sums, x, first_token, count, num_inputs, start, wide, depth)
        write_tile(sum_ML, out_MN, first_token, t * LANES)


@kernel()
def multiply_coded4(x_MK, words_TWL, scales_TGL, codebook_C, size, out_MN, begin, end):
    """out = x @ weight.T of 4-bit codes, each weight as `CodebookWeight.dequantize` rounds it; x and out float32."""
    (num_tokens, num_inputs), x = x_MK.shape, x_MK.reshape(-1)
    num_pieces = (num_tokens + TOKENS - 1) // TOKENS
    if end < 0:
        return share_out(len(words_TWL) * num_pieces)
    for item in range(begin, end):
        t, first_token = item % len(words_TWL), item // len(words_TWL) * TOKENS
        count = min(TOKENS, num_tokens - first_token)
        words_WL, sum_ML = words_TWL[t], np.zeros((count, LANES), np.float32)
        wide_DL = np.empty((DEPTH, LANES), np.float32)
        sums, wide = sum_ML.reshape(-1), wide_DL.reshape(-1)
        for start in range(0, num_inputs, DEPTH):
            depth = min(DEPTH, num_inputs - start)
            for d in range(depth):
                word, scale = words_WL[(start + d) // 8], scales_TGL[t, (start + d) // size]
                shift, out = np.uint32(4 * (d % 8)), wide_DL[d]
                for n in range(LANES):
                    out[n] = codebook_C[word[n] >> shift & _NIBBLES[0]] * scale[n]
            _add_product(sums, x, first_token, count, num_inputs, start, wide, depth)
        write_tile(sum_ML, out_MN, first_token, t * LANES)
