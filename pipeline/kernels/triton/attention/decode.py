"""Split-KV decode attention over the paged cache: a fixed grid, with equal numbers of key tiles per program.

All query heads of a KV head, at all of a sequence's query positions, form the rows of one tile, so keys and values are
read once. The contexts are split into tiles of 64 keys. Each KV head has `num_programs` programs, and each program
computes an equal run of the tiles of all sequences in order, whatever their lengths. A sequence that is split between
programs leaves partial sums, which a second launch adds in a fixed order. If several sequences begin with the same
blocks, an earlier launch may have read these for all of them (`cascade_kernel.py`); each sequence then starts from its
sums.

Between steps only the contents of `DecodeMetadata`'s tensors change, so a CUDA graph can capture the launches.

Suffixes: those of `kernels/contract.py`, I items, P partial sums, R rows of a tile (queries times heads).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

import torch
import triton
import triton.language as tl

from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.triton.attention.cascade_kernel import cascade_launch, merge_shared
from pipeline.kernels.triton.attention.decode_metadata import KEYS, DecodeMetadata, programs_and_warps
from pipeline.kernels.triton.attention.online_softmax import add_sink, attend, merge, score_factors, stages_for
from pipeline.kernels.triton.launch import CompileTarget, Launch, cache_arguments, power_of_two


@triton.jit(do_not_specialize=["table_stride", "window"])
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    item_ptr,
    program_start_ptr,
    query_start_ptr,
    context_ptr,
    table_ptr,
    partial_ptr,
    best_ptr,
    sum_ptr,
    shared_ptr,
    index_ptr,
    tile_ptr,
    shared_partial_ptr,
    shared_best_ptr,
    shared_sum_ptr,
    sinks_ptr,
    q_stride,
    table_stride,
    scale,
    window,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STEP: tl.constexpr,
    WINDOWED: tl.constexpr,
    IS_FP8: tl.constexpr,
    CONVERTS: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED_QUERIES: tl.constexpr,
):
    kv_head, program = tl.program_id(0), tl.program_id(1)
    row_R, column_D = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    head_R = kv_head * GROUP + row_R % GROUP
    for item in range(tl.load(program_start_ptr + program), tl.load(program_start_ptr + program + 1)):
        sequence = tl.load(item_ptr + 4 * item)
        first_tile = tl.load(item_ptr + 4 * item + 1)
        last_tile = tl.load(item_ptr + 4 * item + 2)
        partial = tl.load(item_ptr + 4 * item + 3)
        first_token = tl.load(query_start_ptr + sequence)
        num_queries = tl.load(query_start_ptr + sequence + 1) - first_token
        context = tl.load(context_ptr + sequence)

        real_R = row_R < num_queries * GROUP
        token_R = (first_token + row_R // GROUP).to(tl.int64)
        position_R = context - num_queries + row_R // GROUP
        mask_RD = real_R[:, None] & (column_D < HEAD_DIM)[None, :]
        q_at = q_ptr + token_R[:, None] * q_stride + head_R[:, None] * HEAD_DIM + column_D[None, :]
        q_RD = tl.load(q_at, mask=mask_RD, other=0.0)
        weighted_RD = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        best_R = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        sum_R = tl.zeros([ROWS], dtype=tl.float32)
        if SHARED_QUERIES:
            shared = tl.load(shared_ptr + sequence)
            begins_after_shared = tl.where(shared > 0, first_tile * KEYS, -1) == shared
            wanted_R = row_R < tl.where(begins_after_shared, num_queries * GROUP, 0)
            weighted_RD, best_R, sum_R = merge_shared(
                *(weighted_RD, best_R, sum_R, token_R, wanted_R, row_R % GROUP, column_D, kv_head),
                *(index_ptr, tile_ptr, shared_partial_ptr, shared_best_ptr, shared_sum_ptr),
                *(NUM_KV_HEADS, GROUP, HEAD_DIM, SHARED_QUERIES),
            )
        weighted_RD, best_R, sum_R = attend(
            *(weighted_RD, best_R, sum_R, q_RD, position_R),
            *(k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM),
            k_scale_ptr + kv_head * BLOCK if IS_FP8 else None,
            v_scale_ptr + kv_head * BLOCK if IS_FP8 else None,
            *(table_ptr + sequence.to(tl.int64) * table_stride, context),
            # With large heads STEP is less than a tile, and keys past the context may be in no block.
            *(first_tile * KEYS, tl.minimum(last_tile * KEYS, context), scale, window, softcap),
            *(NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, COLUMNS, BLOCK, STEP, True, WINDOWED, IS_FP8, CONVERTS, STAGES),
        )
        if partial < 0:
            if sinks_ptr is not None:
                sum_R = add_sink(best_R, sum_R, sinks_ptr, head_R)
            out_at = out_ptr + (token_R[:, None] * (NUM_KV_HEADS * GROUP) + head_R[:, None]) * HEAD_DIM
            out_RD = weighted_RD / sum_R[:, None]
            tl.store(out_at + column_D[None, :], out_RD.to(out_ptr.dtype.element_ty), mask=mask_RD)
        else:
            partial_R = (partial * NUM_KV_HEADS + kv_head).to(tl.int64) * KEPT_ROWS + row_R
            tl.store(best_ptr + partial_R, best_R, mask=real_R)
            tl.store(sum_ptr + partial_R, sum_R, mask=real_R)
            tl.store(partial_ptr + partial_R[:, None] * HEAD_DIM + column_D[None, :], weighted_RD, mask=mask_RD)


@triton.jit
def _combine(
    out_ptr,
    split_ptr,
    num_splits_ptr,
    query_start_ptr,
    partial_ptr,
    best_ptr,
    sum_ptr,
    sinks_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT_ROWS: tl.constexpr,
):
    """Add the partial sums of the sequences that were split, in the order of their keys."""
    kv_head = tl.program_id(0)
    row_R, column_D = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    for split in range(tl.program_id(1), tl.load(num_splits_ptr), tl.num_programs(1)):
        sequence = tl.load(split_ptr + 3 * split)
        first_partial = tl.load(split_ptr + 3 * split + 1)
        num_partials = tl.load(split_ptr + 3 * split + 2)
        first_token = tl.load(query_start_ptr + sequence)
        num_queries = tl.load(query_start_ptr + sequence + 1) - first_token
        real_R = row_R < num_queries * GROUP
        mask_RD = real_R[:, None] & (column_D < HEAD_DIM)[None, :]
        weighted_RD = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        best_R = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        sum_R = tl.zeros([ROWS], dtype=tl.float32)
        for partial in range(first_partial, first_partial + num_partials):
            partial_R = (partial * NUM_KV_HEADS + kv_head).to(tl.int64) * KEPT_ROWS + row_R
            its_best_R = tl.load(best_ptr + partial_R, mask=real_R, other=0.0)
            its_sum_R = tl.load(sum_ptr + partial_R, mask=real_R, other=1.0)
            its_RD = tl.load(partial_ptr + partial_R[:, None] * HEAD_DIM + column_D[None, :], mask=mask_RD, other=0.0)
            weighted_RD, best_R, sum_R = merge(weighted_RD, best_R, sum_R, its_RD, its_best_R, its_sum_R)
        token_R = (first_token + row_R // GROUP).to(tl.int64)
        head_R = kv_head * GROUP + row_R % GROUP
        if sinks_ptr is not None:
            sum_R = add_sink(best_R, sum_R, sinks_ptr, head_R)
        out_at = out_ptr + (token_R[:, None] * (NUM_KV_HEADS * GROUP) + head_R[:, None]) * HEAD_DIM
        out_RD = weighted_RD / sum_R[:, None]
        tl.store(out_at + column_D[None, :], out_RD.to(out_ptr.dtype.element_ty), mask=mask_RD)


def decode_launches(
    q_TND: torch.Tensor,
    cache: LayerCache,
    out_TND: torch.Tensor,
    metadata: DecodeMetadata,
    scale: float,
    softcap: float,
    sinks_N: torch.Tensor | None,
    target: CompileTarget,
) -> tuple[Launch, ...]:
    """Return the launches that compute attention for the sequences of `metadata` and write to their tokens of
    `out_TND`: sums over shared prefixes (with a `cascade`), sums over the rest, and their combination."""
    num_heads, head_dim = q_TND.shape[1:]
    _, block_size, num_kv_heads, _ = cache.k_CBKD.shape
    assert q_TND.stride()[1:] == (head_dim, 1)
    assert out_TND.is_contiguous()
    numbers, sequences, cascade = metadata.numbers, metadata.sequences, metadata.cascade
    columns, is_fp8 = power_of_two(head_dim, 16), cache.k_CBKD.dtype == FP8
    partials = metadata.partial_PKRD, metadata.best_PKR, metadata.sum_PKR
    shape = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "COLUMNS": columns,
        "ROWS": metadata.num_rows,
        "KEPT_ROWS": metadata.sum_PKR.shape[2],
    }
    step = KEYS if columns <= 256 else KEYS // 4
    stages = _stages(2 * step * columns * cache.k_CBKD.element_size(), target)
    own_scale, own_softcap = score_factors(scale, softcap)
    sums = Launch(
        _decode,
        (num_kv_heads, metadata.num_programs),
        (
            q_TND,
            *cache_arguments(cache),
            out_TND,
            numbers.item_I4,
            numbers.program_start,
            sequences.query_start_S1,
            sequences.context_len_S,
            sequences.block_table_SM,
            *partials,
            *((None,) * 6 if cascade is None else cascade.sums_of_tokens),
            sinks_N,
            q_TND.stride(0),
            sequences.block_table_SM.stride(0),
            own_scale,
            metadata.window or 0,
            own_softcap,
        ),
        {
            **shape,
            "BLOCK": block_size,
            "KEYS": KEYS,
            "STEP": step,
            "WINDOWED": metadata.window is not None,
            "IS_FP8": is_fp8,
            "CONVERTS": target.converts_fp8,
            "STAGES": stages,
            "SHARED_QUERIES": 0 if cascade is None else cascade.shape.num_queries,
        },
        num_warps=programs_and_warps(target, metadata.num_rows, head_dim, is_fp8)[1],
        num_stages=stages,
    )
    combine = Launch(
        _combine,
        (num_kv_heads, min(metadata.num_programs, len(numbers.split_S3))),
        (
            out_TND,
            numbers.split_S3,
            numbers.num_splits,
            sequences.query_start_S1,
            *partials,
            sinks_N,
        ),
        shape,
    )
    if cascade is None:
        return sums, combine
    return (
        cascade_launch(q_TND, cache, cascade, sequences.block_table_SM, scale, softcap, target),
        sums,
        combine,
    )


def _stages(tile_bytes: int, target: CompileTarget) -> int:
    """Return the pipeline stages for three tiles in flight, or fewer if that leaves room for a second program on a
    multiprocessor, with its 8 KiB of scales and sums."""
    return stages_for(max(1, min(3, (target.max_shared_bytes // 2 - (8 << 10)) // tile_bytes)))
