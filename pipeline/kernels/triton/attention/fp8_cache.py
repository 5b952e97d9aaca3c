"""FP8 codes by their bits, in registers: GPUs before compute capability 8.9 have no instructions for them.

See `kernels/cache.py` for the numerics. Suffixes in kernels: L rows of a tile, D its columns.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not see what `triton.jit` makes of a function.

import triton
import triton.language as tl

from pipeline.kernels.cache import FP8_MAX, SMALLEST_SCALE

_SHARE: tl.constexpr = tl.constexpr(1.0 / FP8_MAX)
_SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_SCALE)
LIFT: tl.constexpr = tl.constexpr(2.0**60)
"""What the other operand of a product with codes widened to bfloat16 or float32 is multiplied by, or the product: 2^120
at once, which their exponents and those of codes differ by, would leave their range."""


@triton.jit
def widened(code, dtype: tl.constexpr):
    """Codes (int8) in `dtype`, exactly, but too small by 2^8 in float16, else by 2^120: sign, exponent and mantissa are
    moved to their places, and the exponent of `dtype` counts from another number."""
    if dtype == tl.float16:
        return ((code.to(tl.int16) << 7) & (0xBF80 - 0x10000)).to(dtype, bitcast=True)
    elif dtype == tl.bfloat16:
        return ((code.to(tl.int16) << 4) & (0x87F0 - 0x10000)).to(dtype, bitcast=True)
    else:
        return ((code.to(tl.int32) << 20) & (0x87F00000 - 0x100000000)).to(tl.float32, bitcast=True)


@triton.jit
def scales_of(low_LD, high_LD):
    """The scale of each row, whose halves are float32, and what the row is multiplied by: NaN and 0 of a broken one."""
    low_size = low_LD.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    high_size = high_LD.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.maximum(tl.max(low_size, axis=1), tl.max(high_size, axis=1))  # infinity and NaN have the largest bits
    scale = tl.maximum(most.to(tl.float32, bitcast=True) * _SHARE, _SMALLEST)
    is_sound = most < 0x7F800000
    return tl.where(is_sound, scale, float("nan")), tl.where(is_sound, tl.div_rn(1.0, scale), 0.0)


@triton.jit
def codes_of(x_LD, inverse_L):
    """Codes of x * inverse, to the nearest, ties to even; 0 where the inverse is.

    Adding 2^14 leaves a subnormal code as the lowest bits of the sum.
    """
    scaled = tl.where(inverse_L[:, None] > 0.0, x_LD * inverse_L[:, None], 0.0)
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0x3C800000, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8).to(tl.int8, bitcast=True)
