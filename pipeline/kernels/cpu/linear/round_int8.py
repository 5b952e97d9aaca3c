"""Rounding of tokens to int8, compiled by numba: steps 1 and 2 of `kernels/activations/int8.py`."""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

import numpy as np
from numba import njit

from pipeline.kernels.cpu.compile.numerics import bits_of_float, float_of_bits, wide
from pipeline.kernels.cpu.compile.threads import kernel, share_out

FEW = 16  # tokens below which a linear's own kernel rounds them, on one thread: another call takes longer
_LARGEST, _ZERO = np.float32(127.0), np.float32(0.0)
_SIZE_BITS, _INFINITY_BITS = np.uint32(0x7FFFFFFF), np.uint32(0xFF << 23)


@njit(error_model="numpy", fastmath={"nsz"})
def round_token(x_K, block, byte_K, scale_B, sum_B):
    """One token, in float32 or bits of bfloat16; sum_B: of a block's integers.

    `byte_K` may have more inputs than x, up to whole blocks: they become 0. A block that holds what is no finite number
    gets a scale of NaN. Its own `fastmath`: divisions as the definition has them.
    """
    for b in range(len(scale_B)):
        start = b * block
        values, rounded = x_K[start : min(start + block, len(x_K))], byte_K[start : start + block]
        most = np.uint32(0)  # bits of the largest size; those of infinity and of a NaN are larger than any number's
        for i in range(len(values)):
            most = max(most, bits_of_float(wide(values[i])) & _SIZE_BITS)
        largest, is_sound = float_of_bits(most), most < _INFINITY_BITS
        inverse = _LARGEST / largest if is_sound and largest > _ZERO else _ZERO
        count = np.int32(0)
        for i in range(len(values)):
            integer = np.int32(np.rint(wide(values[i]) * inverse)) if is_sound else np.int32(0)
            rounded[i] = np.int8(integer)
            count += integer
        for i in range(len(values), block):
            rounded[i] = 0
        scale_B[b], sum_B[b] = largest / _LARGEST if is_sound else np.float32(np.nan), count


@kernel()
def round_to_int8(x_MK, block, byte_MK, scale_MB, sum_MB, begin, end):
    """`round_token` for all tokens."""
    if end < 0:
        return share_out(len(x_MK))
    for m in range(begin, end):
        round_token(x_MK[m], block, byte_MK[m], scale_MB[m], sum_MB[m])
