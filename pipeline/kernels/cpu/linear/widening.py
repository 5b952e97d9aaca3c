"""Widening of a tile's weights to float32 in compiled code, a few inputs at a time, for each stored type.

Each function widens `depth` inputs from `start` on of tile `t` into wide_DL and returns that. Scales, and zero points
for types that have them, have one row per `size` inputs. Rounding is the same as in the weight's `dequantize`.
"""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

import numpy as np
from numba import njit

from pipeline.kernels.cpu.compile.numerics import float_of_bits
from pipeline.kernels.cpu.tiles.weight_tiles import LANES

FLOAT8_EXPONENT = np.float32(2.0**120)
"""A float8_e4m3fn's exponent and fraction, moved to their fields of a float32, are its value times 2^-120."""
_NIBBLES = tuple(np.uint32(0xF << 4 * j) for j in range(8))
_INVERSES = tuple(np.float32(16.0**-j) for j in range(8))
_BYTES = tuple(np.uint32(0xFF << 8 * j) for j in range(4))
_BYTE_INVERSES = tuple(np.float32(256.0**-j) for j in range(4))
_MAGNITUDES = tuple(np.uint32(0x7F << 8 * j) for j in range(4))
_SIGNS = tuple(np.uint32(0x80 << 8 * j) for j in range(4))
_HIGH_HALF = np.uint32(0xFFFF0000)
_HALF = np.uint32(16)


def _float32(words_TWL, scales_TGL, zeros_TGL, t, size, start, depth, wide_DL):
    """Return the weights without widening."""
    return words_TWL[t][start:]


def _bfloat16(words_TWL, scales_TGL, zeros_TGL, t, size, start, depth, wide_DL):
    for d in range(0, depth, 2):
        word, low, high = words_TWL[t, (start + d) // 2], wide_DL[d], wide_DL[d + 1]
        for n in range(LANES):
            low[n] = float_of_bits(word[n] << _HALF)
            high[n] = float_of_bits(word[n] & _HIGH_HALF)
    return wide_DL


def _int4(words_TWL, scales_TGL, zeros_TGL, t, size, start, depth, wide_DL):
    """Mask the integers instead of shifting them: q * 16^j is exact in float32, and so are the steps to q - zero."""
    for d in range(0, depth, 8):
        word, group = words_TWL[t, (start + d) // 8], (start + d) // size
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
            w7[n] = (np.float32(np.int32(bits >> np.uint32(28))) - z) * s  # masked, it would be negative
    return wide_DL


def _int8(words_TWL, scales_TGL, zeros_TGL, t, size, start, depth, wide_DL):
    """Mask the integers, as in `_int4`."""
    for d in range(0, depth, 4):
        word, group = words_TWL[t, (start + d) // 4], (start + d) // size
        scale, zero = scales_TGL[t, group], zeros_TGL[t, group]
        w0, w1, w2, w3 = wide_DL[d], wide_DL[d + 1], wide_DL[d + 2], wide_DL[d + 3]
        for n in range(LANES):
            bits, z, s = word[n], zero[n], scale[n]
            w0[n] = (np.float32(np.int32(bits & _BYTES[0])) - z) * s
            w1[n] = (np.float32(np.int32(bits & _BYTES[1])) * _BYTE_INVERSES[1] - z) * s
            w2[n] = (np.float32(np.int32(bits & _BYTES[2])) * _BYTE_INVERSES[2] - z) * s
            w3[n] = (np.float32(np.int32(bits >> np.uint32(24))) - z) * s
    return wide_DL


def _float8(words_TWL, scales_TGL, zeros_TGL, t, size, start, depth, wide_DL):
    """Widen float8_e4m3fn. Scales include the factor FLOAT8_EXPONENT. The last group may have fewer inputs."""
    for d in range(0, depth, 4):
        word, scale = words_TWL[t, (start + d) // 4], scales_TGL[t, (start + d) // size]
        w0, w1, w2, w3 = wide_DL[d], wide_DL[d + 1], wide_DL[d + 2], wide_DL[d + 3]
        for n in range(LANES):
            bits, s = word[n], scale[n]
            b0 = (bits & _MAGNITUDES[0]) << np.uint32(20) | (bits & _SIGNS[0]) << np.uint32(24)
            b1 = (bits & _MAGNITUDES[1]) << np.uint32(12) | (bits & _SIGNS[1]) << np.uint32(16)
            b2 = (bits & _MAGNITUDES[2]) << np.uint32(4) | (bits & _SIGNS[2]) << np.uint32(8)
            b3 = (bits & _MAGNITUDES[3]) >> np.uint32(4) | (bits & _SIGNS[3])
            w0[n], w1[n] = float_of_bits(b0) * s, float_of_bits(b1) * s
            w2[n], w3[n] = float_of_bits(b2) * s, float_of_bits(b3) * s
    return wide_DL


def _codebook4(words_TWL, scales_TGL, codebook_C, t, size, start, depth, wide_DL):
    """Look up 4-bit codes one by one."""
    for d in range(depth):
        word, scale = words_TWL[t, (start + d) // 8], scales_TGL[t, (start + d) // size]
        shift, out = np.uint32(4 * (d % 8)), wide_DL[d]
        for n in range(LANES):
            out[n] = codebook_C[word[n] >> shift & _NIBBLES[0]] * scale[n]
    return wide_DL


WIDENINGS = {
    kind: njit(inline="always")(function)
    for kind, function in {
        "float32": _float32,
        "bfloat16": _bfloat16,
        "int4": _int4,
        "int8": _int8,
        "float8": _float8,
        "codebook4": _codebook4,
    }.items()
}
"""Keys are kinds of weights."""
