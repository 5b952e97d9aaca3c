"""The loops of linears whose weight stays narrow in memory, compiled by numba: widened in registers, computed in
float32.

A weight (N, K) lies in tiles of L outputs ("lanes"): words_TWL[tile, w] holds a few consecutive inputs of each lane
in 32 bits: two of bfloat16 (the even one in the low half) or eight of 4 bits (input 8 w + j in bits 4 j to 4 j + 3).
So a tile is read from memory front to back once, whatever the number of tokens, and every loop over lanes becomes
vector code. The last tile is filled up with zeros. Apart from `compiled.py`, since numba's cache on disk looks at
whole files.

Suffixes: M tokens, K inputs, N outputs, G groups of inputs, T tiles, W words of a lane, L lanes, C outputs of some
tiles.
"""

import numpy as np
from numba import njit, prange

from pipeline.kernels.cpu.compiled import add_products, options

INPUTS = 8  # taken together: their products are summed in registers before the sum so far is read and written

_NIBBLE = np.uint32(0xF)
_NIBBLES = tuple(np.uint32(0xF << 4 * j) for j in range(INPUTS))
_INVERSES = tuple(np.float32(16.0**-j) for j in range(INPUTS))
_HIGH_HALF = np.uint32(0xFFFF0000)
_HALF = np.uint32(16)


@njit(**options)
def multiply_bfloat16(x_MK, words_TWL, out_MN):
    """out = x @ weight.T; x and out float32."""
    num_tokens, lanes, num_outputs = len(x_MK), words_TWL.shape[2], out_MN.shape[1]
    for t in prange(len(words_TWL)):
        words_WL = words_TWL[t]
        sum_ML = np.zeros((num_tokens, lanes), np.float32)
        wide = np.empty((INPUTS, lanes), np.float32)
        bits = wide.view(np.uint32)
        w0, w1, w2, w3, w4, w5, w6, w7 = wide[0], wide[1], wide[2], wide[3], wide[4], wide[5], wide[6], wide[7]
        for k in range(0, x_MK.shape[1], INPUTS):
            for pair in range(INPUTS // 2):
                word, low, high = words_WL[k // 2 + pair], bits[2 * pair], bits[2 * pair + 1]
                for n in range(lanes):
                    low[n] = word[n] << _HALF
                    high[n] = word[n] & _HIGH_HALF
            for m in range(num_tokens):
                add_products(
                    sum_ML[m], x_MK[m, k], x_MK[m, k + 1], x_MK[m, k + 2], x_MK[m, k + 3], x_MK[m, k + 4],
                    x_MK[m, k + 5], x_MK[m, k + 6], x_MK[m, k + 7], w0, w1, w2, w3, w4, w5, w6, w7,
                )  # fmt: skip
        count = min(lanes, num_outputs - t * lanes)
        for m in range(num_tokens):
            for n in range(count):
                out_MN[m, t * lanes + n] = sum_ML[m, n]


@njit(**options)
def multiply_int4(x_MK, words_TWL, scales_TGL, zeros_TGL, out_MN):
    """out = x @ ((q - zero) * scale).T; x and out float32.

    Integers are masked, not shifted: q * 16^j is exact in float32, and so is the fused multiply and subtract that makes
    q - zero of it. The scale is multiplied to the sum of a group.
    """
    (num_tokens, num_inputs), lanes, num_outputs = x_MK.shape, words_TWL.shape[2], out_MN.shape[1]
    num_groups = scales_TGL.shape[1]
    size = num_inputs // num_groups
    for t in prange(len(words_TWL)):
        words_WL = words_TWL[t]
        out_ML = np.zeros((num_tokens, lanes), np.float32)
        sum_ML = np.empty((num_tokens, lanes), np.float32)
        wide = np.empty((INPUTS, lanes), np.float32)
        w0, w1, w2, w3, w4, w5, w6, w7 = wide[0], wide[1], wide[2], wide[3], wide[4], wide[5], wide[6], wide[7]
        for g in range(num_groups):
            scale, zero = scales_TGL[t, g], zeros_TGL[t, g]
            for m in range(num_tokens):
                for n in range(lanes):
                    sum_ML[m, n] = np.float32(0.0)
            for k in range(g * size, (g + 1) * size, INPUTS):
                word = words_WL[k // INPUTS]
                for n in range(lanes):
                    bits, z = word[n], zero[n]
                    w0[n] = np.float32(np.int32(bits & _NIBBLES[0])) - z
                    w1[n] = np.float32(np.int32(bits & _NIBBLES[1])) * _INVERSES[1] - z
                    w2[n] = np.float32(np.int32(bits & _NIBBLES[2])) * _INVERSES[2] - z
                    w3[n] = np.float32(np.int32(bits & _NIBBLES[3])) * _INVERSES[3] - z
                    w4[n] = np.float32(np.int32(bits & _NIBBLES[4])) * _INVERSES[4] - z
                    w5[n] = np.float32(np.int32(bits & _NIBBLES[5])) * _INVERSES[5] - z
                    w6[n] = np.float32(np.int32(bits & _NIBBLES[6])) * _INVERSES[6] - z
                    w7[n] = np.float32(np.int32(bits >> np.uint32(28))) - z  # masked it would be negative
                for m in range(num_tokens):
                    add_products(
                        sum_ML[m], x_MK[m, k], x_MK[m, k + 1], x_MK[m, k + 2], x_MK[m, k + 3], x_MK[m, k + 4],
                        x_MK[m, k + 5], x_MK[m, k + 6], x_MK[m, k + 7], w0, w1, w2, w3, w4, w5, w6, w7,
                    )  # fmt: skip
            for m in range(num_tokens):
                for n in range(lanes):
                    out_ML[m, n] += scale[n] * sum_ML[m, n]
        count = min(lanes, num_outputs - t * lanes)
        for m in range(num_tokens):
            for n in range(count):
                out_MN[m, t * lanes + n] = out_ML[m, n]


@njit(**options)
def widen_bfloat16(words_TWL, first, out_KC):
    """Tiles `first` and following as float32 columns; as many as `out_KC` has room for."""
    lanes = words_TWL.shape[2]
    for i in prange(out_KC.shape[1] // lanes):
        words_WL, columns_KL = words_TWL[first + i], out_KC[:, i * lanes : (i + 1) * lanes].view(np.uint32)
        for w in range(len(words_WL)):
            word, low, high = words_WL[w], columns_KL[2 * w], columns_KL[2 * w + 1]
            for n in range(lanes):
                low[n] = word[n] << _HALF
                high[n] = word[n] & _HIGH_HALF


@njit(**options)
def widen_int4(words_TWL, scales_TGL, zeros_TGL, first, out_KC):
    """Tiles `first` and following as float32 columns, each value as `GroupIntWeight.dequantize` rounds it."""
    lanes, num_groups = words_TWL.shape[2], scales_TGL.shape[1]
    words_a_group = words_TWL.shape[1] // num_groups
    for i in prange(out_KC.shape[1] // lanes):
        words_WL, columns_KL = words_TWL[first + i], out_KC[:, i * lanes : (i + 1) * lanes]
        for g in range(num_groups):
            scale, zero = scales_TGL[first + i, g], zeros_TGL[first + i, g]
            for w in range(g * words_a_group, (g + 1) * words_a_group):
                word = words_WL[w]
                for j in range(INPUTS):
                    column, shift = columns_KL[INPUTS * w + j], np.uint32(4 * j)
                    for n in range(lanes):
                        column[n] = (np.float32(np.int32((word[n] >> shift) & _NIBBLE)) - zero[n]) * scale[n]
