"""FP8 codes in registers: by conversion instructions, or by bit operations on GPUs before compute capability 8.9.

See `kernels/cache.py` for the numerics. Suffixes in kernels: L rows of a tile, D its columns.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

import triton
import triton.language as tl
from triton import knobs

from pipeline.kernels.cache import FP8_MAX, SMALLEST_SCALE

_INVERSE_FP8_MAX: tl.constexpr = tl.constexpr(1.0 / FP8_MAX)
_SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_SCALE)
_INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))

# Two pairs at a time: those of one column of two adjacent keys, in the order in which products read their operands.
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
    """Split pairs of codes (int16, the even one in the low byte) into even and odd values, in float16 or float32.

    The values are exact if the GPU CONVERTS codes. Else sign, exponent and mantissa are moved to their fields of
    float16, which makes the values too small by 2^8.
    """
    if _INTERPRETED:  # no PTX: handle the bits of each code separately
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
    """Return the scale of each row, given its float32 halves, and the factor that the row is multiplied by. A row with
    a NaN or an infinity has the scale NaN and the factor 0."""
    low_size = low_LD.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    high_size = high_LD.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.maximum(tl.max(low_size, axis=1), tl.max(high_size, axis=1))  # infinity and NaN have the largest bits
    scale = tl.maximum(largest.to(tl.float32, bitcast=True) * _INVERSE_FP8_MAX, _SMALLEST)
    is_sound = largest < 0x7F800000
    return tl.where(is_sound, scale, float("nan")), tl.where(is_sound, tl.div_rn(1.0, scale), 0.0)


@triton.jit
def codes_of(x_LD, inverse_L):
    """Return the codes of x * inverse, to the nearest, ties to even; 0 where the inverse is 0.

    Adding 2^14 leaves a subnormal code in the lowest bits of the sum.
    """
    scaled = tl.where(inverse_L[:, None] > 0.0, x_LD * inverse_L[:, None], 0.0)
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0x3C800000, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8).to(tl.int8, bitcast=True)
