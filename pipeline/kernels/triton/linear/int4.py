"""Grouped 4-bit weights on a GPU: a product that unpacks them in registers, and a pass that dequantizes them.

Inputs are in blocks of 128. A block of an output's weight is 16 words of 32 bits, in the register order of the left
operand of a GPU's products, so a thread reads its words of a row at once and nothing moves between threads. Of the four
threads that share a row, thread l has word 4 l + j of quarter j of the block: four runs r of two inputs. For wgmma
these are inputs 8 r + 2 l of the quarter and the next one (ADJACENT 2); for mma.sync Triton gives a thread four
adjacent inputs, 16 (r // 2) + 4 l + 2 (r % 2) and the next one (ADJACENT 4). Bits 4 r to 4 r + 3 of a word's low half
hold the first of the two inputs, those of its high half the second; with ADJACENT 4 the other way round, for which
ptxas swaps fewer halves.

One shift, one mask and one `or` give two 16-bit floats for adjacent inputs: with a nibble at the top of the mantissa
and 2^4 as the exponent, each half is exactly 16 + q, in float16 and in bfloat16 (after Kim et al. 2022, "Who Says
Elephants Can't Run"). Blocks are the outermost dimension, so a tile of outputs reads one run of memory.

weight = (q - zero) * scale. 16 + zero is subtracted from 16 + q in registers, which is exact: both are integers of at
most 256. For wgmma one instruction subtracts from two halves at once. The scale is applied after the dot product of
each group, in float32. Zero points that are no integers are minima: weight = q * scale + minimum; the sum of the
group's inputs times the minimum is added. The scale and 16 + zero (or the minimum) of a group are adjacent, and a step
of the loop processes a chunk of two blocks, so that each thread copies the 4 bytes that an asynchronous copy needs. The
outputs are the rows of a tile and the tokens its columns, because only the left operand of wgmma may come from
registers, and few tokens fit its narrow side.

Suffixes: N outputs, K inputs, M tokens, C chunks, B blocks, W words of a block (16), L threads (4) that share a row's
words, Q quarters of a block, G groups of a chunk, P parts of the inputs, and J inputs of a dot product.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
# It does not understand functions made by `triton.jit`.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs

from pipeline.kernels.triton.launch import CompileTarget, Launch, power_of_two
from pipeline.kernels.triton.linear.split_k import add_parts_launch
from pipeline.weights.packed import GroupIntWeight

BLOCK = 128
CHUNK = 2 * BLOCK
PROGRAMS = {16: 3, 32: 2, 64: 1}  # per multiprocessor, by tokens of a tile
_INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))  # without PTX


@triton.jit
def _pairs(word, RUN: tl.constexpr, dtype: tl.constexpr):
    """Return 16 + q of the two inputs in run RUN of each word: two 16-bit floats in 32 bits. They are float16 unless
    `dtype` is bfloat16."""
    LIFT: tl.constexpr = (3 if dtype == tl.bfloat16 else 6) - 4 * RUN
    SIXTEENS: tl.constexpr = 0x41804180 if dtype == tl.bfloat16 else 0x4C004C00
    MASK: tl.constexpr = 0x00780078 if dtype == tl.bfloat16 else 0x03C003C0
    if LIFT > 0:
        return ((word << LIFT) & MASK) | SIXTEENS
    else:
        return ((word >> -LIFT) & MASK) | SIXTEENS


@triton.jit
def in_order(low_NLQ22, high_NLQ22, ADJACENT: tl.constexpr):
    """Arrange the values of each word's low and high halves, with dimensions run // 2 and run % 2, as the inputs of
    these quarters, in order: (outputs, inputs)."""
    # outputs, threads, quarters, run // 2, run % 2, halves
    if ADJACENT == 2:
        ordered = tl.permute(tl.join(low_NLQ22, high_NLQ22), 0, 2, 3, 4, 1, 5)
    else:
        ordered = tl.permute(tl.join(high_NLQ22, low_NLQ22), 0, 2, 3, 1, 4, 5)
    return ordered.reshape(low_NLQ22.shape[0], 32 * low_NLQ22.shape[2])


@triton.jit
def pairs_in_order(zero_NLQ, one_NLQ, two_NLQ, three_NLQ, ADJACENT: tl.constexpr, dtype: tl.constexpr):
    """Arrange the pairs of the four runs, each two 16-bit floats, as the inputs of these quarters, in order: (outputs,
    inputs)."""
    pair_NLQ22 = tl.join(tl.join(zero_NLQ, two_NLQ), tl.join(one_NLQ, three_NLQ))
    bits_NJ = in_order((pair_NLQ22 & 0xFFFF).to(tl.int16), (pair_NLQ22 >> 16).to(tl.int16), ADJACENT)
    if dtype == tl.bfloat16:
        return bits_NJ.to(tl.bfloat16, bitcast=True)
    return bits_NJ.to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def _lifted(word_NLQ, ADJACENT: tl.constexpr, dtype: tl.constexpr):
    """Convert words to 16 + q of the inputs of these quarters, in order: (outputs, inputs).

    Only constants and loads feed it: any other value would make Triton move the weights through shared memory.
    """
    return pairs_in_order(
        *(_pairs(word_NLQ, 0, dtype), _pairs(word_NLQ, 1, dtype), _pairs(word_NLQ, 2, dtype)),
        *(_pairs(word_NLQ, 3, dtype), ADJACENT, dtype),
    )


@triton.jit
def _less(pair_NLQ, base_NLQ, dtype: tl.constexpr):
    """Subtract two pairs of 16-bit floats."""
    return tl.inline_asm_elementwise(
        "sub.rn.bf16x2 $0, $1, $2;" if dtype == tl.bfloat16 else "sub.rn.f16x2 $0, $1, $2;",
        "=r,r,r",
        [pair_NLQ, base_NLQ],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _centred(word_NLQ, base_N, ADJACENT: tl.constexpr, dtype: tl.constexpr):
    """Convert words to q - zero of the inputs of these quarters, in order: (outputs, inputs). base_N: 16 + zero."""
    if ADJACENT == 2 and dtype != tl.float32 and not _INTERPRETED:
        bits_N = base_N.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        base_NLQ = tl.broadcast_to((bits_N | (bits_N << 16))[:, None, None], word_NLQ.shape)
        return pairs_in_order(
            _less(_pairs(word_NLQ, 0, dtype), base_NLQ, dtype),
            _less(_pairs(word_NLQ, 1, dtype), base_NLQ, dtype),
            _less(_pairs(word_NLQ, 2, dtype), base_NLQ, dtype),
            _less(_pairs(word_NLQ, 3, dtype), base_NLQ, dtype),
            ADJACENT,
            dtype,
        )
    else:
        return _lifted(word_NLQ, ADJACENT, dtype) - base_N.to(dtype)[:, None]


@triton.jit
def _scale_and_base(group_NG2, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Select the scale and 16 + zero (or the minimum) of one of GROUPS groups of a chunk; group_NG2 has both in one
    dimension."""
    if GROUPS == 1:
        return tl.split(group_NG2)
    else:
        first, second = tl.split(tl.permute(group_NG2.reshape(group_NG2.shape[0], 2, GROUPS), 0, 2, 1))
        return _scale_and_base(second if GROUP * 2 // GROUPS else first, GROUP % (GROUPS // 2), GROUPS // 2)


@triton.jit
def sum_of_chunks(
    x_at,
    word_ptr,
    group_ptr,
    output_N,
    mask_N,
    mask_M,
    first,
    end,
    num_outputs,
    num_inputs,
    ADJACENT: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    MINIMA: tl.constexpr = False,
):
    """Multiply tokens by the weights of chunks `first` to `end`, and return sums (N, M). x_at: the first GROUP inputs
    of each token, (J, M)."""
    GROUPS: tl.constexpr = 256 // GROUP
    PARTS: tl.constexpr = GROUPS // 2  # of a block
    word_W, input_J = tl.arange(0, 16), tl.arange(0, GROUP)
    group_NG2 = group_ptr + output_N[:, None] * (2 * GROUPS) + tl.arange(0, 2 * GROUPS)[None, :]
    total_NM = tl.zeros([mask_N.shape[0], mask_M.shape[0]], dtype=tl.float32)
    for chunk in range(first, end):
        group_at = group_NG2 + chunk * num_outputs * (2 * GROUPS)
        groups = tl.load(group_at, mask=mask_N[:, None], other=0.0)
        for block in tl.static_range(2):
            word_at = word_ptr + ((2 * chunk + block) * num_outputs + output_N)[:, None] * 16 + word_W[None, :]
            word_NW = tl.load(word_at, mask=mask_N[:, None], other=0)
            for part in tl.static_range(PARTS):
                begin = chunk * 256 + block * 128 + part * GROUP
                if WHOLE:
                    x_JM = tl.load(x_at + begin, mask=mask_M[None, :], other=0.0)
                else:
                    inside = (begin + input_J < num_inputs)[:, None] & mask_M[None, :]
                    x_JM = tl.load(x_at + begin, mask=inside, other=0.0)
                scale_N, base_N = _scale_and_base(groups, block * PARTS + part, GROUPS)
                zero_N = tl.full(base_N.shape, 16.0, base_N.dtype) if MINIMA else base_N
                weight_NJ = _centred(_words_of(word_NW, part, PARTS), zero_N, ADJACENT, x_at.dtype.element_ty)
                dot_NM = tl.dot(weight_NJ, x_JM, input_precision="ieee")
                total_NM += scale_N.to(tl.float32)[:, None] * dot_NM
                if MINIMA:
                    sum_M = tl.sum(x_JM.to(tl.float32), axis=0)
                    total_NM += base_N.to(tl.float32)[:, None] * sum_M[None, :]
    return total_NM


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "chunks_per_part"])
def _multiply(
    x_ptr,
    word_ptr,
    group_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    num_chunks,
    x_stride,
    chunks_per_part,
    ADJACENT: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
    MINIMA: tl.constexpr,
):
    """Multiply tokens by weights over one part of the inputs; out_ptr is (P, M, N), float32 if there are several parts.

    GROUP: inputs that share a scale, up to a block. num_inputs is read only unless the last chunk is WHOLE.
    """
    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token_M = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    mask_N, mask_M = output_N < num_outputs, token_M < num_tokens
    x_at = x_ptr + token_M[None, :].to(tl.int64) * x_stride + tl.arange(0, GROUP)[:, None]
    first = tl.program_id(1) * chunks_per_part
    total_NM = sum_of_chunks(
        *(x_at, word_ptr, group_ptr, output_N, mask_N, mask_M),
        *(first, tl.minimum(first + chunks_per_part, num_chunks)),
        *(num_outputs, num_inputs, ADJACENT, GROUP, WHOLE, MINIMA),
    )
    if BIASED:
        total_NM += tl.load(bias_ptr + output_N, mask=mask_N, other=0.0).to(tl.float32)[:, None]
    row_M = tl.program_id(1).to(tl.int64) * num_tokens + token_M
    out_at = out_ptr + row_M[None, :] * num_outputs + output_N[:, None]
    tl.store(out_at, total_NM.to(out_ptr.dtype.element_ty), mask=mask_N[:, None] & mask_M[None, :])


@triton.jit
def _words_of(word_NW, PART: tl.constexpr, PARTS: tl.constexpr):
    """Select the words of one of PARTS equal parts of a block: (outputs, 4, quarters of the part)."""
    word_NLQ = word_NW.reshape(word_NW.shape[0], 4, 4)
    if PARTS == 1:
        return word_NLQ
    else:
        # (outputs, 4, quarter of the half, half)
        halves = tl.permute(word_NLQ.reshape(word_NW.shape[0], 4, 2, 2), 0, 1, 3, 2)
        first, second = tl.split(halves)
        half_NLQ = second if PART * 2 // PARTS else first
        if PARTS == 2:
            return half_NLQ
        else:
            even, odd = tl.split(half_NLQ)
            return tl.expand_dims(odd if PART % 2 else even, 2)


@triton.jit
def _dequantize(
    word_ptr,
    group_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    ADJACENT: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    MINIMA: tl.constexpr,
):
    """Write one block of some outputs to (N, K): (q - zero) * scale, or q * scale + minimum, in float32, rounded
    once."""
    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    block = tl.program_id(1).to(tl.int64)
    mask_N = (output_N < num_outputs)[:, None]
    word_at = word_ptr + (block * num_outputs + output_N)[:, None] * 16 + tl.arange(0, 16)[None, :]
    word_NW = tl.load(word_at, mask=mask_N, other=0)
    for quarter in tl.static_range(4):
        input_J = block * 128 + quarter * 32 + tl.arange(0, 32)
        group = (block % 2 * 128 + quarter * 32) // GROUP
        group_at = group_ptr + ((block // 2 * num_outputs + output_N) * (256 // GROUP) + group) * 2
        scale_N = tl.load(group_at, mask=output_N < num_outputs, other=0.0).to(tl.float32)
        base_N = tl.load(group_at + 1, mask=output_N < num_outputs, other=0.0).to(tl.float32)
        lifted_NJ = _lifted(_words_of(word_NW, quarter, 4), ADJACENT, tl.float16).to(tl.float32)
        if MINIMA:
            weight_NJ = (lifted_NJ - 16.0) * scale_N[:, None] + base_N[:, None]
        else:
            weight_NJ = (lifted_NJ - base_N[:, None]) * scale_N[:, None]
        out_at = out_ptr + output_N[:, None].to(tl.int64) * num_inputs + input_J[None, :]
        mask_NJ = mask_N & (input_J < num_inputs)[None, :]
        tl.store(out_at, weight_NJ.to(out_ptr.dtype.element_ty), mask=mask_NJ)


@dataclass(frozen=True)
class TiledInt4:
    """A `GroupIntWeight` in the order that the kernels read, described at the head of the file.

    group_CNG2: the scale and 16 + zero of each group, in the narrowest type that represents the scales exactly; or the
    scale and the minimum if `has_minima`. Groups of several blocks are repeated for each block. adjacent: the order of
    words. Inputs are padded to whole chunks; no product reads the padding.
    """

    word_BNW: torch.Tensor  # int32
    group_CNG2: torch.Tensor
    num_inputs: int
    adjacent: int
    has_minima: bool = False

    @property
    def num_outputs(self) -> int:
        return self.word_BNW.shape[1]

    @property
    def num_chunks(self) -> int:
        return len(self.group_CNG2)

    @property
    def group_size(self) -> int:
        return CHUNK // self.group_CNG2.shape[2]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.word_BNW, self.group_CNG2))

    @classmethod
    def repack(cls, weight: GroupIntWeight, device: torch.device, adjacent: int | None = None) -> "TiledInt4":
        """Repack on `device`, which temporarily takes 5 bytes per weight. Requires `supports`. adjacent: None is the
        number that suits the device's products."""
        adjacent = adjacent or adjacent_inputs(CompileTarget.from_device(device))
        num_inputs = weight.in_features
        missing = -num_inputs % CHUNK
        q_NK = torch.nn.functional.pad(weight.q_NK.to(device), (0, missing))
        scale_NG, zero_NG = weight.scales_NG.to(device), weight.zeros_NG.to(device)
        minima = has_minima(weight)
        if minima:
            group_NG2 = narrowest(torch.stack([scale_NG, -zero_NG * scale_NG], dim=-1))
        else:
            scale_NG = narrowest(scale_NG)
            group_NG2 = torch.stack([scale_NG, (zero_NG + 16).to(scale_NG.dtype)], dim=-1)
        group_NG2 = group_NG2.repeat_interleave(max(1, weight.group_size // BLOCK), dim=1)
        per_chunk = CHUNK // min(BLOCK, weight.group_size)
        extra = (num_inputs + missing) * per_chunk // CHUNK - group_NG2.shape[1]
        group_NG2 = torch.nn.functional.pad(group_NG2, (0, 0, 0, extra))
        return cls(
            words_of_codes(q_NK, 4, adjacent),
            group_NG2.unflatten(1, (-1, per_chunk)).transpose(0, 1).contiguous(),
            num_inputs,
            adjacent,
            minima,
        )


def words_of_codes(code_NK: torch.Tensor, bits: int, adjacent: int) -> torch.Tensor:
    """Return codes of 4 or 8 bits as words (B, N, W), in the order described at the head of the file. Words of 8-bit
    codes hold two runs: thread l has words 8 l + 2 j and 8 l + 2 j + 1 of quarter j: runs 0 and 1, and runs 2 and 3.

    K is a multiple of a block.
    """
    # quarters, run // 2, run % 2, threads, halves
    code_NBQRSLH = code_NK.to(torch.int32).view(len(code_NK), -1, 4, 2, *((2, 4) if adjacent == 2 else (4, 2)), 2)
    if adjacent == 4:
        code_NBQRSLH = code_NBQRSLH.transpose(4, 5)
    num_outputs, num_blocks = code_NBQRSLH.shape[:2]
    word_NBLQW = code_NBQRSLH.new_zeros(num_outputs, num_blocks, 4, 4, bits // 4)
    for run in range(4):
        for half in range(2):
            code_NBQL = code_NBQRSLH[:, :, :, run // 2, run % 2, :, half]
            word, at = divmod(bits * run, 16)
            is_high = half == (1 if adjacent == 2 else 0)
            word_NBLQW[..., word] |= code_NBQL.transpose(2, 3) << (at + 16 * is_high)
    return word_NBLQW.flatten(2).transpose(0, 1).contiguous()


def adjacent_inputs(target: CompileTarget) -> int:
    """Return the number of adjacent inputs per thread in the left operand of a product: see the head of the file."""
    return 2 if target.has_wgmma else 4


def supports(weight: GroupIntWeight) -> bool:
    """Return whether the kernels support a weight: 4 bits, groups of 32, 64 or a multiple of 128 inputs."""
    return weight.bits == 4 and (weight.group_size in (32, 64) or weight.group_size % BLOCK == 0)


def has_minima(weight: GroupIntWeight) -> bool:
    """Return whether zero points are read as minima: unless they are integers from 0 to 240, since bfloat16 represents
    16 + 240 exactly."""
    zeros_NG = weight.zeros_NG
    return not bool(((zeros_NG == zeros_NG.round()) & (zeros_NG >= 0) & (zeros_NG <= 240)).all())


def narrowest(values: torch.Tensor) -> torch.Tensor:
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(values.to(dtype).to(values.dtype), values):
            return values.to(dtype)
    return values.to(torch.float32)


@dataclass(frozen=True)
class Int4Tile:
    """Tile of a program: outputs x tokens, warps and stages; and the number of parts of the inputs."""

    outputs: int
    tokens: int
    num_warps: int
    num_stages: int
    parts: int


def tile_for(num_tokens: int, num_outputs: int, num_chunks: int, target: CompileTarget) -> Int4Tile:
    """Return the tile of a product.

    With more tokens a program has more outputs, since each program reads its tokens' inputs from the L2 cache: with 16
    tokens as many bytes as of weights. There are enough parts for the programs that fit into the registers of all
    multiprocessors, but a part has at least two chunks, and the parts' sums, which are written and read again at 8
    bytes per token and output, must be small compared to the weight.
    """
    tokens = min(64, power_of_two(num_tokens, 16))
    if target.has_wgmma:
        outputs, num_warps = (64, 4) if tokens == 16 else (128, 8)
    else:  # more outputs of the same tokens do not fit into registers
        outputs, num_warps = 64, 8 if tokens == 64 else 4
    programs = PROGRAMS[tokens] * target.num_multiprocessors
    parts = parts_for(tokens, outputs, num_outputs, num_chunks, programs)
    return Int4Tile(outputs, tokens, num_warps, 3, parts)


def parts_for(tokens: int, outputs: int, num_outputs: int, num_chunks: int, programs: int) -> int:
    """Return the number of parts of the inputs for about `programs` tiles of outputs x tokens; see `tile_for`."""
    wanted = programs // -(-num_outputs // outputs)
    max_parts = min(-(-num_chunks // 2), num_chunks * CHUNK // (16 * tokens))
    per_part = -(-num_chunks // max(1, min(wanted, max_parts)))
    return -(-num_chunks // per_part)


def int4_launches(
    x_MK: torch.Tensor,
    weight: TiledInt4,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    target: CompileTarget,
) -> list[Launch]:
    """Return the launches of out = x @ weight.T + bias: the product, and the sum of its parts if there are several.

    Rows of x may be strided.
    """
    num_tokens, num_inputs = x_MK.shape
    num_chunks, num_outputs = weight.num_chunks, weight.num_outputs
    assert x_MK.stride(1) == 1
    tile = tile_for(num_tokens, num_outputs, num_chunks, target)
    product_MN = out_MN
    if tile.parts > 1:
        product_MN = torch.empty(tile.parts, num_tokens, num_outputs, dtype=torch.float32, device=x_MK.device)
    product = Launch(
        _multiply,
        (-(-num_outputs // tile.outputs), tile.parts, -(-num_tokens // tile.tokens)),
        (
            *(x_MK, weight.word_BNW, weight.group_CNG2, bias_N, product_MN),
            *(num_tokens, num_outputs, num_inputs, num_chunks, x_MK.stride(0), -(-num_chunks // tile.parts)),
        ),
        {
            "ADJACENT": weight.adjacent,
            "GROUP": weight.group_size,
            "OUTPUTS": tile.outputs,
            "TOKENS": tile.tokens,
            "WHOLE": num_inputs % CHUNK == 0,
            "BIASED": bias_N is not None and tile.parts == 1,
            "MINIMA": weight.has_minima,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return [product] if tile.parts == 1 else [product, add_parts_launch(product_MN, bias_N, out_MN)]


def dequantize_launch(weight: TiledInt4, out_NK: torch.Tensor) -> Launch:
    """Return the launch that writes the weight to the contiguous `out_NK`, like `GroupIntWeight.dequantize`."""
    assert out_NK.is_contiguous()
    outputs = 32
    return Launch(
        _dequantize,
        (-(-weight.num_outputs // outputs), len(weight.word_BNW)),
        (weight.word_BNW, weight.group_CNG2, out_NK, weight.num_outputs, weight.num_inputs),
        {"ADJACENT": weight.adjacent, "GROUP": weight.group_size, "OUTPUTS": outputs, "MINIMA": weight.has_minima},
    )
