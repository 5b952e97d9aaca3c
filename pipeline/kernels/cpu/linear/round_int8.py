"""Rounding of tokens to int8, compiled by numba: steps 1 and 2 of `kernels/activations/int8.py`."""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

import numpy as np
from numba import njit

from pipeline.kernels.cpu.compile.numerics import bits_of_float, float_of_bits, wide
from pipeline.kernels.cpu.compile.threads import kernel, parallel_for

FEW = 16  # below this many tokens the linear's kernel rounds them on one thread: a separate call takes longer
_LARGEST, _ZERO = np.float32(127.0), np.float32(0.0)
_SIZE_BITS, _INFINITY_BITS = np.uint32(0x7FFFFFFF), np.uint32(0xFF << 23)


@njit(error_model="numpy", fastmath={"nsz"})
def round_token(x_K, block, byte_K, scale_B, sum_B):
    """Round one token, in float32 or bits of bfloat16. sum_B receives the sums of the integers of each block.

    `byte_K` may be longer than x, up to whole blocks; the rest becomes 0. A block with a NaN or an infinity gets the
    scale NaN. It sets its own `fastmath`, so that divisions follow the definition.
    """
    for b in range(len(scale_B)):
        start = b * block
        values, rounded = x_K[start : min(start + block, len(x_K))], byte_K[start : start + block]
        max_bits = np.uint32(0)  # of the largest magnitude; bits of infinity and NaN exceed those of any number
        for i in range(len(values)):
            max_bits = max(max_bits, bits_of_float(wide(values[i])) & _SIZE_BITS)
        largest, is_sound = float_of_bits(max_bits), max_bits < _INFINITY_BITS
        inverse = _LARGEST / largest if is_sound and largest > _ZERO else _ZERO
        total = np.int32(0)
        for i in range(len(values)):
            integer = np.int32(np.rint(wide(values[i]) * inverse)) if is_sound else np.int32(0)
            rounded[i] = np.int8(integer)
            total += integer
        for i in range(len(values), block):
            rounded[i] = 0
        scale_B[b], sum_B[b] = largest / _LARGEST if is_sound else np.float32(np.nan), total


@kernel()
def round_to_int8(x_MK, block, byte_MK, scale_MB, sum_MB, begin, end):
    """Apply `round_token` to all tokens."""
    if end < 0:
        return parallel_for(len(x_MK))
    for m in range(begin, end):
        round_token(x_MK[m], block, byte_MK[m], scale_MB[m], sum_MB[m])
