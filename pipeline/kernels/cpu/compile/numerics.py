"""Reading, widening, rounding and exponentials in compiled kernels. Only kernels call these functions.

Arrays are float32, or bfloat16 as its bits in uint16: widening is a shift, because float32 has the same exponent. Keys
and values may be FP8 codes in uint8 with scales (`kernels/cache.py`); None means no scales. Everything is computed in
float32 and rounded once. NaNs propagate, so that broken rows are detected.
"""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from pipeline.kernels.cache import FP8, LayerCache


@intrinsic
def float_of_bits(typing_context, bits):
    def lower(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), lower


@intrinsic
def bits_of_float(typing_context, value):
    def lower(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), lower


@intrinsic
def larger(typing_context, a, b):
    """Return the larger of two float32, or NaN if one is NaN. LLVM vectorizes this form of a maximum and no other."""

    def lower(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
        return builder.call(builder.module.declare_intrinsic("llvm.maximum", [ir.FloatType()], kind), arguments)

    return types.float32(types.float32, types.float32), lower


def wide(value):
    raise NotImplementedError("only inside compiled code")


@overload(wide, inline="always")
def _wide_as(value):
    if value == types.uint16:  # the bits of a bfloat16
        return lambda value: float_of_bits(np.uint32(value) << np.uint32(16))
    if value == types.uint8:  # an FP8 code
        return lambda value: wide_code(value)
    return lambda value: value


@njit(forceinline=True, fastmath={"contract"})
def wide_code(code):
    """Widen an FP8 code. Shifted into float32's fields, it is too small by a factor of 2^120, also if subnormal.

    It sets its own `fastmath`, like `exp`: if the factor were applied later, sums of such small products would be lost.
    """
    bits = np.uint32(code)
    shifted = (bits & np.uint32(0x7F)) << np.uint32(20) | (bits & np.uint32(0x80)) << np.uint32(24)
    return float_of_bits(np.uint32(shifted)) * _CODE_FACTOR


@njit(forceinline=True, fastmath={"contract"})
def code_of(value):
    """Return the FP8 code of a number up to 464 in magnitude, to the nearest, ties to even, like torch.

    Adding 2^14 leaves a subnormal code in the lowest bits of the sum. It sets its own `fastmath`, which would otherwise
    cancel the sum.
    """
    bits = bits_of_float(value)
    sign, size = (bits >> np.uint32(24)) & np.uint32(0x80), bits & np.uint32(0x7FFFFFFF)
    subnormal = bits_of_float(float_of_bits(np.uint32(size)) + _CODE_ROUNDER) - _CODE_ROUNDER_BITS
    odd = (size >> np.uint32(20)) & np.uint32(1)
    normal = ((size + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32(120 << 3)
    return np.uint8(sign | (subnormal if size < _FIRST_NORMAL_BITS else normal))


def scale_at(scale_CKB, block, offset, head):
    raise NotImplementedError("only inside compiled code")


@overload(scale_at, inline="always")
def _scale_at_or_1(scale_CKB, block, offset, head):
    """Return 1 without scales; multiplying by it changes nothing."""
    if isinstance(scale_CKB, types.NoneType):
        return lambda scale_CKB, block, offset, head: np.float32(1.0)
    return lambda scale_CKB, block, offset, head: scale_CKB[block, head, offset]


def as_in(array, value):
    raise NotImplementedError("only inside compiled code")


@overload(as_in, inline="always")
def _rounded_as(array, value):
    """Round float32 `value` to the type of `array`, to the nearest, ties to even."""
    if array.dtype == types.uint16:
        return lambda array, value: _bfloat16_bits(value)
    return lambda array, value: value


@njit(forceinline=True)
def _bfloat16_bits(value):
    bits = bits_of_float(value)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return rounded if value == value else np.uint16(0x7FC0)


_CODE_FACTOR = np.float32(2.0**120)
_CODE_ROUNDER, _CODE_ROUNDER_BITS = np.float32(2.0**14), np.uint32((127 + 14) << 23)
_FIRST_NORMAL_BITS = np.uint32((127 - 6) << 23)

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUNDER = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
_ROUNDER_BITS = np.uint32(0x4B400000)
_EXP = tuple(np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                                     1.6666665459e-1, 5.0000001201e-1))  # fmt: skip
_LOWEST, _HIGHEST = np.float32(-87.33), np.float32(88.0)


@njit(forceinline=True, error_model="numpy", fastmath={"contract"})
def exp(x):
    """Return e^x within 2 units in the last place, in plain arithmetic, so that loops over it are vectorized.

    Arguments are clamped to the range of normal float32 numbers. The polynomial is that of Cephes' expf. It sets its
    own `fastmath`: with the caller's, which allows reordering of sums, the rounder would cancel.
    """
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    shifted = x * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = _EXP[0]
    p = p * r + _EXP[1]
    p = p * r + _EXP[2]
    p = p * r + _EXP[3]
    p = p * r + _EXP[4]
    p = p * r + _EXP[5]
    power = (bits_of_float(shifted) - _ROUNDER_BITS + np.uint32(127)) << np.uint32(23)
    return (p * r * r + r + np.float32(1.0)) * float_of_bits(np.uint32(power))


@njit(forceinline=True, error_model="numpy", fastmath={"contract"})
def soft_capped(x, cap):
    """Return cap * tanh(x / cap). NaN stays NaN; infinity becomes the cap."""
    return cap - (cap + cap) / (exp(x * (np.float32(2.0) / cap)) + np.float32(1.0))


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return `tensor` as the array that compiled kernels read and write, without a copy."""
    dtype = tensor.dtype
    if dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elif dtype == FP8:
        tensor = tensor.view(torch.uint8)
    return tensor.numpy()


CacheArrays = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


def arrays_of(cache: LayerCache) -> CacheArrays:
    """Return keys, values and their scales as the arrays that the attention kernels read."""
    k_scale_CKB = None if cache.k_scale_CKB is None else cache.k_scale_CKB.numpy()
    v_scale_CKB = None if cache.v_scale_CKB is None else cache.v_scale_CKB.numpy()
    return bits(cache.k_CBKD), bits(cache.v_CBKD), k_scale_CKB, v_scale_CKB
