"""x @ weight.T on a GPU in a fixed order of sums, independent of the number of tokens.

cuBLAS chooses tiles and splits by the number of tokens, so the rounding of a row depends on its batch. Here the tile,
the warps and thus the multiply instruction are the same for any number of tokens; tokens are padded to whole tiles. The
inputs are split into parts by the weight's shape alone: each part is summed by itself, then the parts are added
in order. With few tokens each part is a separate program, so that enough programs read the weight, and a second launch
adds the parts. With many tokens one program computes all parts of its outputs in turn. The additions are the same, in
the same order. Assumption: an instruction sums an output in the same way at any position in its tile.

Suffixes: M tokens, N outputs, K inputs, P parts.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pipeline.kernels.triton.launch import CompileTarget, Launch
from pipeline.kernels.triton.linear.split_k import add_parts_launch

_PROGRAMS = 256  # wanted with a single row of tiles: about two per multiprocessor
_MIN_PART = 512  # inputs
_MAX_PARTS = 8


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_fixed(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    x_stride,
    INPUTS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Multiply PARTS parts of PART inputs each, from PARTS * program_id(1) on. out_ptr is (P, M, N) over these
    programs."""
    # Concurrent programs share tokens and weights: GROUP tiles of tokens, then the next outputs.
    token_tiles, output_tiles = tl.cdiv(num_tokens, TOKENS), tl.cdiv(num_outputs, OUTPUTS)
    group = tl.program_id(0) // (GROUP * output_tiles)
    first_tile = group * GROUP
    tiles = tl.minimum(token_tiles - first_tile, GROUP)
    tile = tl.program_id(0) % (GROUP * output_tiles)
    token_M = (first_tile + tile % tiles) * TOKENS + tl.arange(0, TOKENS)
    output_N = tile // tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    input_K = tl.arange(0, DEPTH)
    mask_M, mask_N = token_M < num_tokens, output_N < num_outputs
    x_at = x_ptr + token_M[:, None].to(tl.int64) * x_stride + input_K[None, :]
    weight_at = weight_ptr + output_N[:, None].to(tl.int64) * INPUTS + input_K[None, :]
    total_MN = tl.zeros([TOKENS, OUTPUTS], dtype=tl.float32)
    for part in range(PARTS):
        begin = (tl.program_id(1) * PARTS + part) * PART
        sum_MN = tl.zeros([TOKENS, OUTPUTS], dtype=tl.float32)
        for start in range(begin, tl.minimum(begin + PART, INPUTS), DEPTH):
            if INPUTS % DEPTH == 0:
                x_MK = tl.load(x_at + start, mask=mask_M[:, None], other=0.0)
                weight_NK = tl.load(weight_at + start, mask=mask_N[:, None], other=0.0)
            else:
                inside_K = (start + input_K < INPUTS)[None, :]
                x_MK = tl.load(x_at + start, mask=mask_M[:, None] & inside_K, other=0.0)
                weight_NK = tl.load(weight_at + start, mask=mask_N[:, None] & inside_K, other=0.0)
            sum_MN = tl.dot(x_MK, tl.trans(weight_NK), sum_MN, input_precision="ieee")
        total_MN += sum_MN
    if BIASED:
        total_MN += tl.load(bias_ptr + output_N, mask=mask_N, other=0.0).to(tl.float32)[None, :]
    row_M = tl.program_id(1).to(tl.int64) * num_tokens + token_M
    out_at = out_ptr + row_M[:, None] * num_outputs + output_N[None, :]
    tl.store(out_at, total_MN.to(out_ptr.dtype.element_ty), mask=mask_M[:, None] & mask_N[None, :])


@dataclass(frozen=True)
class FixedTile:
    """Tile of a program: tokens x outputs, inputs per step of its loop, warps and stages."""

    tokens: int
    outputs: int
    depth: int
    num_warps: int
    num_stages: int


def tile_for(dtype: torch.dtype, target: CompileTarget) -> FixedTile:
    """Return the tile for a type and card: the one that fits into registers, and uses wgmma for 16 bits."""
    if dtype.itemsize > 2:
        return FixedTile(64, 64, 32, 8, 2)
    return FixedTile(128, 128, 64, 8, 4 if target.has_wgmma else 3)


def part_inputs(num_outputs: int, num_inputs: int, tile: FixedTile) -> int:
    """Return the inputs per part, in whole steps of the loop, from the weight's shape alone."""
    wanted = _PROGRAMS // -(-num_outputs // tile.outputs)
    parts = max(1, min(wanted, num_inputs // _MIN_PART, _MAX_PARTS))
    steps = -(-num_inputs // tile.depth)
    return -(-steps // parts) * tile.depth


def fixed_launches(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    target: CompileTarget,
) -> list[Launch]:
    """Return the launches of out = x @ weight.T + bias, x and weight of one type: the product, and the sum of its parts
    if there are several. Rows of x may be strided."""
    (num_tokens, num_inputs), num_outputs = x_MK.shape, len(weight_NK)
    assert x_MK.stride(1) == 1
    assert weight_NK.is_contiguous()
    assert x_MK.dtype == weight_NK.dtype
    tile = tile_for(x_MK.dtype, target)
    part = part_inputs(num_outputs, num_inputs, tile)
    parts = -(-num_inputs // part)
    token_tiles, output_tiles = -(-num_tokens // tile.tokens), -(-num_outputs // tile.outputs)
    programs = parts if token_tiles == 1 else 1
    product_MN = out_MN
    if programs > 1:
        product_MN = torch.empty(parts, num_tokens, num_outputs, dtype=torch.float32, device=x_MK.device)
    product = Launch(
        _multiply_fixed,
        (token_tiles * output_tiles, programs),
        (x_MK, weight_NK, bias_N, product_MN, num_tokens, num_outputs, x_MK.stride(0)),
        {
            "INPUTS": num_inputs,
            "PART": part,
            "PARTS": parts // programs,
            "TOKENS": tile.tokens,
            "OUTPUTS": tile.outputs,
            "DEPTH": tile.depth,
            "GROUP": 8,
            "BIASED": bias_N is not None and programs == 1,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return [product, add_parts_launch(product_MN, bias_N, out_MN)] if programs > 1 else [product]
