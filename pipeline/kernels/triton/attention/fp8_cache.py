"""FP8 codes in registers: by conversion instructions, or by their bits on GPUs before compute capability 8.9.

See `kernels/cache.py` for the numerics. Suffixes in kernels: L rows of a tile, D its columns.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not see what `triton.jit` makes of a function.

import triton
import triton.language as tl
from triton import knobs

from pipeline.kernels.cache import FP8_MAX, SMALLEST_SCALE

_SHARE: tl.constexpr = tl.constexpr(1.0 / FP8_MAX)
_SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_SCALE)
_INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))

# Two pairs at a time: those of one column of two neighbouring keys, as values reach a product's operand.
_CONVERT: tl.constexpr = tl.constexpr("""{
    .reg .b32 ordered;
    .reg .b16 even, odd;
    prmt.b32 ordered, $2, 0, 0x3120;
    mov.b32 {even, odd}, ordered;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
_MOVE: tl.constexpr = tl.constexpr("""{
    .reg .b32 high, sign, rest;
    shl.b32 high, $2, 8;
    and.b32 sign, high, 0x80008000;
    shr.u32 rest, high, 1;
    lop3.b32 $0, rest, 0x3F803F80, sign, 0xEA;
    and.b32 sign, $2, 0x80008000;
    shr.u32 rest, $2, 1;
    lop3.b32 $1, rest, 0x3F803F80, sign, 0xEA;
}""")


@triton.jit
def halves(pair, dtype: tl.constexpr, CONVERTS: tl.constexpr):
    """Even and odd codes of pairs of them (int16, the even one in the low byte), in float16 or float32.

    They are exact where the GPU CONVERTS codes. Else sign, exponent and mantissa are moved to their places in float16,
    which leaves them too small by 2^8.
    """
    if _INTERPRETED:  # no PTX: the bits of each code by itself
        tl.static_assert(not CONVERTS)
        even = (((pair << 7) & 0x3F80) | ((pair << 8) & (0x8000 - 0x10000))).to(tl.float16, bitcast=True)
        odd = (((pair >> 1) & 0x3F80) | (pair & (0x8000 - 0x10000))).to(tl.float16, bitcast=True)
    else:
        even, odd = tl.inline_asm_elementwise(
            _CONVERT if CONVERTS else _MOVE,
            "=r,=r,r",
            [pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return even.to(dtype), odd.to(dtype)


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
