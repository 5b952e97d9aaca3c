"""Products grouped by expert: each row of inputs times the weight of its expert, in one launch for all experts.

A program multiplies a tile of outputs of one expert by a tile of that expert's pairs. It finds both from the counts of
pairs, so the host knows neither: the grid holds the tiles that any routing of that many pairs may need, and programs
without a tile end at once. Outputs are the rows of a tile and pairs its columns, as in `linear/int4.py`, and columns do
not depend on each other.

A row's results are the same for any number of tokens only if `tile_for` gives one tile (`is_fixed`): products of
another width may add in another order.

Suffixes: N outputs, K inputs, M pairs of a tile, P pairs, E experts.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
# It does not understand functions made by `triton.jit`.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pipeline.kernels.triton.elementwise import gated
from pipeline.kernels.triton.experts.pairs import Pairs
from pipeline.kernels.triton.experts.weights import GroupedWeights
from pipeline.kernels.triton.launch import CompileTarget, Launch, power_of_two
from pipeline.kernels.triton.linear.int4 import sum_of_chunks
from pipeline.kernels.triton.linear.minifloat import sum_of_blocks

_FIXED_TOKENS = 64
_CROWDING = 1.5  # rows of a tile over the mean number of rows of an expert: most experts need one tile then


@triton.jit
def _tile_of_pairs(count_ptr, tile, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the expert of a tile, and the tile's number among that expert's. Past the last tile the expert is at least
    EXPERTS."""
    expert_E = tl.arange(0, PADDED_EXPERTS)
    count_E = tl.load(count_ptr + expert_E, mask=expert_E < EXPERTS, other=0)
    end_E = tl.cumsum((count_E + (TOKENS - 1)) // TOKENS, axis=0)
    expert = tl.sum((end_E <= tile).to(tl.int32), axis=0)
    return expert, tile - tl.max(tl.where(end_E <= tile, end_E, 0), axis=0)


@triton.jit
def _dense_sum(x_at, weight_at, mask_N, mask_M, INPUTS: tl.constexpr, DEPTH: tl.constexpr):
    """Multiply tokens by dense weights, and return sums (N, M). x_at, weight_at: the first DEPTH inputs."""
    sum_NM = tl.zeros([mask_N.shape[0], mask_M.shape[0]], dtype=tl.float32)
    for start in range(0, INPUTS, DEPTH):
        if INPUTS % DEPTH == 0:
            x_KM = tl.load(x_at + start, mask=mask_M[None, :], other=0.0)
            weight_NK = tl.load(weight_at + start, mask=mask_N[:, None], other=0.0)
        else:
            inside_K = start + tl.arange(0, DEPTH) < INPUTS
            x_KM = tl.load(x_at + start, mask=inside_K[:, None] & mask_M[None, :], other=0.0)
            weight_NK = tl.load(weight_at + start, mask=mask_N[:, None] & inside_K[None, :], other=0.0)
        sum_NM = tl.dot(weight_NK, x_KM, sum_NM, input_precision="ieee")
    return sum_NM


@triton.jit(do_not_specialize=["capacity"])
def _multiply_grouped(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    expert_ptr,
    count_ptr,
    pair_ptr,
    out_ptr,
    capacity,
    num_outputs,
    x_stride,
    weight_stride,
    scale_stride,
    FORM: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ADJACENT: tl.constexpr,
    GROUP: tl.constexpr,
    BIASED: tl.constexpr,
    LISTED: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADDED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write a tile of outputs: (P, N), or (P, N / 2) with an ACTIVATION, of interleaved gates and ups. Pair p has row
    p // PAIRS_PER_ROW of x. Unless pairs are LISTED, each pair is a tile. Strides: of experts. With ADDED, the outputs
    are added to out."""
    tile, column_M = tl.program_id(1), tl.arange(0, TOKENS)
    if LISTED:
        expert, tile_of_expert = _tile_of_pairs(count_ptr, tile, EXPERTS, PADDED_EXPERTS, TOKENS)
        if expert >= EXPERTS:
            return
        rank_M = tile_of_expert * TOKENS + column_M
        mask_M = rank_M < tl.load(count_ptr + expert)
        pair_M = tl.load(pair_ptr + expert.to(tl.int64) * capacity + rank_M, mask=mask_M, other=0)
    else:
        expert = tl.load(expert_ptr + tile)
        if expert < 0:
            return
        mask_M, pair_M = column_M < 1, tl.zeros([TOKENS], tl.int32) + tile
    expert = expert.to(tl.int64)
    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask_N = output_N < num_outputs
    input_K = tl.arange(0, DEPTH)
    x_at = x_ptr + (pair_M // PAIRS_PER_ROW).to(tl.int64)[None, :] * x_stride + input_K[:, None]
    weight_ptr += expert * weight_stride
    if FORM != "dense":
        scale_ptr += expert * scale_stride
    if FORM == "dense":
        weight_at = weight_ptr + output_N[:, None] * INPUTS + input_K[None, :]
        total_NM = _dense_sum(x_at, weight_at, mask_N, mask_M, INPUTS, DEPTH)
    elif FORM == "int4":
        total_NM = sum_of_chunks(
            *(x_at, weight_ptr, scale_ptr, output_N, mask_N, mask_M, 0, (INPUTS + 255) // 256),
            *(num_outputs, INPUTS, ADJACENT, GROUP, INPUTS % 256 == 0),
        )
    else:
        total_NM = sum_of_blocks(
            *(x_at, weight_ptr, scale_ptr, output_N, mask_N, mask_M, 0, (INPUTS + 127) // 128),
            *(num_outputs, INPUTS, 8 if FORM == "e4m3" else 4, ADJACENT, GROUP),
        )
    if BIASED:
        bias_N = tl.load(bias_ptr + expert * num_outputs + output_N, mask=mask_N, other=0.0)
        total_NM += bias_N.to(tl.float32)[:, None]
    if ACTIVATION is None:
        out_at = out_ptr + pair_M.to(tl.int64)[None, :] * num_outputs + output_N[:, None]
        if ADDED:
            total_NM += tl.load(out_at, mask=mask_N[:, None] & mask_M[None, :], other=0.0).to(tl.float32)
        tl.store(out_at, total_NM.to(out_ptr.dtype.element_ty), mask=mask_N[:, None] & mask_M[None, :])
    else:
        gate_FM, up_FM = tl.split(tl.permute(total_NM.reshape(OUTPUTS // 2, 2, TOKENS), 0, 2, 1))
        column_F = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        out_at = out_ptr + pair_M.to(tl.int64)[None, :] * (num_outputs // 2) + column_F[:, None]
        value_FM = gated(gate_FM, up_FM, ACTIVATION).to(out_ptr.dtype.element_ty)
        tl.store(out_at, value_FM, mask=(column_F < num_outputs // 2)[:, None] & mask_M[None, :])


@dataclass(frozen=True)
class GroupedTile:
    """Tile of a program: outputs x pairs, inputs of a step of the loop, warps and stages."""

    outputs: int
    tokens: int
    depth: int
    num_warps: int
    num_stages: int


def tile_for(
    num_pairs: int, weights: GroupedWeights, dtype: torch.dtype, target: CompileTarget, is_fixed: bool = False
) -> GroupedTile:
    """Return the tile of a product from the number of pairs, or one tile for any number if `is_fixed`.

    Few pairs of an expert leave most columns of a narrow tile empty, but its time is that of reading the weight. Most
    experts' pairs fit one tile, so that a weight is read or unpacked once.
    """
    is_dense = weights.form == "dense"
    # Sums of a dot product before its scale take as many registers as all sums: wider tiles do not fit.
    max_tokens = 128 if is_dense or (target.has_wgmma and weights.form != "int4") else 64
    expected = int(_CROWDING * num_pairs / weights.num_experts)
    tokens = _FIXED_TOKENS if is_fixed else min(max_tokens, power_of_two(max(1, expected), 16))
    depth = weights.group_size if weights.form == "int4" else 128
    if dtype.itemsize > 2:
        return GroupedTile(64, min(tokens, 64), 32 if is_dense else depth, 8, 2)
    if is_dense or target.has_wgmma:
        outputs, num_warps = (64, 4) if tokens <= 16 else (128, 8)
    else:  # more outputs of the same tokens do not fit into registers
        outputs, num_warps = 64, 8 if tokens == 64 else 4
    if not is_dense:
        return GroupedTile(outputs, tokens, depth, num_warps, 3)
    return GroupedTile(outputs, tokens, 128 if tokens <= 16 else 64, num_warps, 4 if target.has_wgmma else 3)


def grouped_launch(
    x_RK: torch.Tensor,
    weights: GroupedWeights,
    pairs: Pairs,
    pairs_per_row: int,
    out_PN: torch.Tensor,
    target: CompileTarget,
    activation: str | None = None,
    tile: GroupedTile | None = None,
    is_added: bool = False,
) -> Launch:
    """Return the launch that writes the outputs of all pairs that have an expert, or adds them to out if `is_added`.

    Pair p has row p // pairs_per_row of x. activation: of interleaved gates and ups, see `weights.interleaved`; out has
    half as many columns then. The default tile is `tile_for`'s.
    """
    num_pairs, num_outputs = len(pairs.expert_P), weights.num_outputs
    assert x_RK.stride(1) == 1
    assert out_PN.is_contiguous()
    assert pairs.num_experts == weights.num_experts
    assert activation is None or not is_added
    tile = tile or tile_for(num_pairs, weights, x_RK.dtype, target)
    lists = pairs.count_E, pairs.pair_ET
    strides = x_RK.stride(0), weights.value.stride(0), 0 if weights.scale is None else weights.scale.stride(0)
    return Launch(
        _multiply_grouped,
        (-(-num_outputs // tile.outputs), pairs.max_tiles(tile.tokens)),
        (
            *(x_RK, weights.value, weights.scale, weights.bias_EN, pairs.expert_P, *lists, out_PN),
            *(1 if pairs.pair_ET is None else pairs.pair_ET.shape[1], num_outputs, *strides),
        ),
        {
            "FORM": weights.form,
            "EXPERTS": weights.num_experts,
            "PADDED_EXPERTS": power_of_two(weights.num_experts),
            "INPUTS": weights.num_inputs,
            "ADJACENT": weights.adjacent,
            "GROUP": weights.group_size,
            "BIASED": weights.bias_EN is not None,
            "LISTED": pairs.count_E is not None,
            "PAIRS_PER_ROW": pairs_per_row,
            "ACTIVATION": activation,
            "ADDED": is_added,
            "OUTPUTS": tile.outputs,
            "TOKENS": tile.tokens,
            "DEPTH": tile.depth,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
