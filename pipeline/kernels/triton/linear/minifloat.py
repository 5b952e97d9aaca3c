"""Weights of small floats on a GPU, as codes: e4m3 (8 bits) and e2m1 (4 bits, MXFP4 and NVFP4).

Words have the order of `linear/int4.py`, so that codes become the left operand of a product in registers. A code's sign
and its other bits move to the sign, exponent and mantissa of a 16-bit float: in bfloat16 e4m3's are s0000eeeemmm0000,
in float16 s0eeeemmm0000000. That float is the value over a power of two (`POWERS`), also if it is subnormal, so the
conversion is exact (after Frantar et al. 2024, "MARLIN").

e4m3 is multiplied by the power in registers; its scale, float32 per output and block of 128 inputs, is applied after
the block's dot product. e2m1 has a scale per output and 16 or 32 inputs, which is stored times the power. It multiplies
the code's float in registers, and the result is rounded once, as `CodebookWeight.dequantize` rounds it: in the
products' type if that represents the scales exactly, else in float32.

Suffixes as in `linear/int4.py`: N outputs, K inputs, M tokens, B blocks, W words, L threads, Q quarters, G groups.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
# It does not understand functions made by `triton.jit`.

import torch
import triton
import triton.language as tl
from triton import knobs

from pipeline.kernels.triton.linear.int4 import in_order, pairs_in_order

POWERS = {torch.bfloat16: 126, torch.float16: 14, torch.float32: 14}
"""Exponent of the power of two, for e2m1 and the products' type."""

_INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))  # without PTX
_SIGNS: tl.constexpr = tl.constexpr(-0x7FFF8000)  # 0x80008000


@triton.jit
def _bits(top, BITS: tl.constexpr, dtype: tl.constexpr):
    """Return two 16-bit floats from codes at the top of each half of a word: the values over a power of two. They are
    float16 unless `dtype` is bfloat16."""
    if BITS == 4:
        SHIFT: tl.constexpr = 6 if dtype == tl.bfloat16 else 3
        MASK: tl.constexpr = 0x01C001C0 if dtype == tl.bfloat16 else 0x0E000E00
    else:
        SHIFT: tl.constexpr = 4 if dtype == tl.bfloat16 else 1
        MASK: tl.constexpr = 0x07F007F0 if dtype == tl.bfloat16 else 0x3F803F80
    return (top & _SIGNS) | ((top >> SHIFT) & MASK)


@triton.jit
def _times(pair, factor, dtype: tl.constexpr):
    """Multiply two pairs of 16-bit floats. Bfloat16 has no product before sm_90, so it is a sum with -0."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;" if dtype == tl.bfloat16 else "fma.rn.f16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [pair, factor, tl.full(pair.shape, _SIGNS, tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _times_float32(pair, factor, dtype: tl.constexpr):
    """Multiply a pair of 16-bit floats by a float32, and round once."""
    if dtype == tl.bfloat16:
        ASM: tl.constexpr = """{
            .reg .b32 low, high;
            shl.b32 low, $1, 16;
            and.b32 high, $1, 0xFFFF0000;
            mul.rn.f32 low, low, $2;
            mul.rn.f32 high, high, $2;
            cvt.rn.bf16x2.f32 $0, high, low;
        }"""
    else:
        ASM: tl.constexpr = """{
            .reg .b16 half_low, half_high;
            .reg .b32 low, high;
            mov.b32 {half_low, half_high}, $1;
            cvt.f32.f16 low, half_low;
            cvt.f32.f16 high, half_high;
            mul.rn.f32 low, low, $2;
            mul.rn.f32 high, high, $2;
            cvt.rn.f16x2.f32 $0, high, low;
        }"""
    return tl.inline_asm_elementwise(ASM, "=r,r,f", [pair, factor], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _pair(top, scale, BITS: tl.constexpr, dtype: tl.constexpr):
    """Return the values of two codes at the top of each half of a word. Those of e2m1 are multiplied by `scale`, which
    is stored times the power."""
    pair = _bits(top, BITS, dtype)
    if BITS == 8:
        return _times(pair, tl.full(top.shape, 0x7B807B80 if dtype == tl.bfloat16 else 0x5C005C00, tl.int32), dtype)
    elif scale.dtype == dtype:
        bits = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return _times(pair, bits | (bits << 16), dtype)
    else:
        return _times_float32(pair, scale.to(tl.float32), dtype)


@triton.jit
def _half(top, scale, HALF: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Do the same as `_pair` for one half of a word, without PTX. The power is that of float16."""
    bits = (_bits(top, BITS, tl.float16) >> (16 * HALF)) & 0xFFFF
    value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (value * (256.0 if BITS == 8 else scale.to(tl.float32))).to(dtype)


@triton.jit
def _halves(zero, one, two, three, even, odd, HALF: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Return one half of each run, with dimensions run // 2 and run % 2. even, odd: scales of runs 0, 1 and 2, 3."""
    return tl.join(
        tl.join(_half(zero, even, HALF, BITS, dtype), _half(two, odd, HALF, BITS, dtype)),
        tl.join(_half(one, even, HALF, BITS, dtype), _half(three, odd, HALF, BITS, dtype)),
    )


@triton.jit
def _values(zero, one, two, three, even, odd, BITS: tl.constexpr, ADJACENT: tl.constexpr, dtype: tl.constexpr):
    """Return the values of the four runs' codes, at the top of each half, in order: (outputs, inputs)."""
    if dtype == tl.float32 or _INTERPRETED:
        low = _halves(zero, one, two, three, even, odd, 0, BITS, dtype)
        high = _halves(zero, one, two, three, even, odd, 1, BITS, dtype)
        return in_order(low, high, ADJACENT)
    else:
        return pairs_in_order(
            *(_pair(zero, even, BITS, dtype), _pair(one, even, BITS, dtype), _pair(two, odd, BITS, dtype)),
            *(_pair(three, odd, BITS, dtype), ADJACENT, dtype),
        )


@triton.jit
def e4m3_values(word_NW, ADJACENT: tl.constexpr, dtype: tl.constexpr):
    """Convert the words of a block to values (outputs, 128)."""
    first, second = tl.split(word_NW.reshape(word_NW.shape[0], 4, 4, 2))
    return _values(first << 8, first, second << 8, second, None, None, 8, ADJACENT, dtype)


@triton.jit
def _e2m1(word_NW, scale_NG, GROUP: tl.constexpr, ADJACENT: tl.constexpr, dtype: tl.constexpr):
    """Convert the words of a block to values (outputs, 128), with a scale per GROUP inputs."""
    word_NLQ = word_NW.reshape(word_NW.shape[0], 4, 4)
    if GROUP == 32:
        even_NQ, odd_NQ = scale_NG, scale_NG
    else:
        even_NQ, odd_NQ = tl.split(scale_NG.reshape(word_NW.shape[0], 4, 2))
    even_NLQ = tl.broadcast_to(even_NQ[:, None, :], word_NLQ.shape)
    odd_NLQ = tl.broadcast_to(odd_NQ[:, None, :], word_NLQ.shape)
    return _values(
        *(word_NLQ << 12, word_NLQ << 8, word_NLQ << 4, word_NLQ),
        *(even_NLQ, odd_NLQ, 4, ADJACENT, dtype),
    )


@triton.jit
def sum_of_blocks(
    x_at,
    word_ptr,
    scale_ptr,
    output_N,
    mask_N,
    mask_M,
    first,
    end,
    num_outputs,
    INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    ADJACENT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Multiply tokens by the weights of blocks `first` to `end`, and return sums (N, M). x_at: the first 128 inputs of
    each token, (K, M). Words are (B, N, W), scales (B, N) or (B, N, G)."""
    word_W, input_K = tl.arange(0, 4 * BITS), tl.arange(0, 128)
    dtype: tl.constexpr = x_at.dtype.element_ty
    total_NM = tl.zeros([mask_N.shape[0], mask_M.shape[0]], dtype=tl.float32)
    for block in range(first, end):
        row_N = block * num_outputs + output_N
        word_at = word_ptr + row_N[:, None] * (4 * BITS) + word_W[None, :]
        word_NW = tl.load(word_at, mask=mask_N[:, None], other=0)
        if INPUTS % 128 == 0:
            x_KM = tl.load(x_at + block * 128, mask=mask_M[None, :], other=0.0)
        else:
            inside = (block * 128 + input_K < INPUTS)[:, None] & mask_M[None, :]
            x_KM = tl.load(x_at + block * 128, mask=inside, other=0.0)
        if BITS == 8:
            scale_N = tl.load(scale_ptr + row_N, mask=mask_N, other=0.0)
            weight_NK = e4m3_values(word_NW, ADJACENT, dtype)
            total_NM += scale_N[:, None] * tl.dot(weight_NK, x_KM, input_precision="ieee")
        else:
            group_G = tl.arange(0, 128 // GROUP)
            scale_at = scale_ptr + row_N[:, None] * (128 // GROUP) + group_G[None, :]
            scale_NG = tl.load(scale_at, mask=mask_N[:, None], other=0.0)
            weight_NK = _e2m1(word_NW, scale_NG, GROUP, ADJACENT, dtype)
            total_NM = tl.dot(weight_NK, x_KM, total_NM, input_precision="ieee")
    return total_NM
