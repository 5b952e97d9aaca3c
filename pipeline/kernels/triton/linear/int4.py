"""4-bit weights in groups on a GPU: a product that unpacks them in registers, and a pass that dequantizes them.

Inputs come in chunks of 128. A chunk of an output's weight is 16 words of 32 bits; bits 4 j to 4 j + 3 of each half
of word c hold input 32 j + 2 c + half. So one shift, one mask and one `or` give two 16-bit floats that stand for
neighbouring inputs: with a nibble at the top of the mantissa and 2^4 as the exponent, a half is 16 + q exactly, in
float16 as in bfloat16 (after Kim et al. 2022, "Who says elephants can't run"). Chunks come first in memory, so a tile
of outputs reads one run of it.

weight = (q - zero) * scale is applied after the dot product of each group, in float32:
    sum (q - zero) x = sum (16 + q) x - (16 + zero) sum x
The outputs are the rows of a tile and the tokens its columns, as only the left operand of wgmma may come from
registers, and few tokens fit its narrow side.

Suffixes: N outputs, K inputs, M tokens, C chunks, W words of a chunk (16), G groups, P parts of the inputs, and J
inputs of a quarter of a chunk (32).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
# It does not see what `triton.jit` makes of a function.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pipeline.kernels.triton.launch import Launch, Target, power_of_two
from pipeline.weights.packed import GroupIntWeight

CHUNK = 128
WORDS = CHUNK // 8


@triton.jit
def _quarter(word_NW, QUARTER: tl.constexpr, dtype: tl.constexpr):
    """16 + q of the 32 inputs of one quarter of a chunk: (outputs, 32) in `dtype`."""
    if dtype == tl.bfloat16:
        LIFT: tl.constexpr = 3 - 4 * QUARTER
        MASK: tl.constexpr = 0x00780078
        SIXTEEN: tl.constexpr = 0x41804180
    else:
        LIFT: tl.constexpr = 6 - 4 * QUARTER
        MASK: tl.constexpr = 0x03C003C0
        SIXTEEN: tl.constexpr = 0x4C004C00
    if LIFT > 0:
        pair_NW = ((word_NW << LIFT) & MASK) | SIXTEEN
    else:
        pair_NW = ((word_NW >> -LIFT) & MASK) | SIXTEEN
    both_NW2 = tl.join((pair_NW & 0xFFFF).to(tl.int16), (pair_NW >> 16).to(tl.int16))
    bits_NJ = both_NW2.reshape(word_NW.shape[0], 2 * word_NW.shape[1])
    if dtype == tl.bfloat16:
        return bits_NJ.to(tl.bfloat16, bitcast=True)
    return bits_NJ.to(tl.float16, bitcast=True).to(dtype)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "chunks_per_part"])
def _multiply(
    x_ptr,
    word_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    num_chunks,
    x_stride,
    chunks_per_part,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Tokens times weights over one part of the inputs; out_ptr is (P, M, N), float32 where there are several parts."""
    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token_M = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    word_W, input_J = tl.arange(0, 16), tl.arange(0, 32)
    there_N, there_M = output_N < num_outputs, token_M < num_tokens
    x_at = x_ptr + token_M[None, :].to(tl.int64) * x_stride + input_J[:, None]
    total_NM = tl.zeros([OUTPUTS, TOKENS], dtype=tl.float32)
    first = tl.program_id(1) * chunks_per_part
    PER_CHUNK: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    for chunk in range(first, tl.minimum(first + chunks_per_part, num_chunks)):
        word_at = word_ptr + (chunk * num_outputs + output_N)[:, None] * 16 + word_W[None, :]
        word_NW = tl.load(word_at, mask=there_N[:, None], other=0)
        for part in tl.static_range(PER_CHUNK):
            if GROUP < 128:
                group = chunk * PER_CHUNK + part
            else:
                group = chunk // (GROUP // 128)
            scale_N = tl.load(scale_ptr + group * num_outputs + output_N, mask=there_N, other=0.0)
            zero_N = tl.load(zero_ptr + group * num_outputs + output_N, mask=there_N, other=0)
            scale_N = scale_N.to(tl.float32)
            dot_NM = tl.zeros([OUTPUTS, TOKENS], dtype=tl.float32)
            sum_M = tl.zeros([TOKENS], dtype=tl.float32)
            for quarter in tl.static_range(part * 4 // PER_CHUNK, (part + 1) * 4 // PER_CHUNK):
                begin = chunk * 128 + quarter * 32
                if WHOLE:
                    x_JM = tl.load(x_at + begin, mask=there_M[None, :], other=0.0)
                else:
                    inside = (begin + input_J < num_inputs)[:, None] & there_M[None, :]
                    x_JM = tl.load(x_at + begin, mask=inside, other=0.0)
                dot_NM = tl.dot(
                    _quarter(word_NW, quarter, x_ptr.dtype.element_ty), x_JM, dot_NM, input_precision="ieee"
                )
                sum_M += tl.sum(x_JM.to(tl.float32), axis=0)
            shift_N = scale_N * (zero_N.to(tl.float32) + 16.0)
            total_NM += scale_N[:, None] * dot_NM - shift_N[:, None] * sum_M[None, :]
    if BIASED:
        total_NM += tl.load(bias_ptr + output_N, mask=there_N, other=0.0).to(tl.float32)[:, None]
    row_M = tl.program_id(1).to(tl.int64) * num_tokens + token_M
    out_at = out_ptr + row_M[None, :] * num_outputs + output_N[:, None]
    tl.store(out_at, total_NM.to(out_ptr.dtype.element_ty), mask=there_N[:, None] & there_M[None, :])


@triton.jit
def _add_parts(
    part_ptr,
    bias_ptr,
    out_ptr,
    num_elements,
    num_outputs,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Sum the parts in their order, and the bias, into the output."""
    element = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = element < num_elements
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for _ in tl.static_range(PARTS):
        total += tl.load(part_ptr + element, mask=inside, other=0.0)
        part_ptr += num_elements
    if BIASED:
        total += tl.load(bias_ptr + element % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize(
    word_ptr, scale_ptr, zero_ptr, out_ptr, num_outputs, num_inputs, GROUP: tl.constexpr, OUTPUTS: tl.constexpr
):
    """One chunk of some outputs to (N, K): (q - zero) * scale in float32, rounded once."""
    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    chunk = tl.program_id(1).to(tl.int64)
    there_N = (output_N < num_outputs)[:, None]
    word_NW = tl.load(
        word_ptr + (chunk * num_outputs + output_N)[:, None] * 16 + tl.arange(0, 16)[None, :], mask=there_N, other=0
    )
    for quarter in tl.static_range(4):
        input_J = chunk * 128 + quarter * 32 + tl.arange(0, 32)
        group = (chunk * 128 + quarter * 32) // GROUP
        scale_N = tl.load(scale_ptr + group * num_outputs + output_N, mask=output_N < num_outputs, other=0.0)
        zero_N = tl.load(zero_ptr + group * num_outputs + output_N, mask=output_N < num_outputs, other=0)
        lifted_NJ = _quarter(word_NW, quarter, tl.float16).to(tl.float32)
        weight_NJ = (lifted_NJ - (zero_N.to(tl.float32) + 16.0)[:, None]) * scale_N.to(tl.float32)[:, None]
        out_at = out_ptr + output_N[:, None].to(tl.int64) * num_inputs + input_J[None, :]
        there_NJ = there_N & (input_J < num_inputs)[None, :]
        tl.store(out_at, weight_NJ.to(out_ptr.dtype.element_ty), mask=there_NJ)


@dataclass(frozen=True)
class TiledInt4:
    """A `GroupIntWeight` in the order that the kernels read: see the head of the file.

    scale_GN is in the narrowest type that holds the scales exactly. Inputs are filled up to whole chunks, which no
    product reads.
    """

    word_CNW: torch.Tensor  # int32
    scale_GN: torch.Tensor
    zero_GN: torch.Tensor  # uint8
    group_size: int
    num_inputs: int

    @property
    def num_outputs(self) -> int:
        return self.word_CNW.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.word_CNW, self.scale_GN, self.zero_GN))

    @classmethod
    def of(cls, weight: GroupIntWeight, device: torch.device) -> "TiledInt4":
        """Repack on `device`, which takes 5 bytes a weight for a moment. `serves` must hold."""
        num_outputs, num_inputs = weight.q_NK.shape
        missing = -num_inputs % CHUNK
        q_NK = torch.nn.functional.pad(weight.q_NK.to(device), (0, missing)).to(torch.int32)
        q_NCJWH = q_NK.view(num_outputs, -1, 4, WORDS, 2)
        word_NCW = q_NK.new_zeros(num_outputs, q_NCJWH.shape[1], WORDS)
        for quarter in range(4):
            for half in range(2):
                word_NCW |= q_NCJWH[:, :, quarter, :, half] << (4 * quarter + 16 * half)
        extra_groups = -(-(num_inputs + missing) // weight.group_size) - weight.scales_NG.shape[1]
        scale_NG, zero_NG = (
            torch.nn.functional.pad(values_NG.to(device), (0, extra_groups))
            for values_NG in (_narrowest(weight.scales_NG), weight.zeros_NG.to(torch.uint8))
        )
        return cls(
            word_NCW.transpose(0, 1).contiguous(),
            scale_NG.t().contiguous(),
            zero_NG.t().contiguous(),
            weight.group_size,
            num_inputs,
        )


def serves(weight: GroupIntWeight) -> bool:
    """4 bits, groups of 32, 64 or a multiple of 128 inputs, and zero points that are integers from 0 to 255."""
    size, zeros_NG = weight.group_size, weight.zeros_NG
    if weight.bits != 4:
        return False
    whole = bool(((zeros_NG == zeros_NG.round()) & (zeros_NG >= 0) & (zeros_NG <= 255)).all())
    return whole and (size in (32, 64) or size % CHUNK == 0)


def _narrowest(values: torch.Tensor) -> torch.Tensor:
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(values.to(dtype).to(values.dtype), values):
            return values.to(dtype)
    return values.to(torch.float32)


@dataclass(frozen=True)
class Int4Tile:
    """outputs x tokens of a program, its warps and stages, and into how many parts the inputs are cut."""

    outputs: int
    tokens: int
    num_warps: int
    num_stages: int
    parts: int


def tile_for(num_tokens: int, num_outputs: int, num_chunks: int, target: Target) -> Int4Tile:
    """More outputs to a program where there are more tokens, as each reads its tokens' inputs from the second-level
    cache. As many parts as give each multiprocessor two programs, but parts of four chunks at least, and no more than
    are small beside the weight: they are written and read again, 8 bytes a token and output each."""
    tokens = min(64, power_of_two(num_tokens, 16))
    outputs, num_warps = (64, 4) if tokens <= 32 else (128, 8)
    parts = parts_for(tokens, outputs, num_outputs, num_chunks, 2 * target.num_multiprocessors)
    return Int4Tile(outputs, tokens, num_warps, 4, parts)


def parts_for(tokens: int, outputs: int, num_outputs: int, num_chunks: int, programs: int) -> int:
    """Into how many parts the inputs are cut for about `programs` of tiles of outputs x tokens; see `tile_for`."""
    wanted = programs // -(-num_outputs // outputs)
    most = min(-(-num_chunks // 4), num_chunks * CHUNK // (16 * tokens))
    per_part = -(-num_chunks // max(1, min(wanted, most)))
    return -(-num_chunks // per_part)


def int4_launches(
    x_MK: torch.Tensor,
    weight: TiledInt4,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    target: Target,
    tile: Int4Tile | None = None,
) -> list[Launch]:
    """out = x @ weight.T + bias: one launch, or one and the sum of its parts. Rows of x may lie apart. tile: else
    `tile_for` says."""
    num_tokens, num_inputs = x_MK.shape
    num_chunks, num_outputs, _ = weight.word_CNW.shape
    assert x_MK.stride(1) == 1
    tile = tile or tile_for(num_tokens, num_outputs, num_chunks, target)
    into = out_MN
    if tile.parts > 1:
        into = torch.empty(tile.parts, num_tokens, num_outputs, dtype=torch.float32, device=x_MK.device)
    product = Launch(
        _multiply,
        (-(-num_outputs // tile.outputs), tile.parts, -(-num_tokens // tile.tokens)),
        (
            *(x_MK, weight.word_CNW, weight.scale_GN, weight.zero_GN, bias_N, into),
            *(num_tokens, num_outputs, num_inputs, num_chunks, x_MK.stride(0), -(-num_chunks // tile.parts)),
        ),
        {
            "GROUP": weight.group_size,
            "OUTPUTS": tile.outputs,
            "TOKENS": tile.tokens,
            "WHOLE": num_inputs % CHUNK == 0,
            "BIASED": bias_N is not None and tile.parts == 1,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return [product] if tile.parts == 1 else [product, add_parts_launch(into, bias_N, out_MN)]


def add_parts_launch(part_PMN: torch.Tensor, bias_N: torch.Tensor | None, out_MN: torch.Tensor) -> Launch:
    """out = the parts one after the other, and the bias, added in float32."""
    width = 512
    return Launch(
        _add_parts,
        (-(-out_MN.numel() // width),),
        (part_PMN, bias_N, out_MN, out_MN.numel(), out_MN.shape[1]),
        {"PARTS": len(part_PMN), "WIDTH": width, "BIASED": bias_N is not None},
    )


def dequantize_launch(weight: TiledInt4, out_NK: torch.Tensor) -> Launch:
    """The weight in `out_NK`'s type, what `GroupIntWeight.dequantize` gives. Contiguous."""
    assert out_NK.is_contiguous()
    outputs = 32
    num_chunks = weight.word_CNW.shape[0]
    return Launch(
        _dequantize,
        (-(-weight.num_outputs // outputs), num_chunks),
        (weight.word_CNW, weight.scale_GN, weight.zero_GN, out_NK, weight.num_outputs, weight.num_inputs),
        {"GROUP": weight.group_size, "OUTPUTS": outputs},
    )
