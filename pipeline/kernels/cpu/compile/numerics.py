"""How compiled kernels read, widen, round and exponentiate numbers. Only kernels call these functions.

Arrays are float32, or bfloat16 as its bits in uint16: widening is a shift, because float32 has the same exponent. Keys
and values may be FP8 codes in uint8 beside scales (`kernels/cache.py`); None stands for no scales. Everything is
computed in float32 and rounded once. A NaN stays a NaN: broken rows must be found.
"""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

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
    """Of two float32, or a NaN where one is. LLVM makes vector code of a maximum written so, and of no other."""

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
    """Sign, exponent and mantissa in float32's places are too small by 2^120, those of subnormal codes as well.

    Its own `fastmath`, as in `exp`: multiplied later, sums of so small products would be lost.
    """
    bits = np.uint32(code)
    shifted = (bits & np.uint32(0x7F)) << np.uint32(20) | (bits & np.uint32(0x80)) << np.uint32(24)
    return float_of_bits(np.uint32(shifted)) * _CODE_FACTOR


@njit(forceinline=True, fastmath={"contract"})
def code_of(value):
    """The FP8 code of a number of at most 464 in size, rounded to the nearest, ties to even; as torch does it.

    Adding 2^14 leaves a subnormal code as the lowest bits of the sum. Its own `fastmath`, or the sum would be undone.
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
def _scale_where(scale_CKB, block, offset, head):
    """1 where there are no scales; what is multiplied by it is then left as it is."""
    if isinstance(scale_CKB, types.NoneType):
        return lambda scale_CKB, block, offset, head: np.float32(1.0)
    return lambda scale_CKB, block, offset, head: scale_CKB[block, head, offset]


def as_in(array, value):
    raise NotImplementedError("only inside compiled code")


@overload(as_in, inline="always")
def _rounded_as(array, value):
    """float32 `value` in the type of `array`, rounded to the nearest, ties to even."""
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
_ROUNDER = np.float32(12582912.0)  # 1.5 * 2^23: added, it leaves the nearest integer in the lowest bits
_ROUNDER_BITS = np.uint32(0x4B400000)
_EXP = tuple(np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                                     1.6666665459e-1, 5.0000001201e-1))  # fmt: skip
_LOWEST, _HIGHEST = np.float32(-87.33), np.float32(88.0)


@njit(forceinline=True, error_model="numpy", fastmath={"contract"})
def exp(x):
    """e^x within 2 units in the last place, in plain arithmetic so that loops over it become vector code.

    Arguments are clamped to what float32 holds as normal numbers. The polynomial is that of Cephes' expf. Its own
    `fastmath`, or it would inherit the caller's: where sums may be reordered, the rounder would cancel.
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


def bits(tensor: torch.Tensor) -> np.ndarray:
    """`tensor` as a compiled kernel reads and writes it, without a copy."""
    dtype = tensor.dtype
    if dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elif dtype == FP8:
        tensor = tensor.view(torch.uint8)
    return tensor.numpy()


CacheArrays = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


def arrays_of(cache: LayerCache) -> CacheArrays:
    """Keys, values and their scales as the attention kernels read them."""
    k_scale_CKB = None if cache.k_scale_CKB is None else cache.k_scale_CKB.numpy()
    v_scale_CKB = None if cache.v_scale_CKB is None else cache.v_scale_CKB.numpy()
    return bits(cache.k_CBKD), bits(cache.v_CBKD), k_scale_CKB, v_scale_CKB
