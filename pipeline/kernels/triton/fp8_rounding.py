"""Rounding of a linear's inputs to e4m3: in a separate launch, or in the kernel that computes the inputs.

`kernels/activations/fp8.py` defines the values. Both ways run `store_rounded` on inputs in their 16-bit type, so they
write the same bits.

Suffixes: M tokens, K inputs (padded to whole blocks with zeros), B blocks of inputs that share a scale.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pipeline.kernels.activations.fp8 import LARGEST, SMALLEST_MAGNITUDE
from pipeline.kernels.triton.launch import Launch, power_of_two

TOKENS_MULTIPLE = 16  # cuBLASLt reads the scales of a block 16 bytes at a time, and rejects other numbers of tokens
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST_MAGNITUDE)
_INPUTS_PER_PROGRAM = 2048  # inputs of a token that one program rounds, in blocks


@dataclass(frozen=True)
class Fp8Inputs:
    """Rounded inputs of a linear: value_MK in float8_e4m3fn and scale_BM in float32.

    M is the next multiple of TOKENS_MULTIPLE; tokens from `num_tokens` on are not written.
    dtype: type of the inputs before rounding, and of the linear's outputs.
    """

    value_MK: torch.Tensor
    scale_BM: torch.Tensor
    block: int  # inputs that share a scale, a power of two
    num_tokens: int
    dtype: torch.dtype

    @classmethod
    def for_tokens(cls, x_MK: torch.Tensor, row_stride: int, block: int) -> "Fp8Inputs":
        """Allocate the rounded inputs for the tokens of `x_MK`. row_stride: number of inputs, padded to blocks."""
        num_tokens = -(-len(x_MK) // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
        value_MK = torch.empty(num_tokens, row_stride, dtype=torch.float8_e4m3fn, device=x_MK.device)
        scale_BM = torch.empty(-(-row_stride // block), num_tokens, dtype=torch.float32, device=x_MK.device)
        return cls(value_MK, scale_BM, block, len(x_MK), x_MK.dtype)


@triton.jit
def _quotient(x, scale, inverse):
    """Return x / scale rounded to the nearest, given inverse = 1 / scale: three instructions instead of about 20.

    One correction is enough for every quotient of a token's 16-bit inputs (all mantissas were tested). The product with
    the inverse alone would decide ties of e4m3 wrongly.
    """
    near = x * inverse
    return tl.fma(tl.fma(-near, scale, x), inverse, near)


@triton.jit
def _nearest_e4m3(value):
    """Round float32 of at most 448 to the nearest value of e4m3, still in float32; ties to even, like a GPU's cast.

    It uses arithmetic, because the cast of Triton's interpreter truncates. The spacing of numbers around 1.5 * 2^20
    times the value's power of two is an eighth of that power, as in e4m3; near zero, with the power 2^-6, it is 2^-9.
    """
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large = tl.maximum(power, 0.015625) * 1572864.0
    return (value + large) - large


@triton.jit
def store_rounded(
    x_BK,
    token,
    first_block,
    value_ptr,
    scale_ptr,
    scale_stride,
    row_stride,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round a token's inputs (float32; 0 past the last), from a block on. Write values to (M, K), scales to (B, M)."""
    block_B = first_block + tl.arange(0, BLOCKS)
    input_BK = block_B[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    size_B = tl.max(x_BK.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # infinity and NaN have the largest bits
    scale_B = tl.div_rn(tl.maximum(tl.cast(size_B, tl.float32, bitcast=True), _SMALLEST), _LARGEST)
    scale_B = tl.where(size_B < 0x7F800000, scale_B, float("nan"))
    scale_BK = tl.broadcast_to(scale_B[:, None], (BLOCKS, BLOCK))
    inverse_BK = tl.broadcast_to(tl.div_rn(1.0, scale_B)[:, None], (BLOCKS, BLOCK))
    value_BK = _nearest_e4m3(_quotient(x_BK, scale_BK, inverse_BK))
    value_at = value_ptr + token * row_stride + input_BK
    tl.store(value_at, value_BK.to(value_ptr.dtype.element_ty), mask=input_BK < row_stride)
    tl.store(scale_ptr + block_B.to(tl.int64) * scale_stride + token, scale_B, mask=block_B * BLOCK < row_stride)


@triton.jit(do_not_specialize=["scale_stride"])
def _round(
    x_ptr,
    value_ptr,
    scale_ptr,
    x_stride,
    num_inputs,
    scale_stride,
    row_stride,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round some blocks of a token."""
    token = tl.program_id(0).to(tl.int64)
    first_block = tl.program_id(1) * BLOCKS
    input_BK = (first_block + tl.arange(0, BLOCKS))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x_BK = tl.load(x_ptr + token * x_stride + input_BK, mask=input_BK < num_inputs, other=0.0).to(tl.float32)
    store_rounded(x_BK, token, first_block, value_ptr, scale_ptr, scale_stride, row_stride, BLOCKS, BLOCK)


def rounding_launch(x_MK: torch.Tensor, rounded: Fp8Inputs) -> Launch:
    """Return the launch that rounds `x_MK` into `rounded`. Rows of x may be strided."""
    assert x_MK.stride(1) == 1
    num_blocks, scale_stride = rounded.scale_BM.shape
    blocks = max(1, min(_INPUTS_PER_PROGRAM // rounded.block, power_of_two(num_blocks)))
    sizes = x_MK.stride(0), x_MK.shape[1], scale_stride, rounded.value_MK.shape[1]
    return Launch(
        _round,
        (len(x_MK), -(-num_blocks // blocks)),
        (x_MK, rounded.value_MK, rounded.scale_BM, *sizes),
        {"BLOCKS": blocks, "BLOCK": rounded.block},
        num_warps=min(16, max(4, blocks * rounded.block // 1024)),
    )
