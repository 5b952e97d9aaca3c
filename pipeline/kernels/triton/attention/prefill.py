"""Attention of sequences that compute many tokens, over the paged cache: tiles of 128 rows, large enough for wgmma.

A tile's rows are adjacent query tokens with all query heads of a KV head, so a short run of queries fills a tile as
well as a long one, and few products at the diagonal are masked. Keys and values are read through the block table, so a
prefix in shared blocks is read like tokens of the step.

Suffixes: those of `kernels/contract.py`, I items, R rows of a tile (queries times heads).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.memory import on_device
from pipeline.kernels.triton.attention.converted_cache import converted_blocks
from pipeline.kernels.triton.attention.online_softmax import add_sink, attend, score_factors, stages_for
from pipeline.kernels.triton.launch import CompileTarget, Launch, cache_arguments, power_of_two

MAX_KEYS = 128  # per tile


def rows_of(head_dim: int) -> int:
    """Return the rows per tile, whose sums must stay in registers."""
    return 128 if head_dim <= 128 else 64 if head_dim <= 256 else 32


@triton.jit(do_not_specialize=["table_stride", "window"])
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    item_ptr,
    query_start_ptr,
    context_ptr,
    table_ptr,
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
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    IS_FP8: tl.constexpr,
    CONVERTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head, item = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(item_ptr + 2 * item)
    if sequence < 0:
        return
    first_query = tl.load(item_ptr + 2 * item + 1)
    first_token = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_token
    context = tl.load(context_ptr + sequence)

    QUERIES: tl.constexpr = ROWS // GROUP
    row_R, column_D = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    query_R = first_query + row_R // GROUP
    head_R = kv_head * GROUP + row_R % GROUP
    real_R = (row_R < QUERIES * GROUP) & (query_R < num_queries)
    token_R = (first_token + query_R).to(tl.int64)
    position_R = context - num_queries + query_R
    mask_RD = real_R[:, None] & (column_D < HEAD_DIM)[None, :]
    q_at = q_ptr + token_R[:, None] * q_stride + head_R[:, None] * HEAD_DIM + column_D[None, :]
    q_RD = tl.load(q_at, mask=mask_RD, other=0.0)

    first_position = context - num_queries + first_query
    end = tl.minimum(first_position + QUERIES, context)
    if WINDOWED:
        begin = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
        masked_from = begin
    else:
        begin = 0
        masked_from = (first_position + 1) // KEYS * KEYS
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    if IS_FP8:
        k_scale_ptr += kv_head * BLOCK
        v_scale_ptr += kv_head * BLOCK
    table_ptr += sequence.to(tl.int64) * table_stride
    KV_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM

    weighted_RD = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    best_R = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    sum_R = tl.zeros([ROWS], dtype=tl.float32)
    if not WINDOWED:
        weighted_RD, best_R, sum_R = attend(
            *(weighted_RD, best_R, sum_R, q_RD, position_R, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr),
            *(table_ptr, context),
            *(begin, masked_from, scale, window, softcap),
            *(KV_STRIDE, HEAD_DIM, COLUMNS, BLOCK, KEYS, False, False, IS_FP8, CONVERTS, STAGES),
        )
    weighted_RD, best_R, sum_R = attend(
        *(weighted_RD, best_R, sum_R, q_RD, position_R, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr),
        *(table_ptr, context),
        *(masked_from, end, scale, window, softcap),
        *(KV_STRIDE, HEAD_DIM, COLUMNS, BLOCK, KEYS, True, WINDOWED, IS_FP8, CONVERTS, STAGES),
    )
    if sinks_ptr is not None:
        sum_R = add_sink(best_R, sum_R, sinks_ptr, head_R)
    out_at = out_ptr + (token_R[:, None] * (NUM_KV_HEADS * GROUP) + head_R[:, None]) * HEAD_DIM + column_D[None, :]
    out_RD = weighted_RD / sum_R[:, None]
    tl.store(out_at, out_RD.to(out_ptr.dtype.element_ty), mask=mask_RD)


@dataclass(frozen=True)
class PrefillMetadata:
    """Device tensors, int32.

    item_I2: sequence and first query of each tile, those with the most keys first; sequence -1: no tile. With block_X,
    the block table refers to a cache that holds these blocks of the FP8 cache in the type of q.
    """

    window: int | None
    item_I2: torch.Tensor
    query_start_S1: torch.Tensor
    context_len_S: torch.Tensor
    block_table_SM: torch.Tensor
    block_X: torch.Tensor | None = None

    @classmethod
    def from_input(
        cls,
        attn_metadata: AttentionInput,
        sequences: np.ndarray,
        queries: int,
        window: int | None,
        device: torch.device,
        max_converted: int = 0,
    ) -> "PrefillMetadata":
        """Plan the sequences of `where` at these indices, with `queries` query tokens per tile.

        If it pays, up to `max_converted` blocks are converted: see `converted_cache.py`.
        """
        table_SM, converted = attn_metadata.block_table_SM, None
        if max_converted:
            context_S, count_S = (
                attn_metadata.context_len_S[sequences],
                np.diff(attn_metadata.query_start_S1)[sequences],
            )
            first_seen_S = np.zeros_like(context_S) if window is None else context_S - count_S - window + 1
            converted = converted_blocks(
                table_SM[sequences],
                np.maximum(first_seen_S, 0)
                // MAX_KEYS
                * MAX_KEYS
                // attn_metadata.block_size,  # begin of the first tile
                -(-context_S // attn_metadata.block_size),
                -(-count_S // queries),
                max_converted,
            )
        arrays = [
            prefill_items(attn_metadata, sequences, queries),
            attn_metadata.query_start_S1,
            attn_metadata.context_len_S,
            table_SM,
        ]
        if converted is not None:
            block_X, own_SM = converted
            table_SM = np.zeros_like(table_SM)
            table_SM[sequences] = own_SM
            arrays[3:] = table_SM, block_X
        return cls(window, *(on_device(np.ascontiguousarray(each, dtype=np.int32), device) for each in arrays))


def prefill_items(attn_metadata: AttentionInput, sequences: np.ndarray, queries: int) -> np.ndarray:
    """Return item_I2 of `PrefillMetadata` for the sequences of `where` at these indices and `queries` per tile."""
    count_S = np.diff(attn_metadata.query_start_S1)[sequences].astype(np.int64)
    tiles_S = -(-count_S // queries)
    of_I = np.repeat(np.arange(len(sequences)), tiles_S)
    first_query_I = (np.arange(len(of_I)) - np.repeat(np.cumsum(tiles_S) - tiles_S, tiles_S)) * queries
    end_I = (attn_metadata.context_len_S[sequences] - count_S)[of_I] + first_query_I
    heaviest = np.argsort(-end_I, kind="stable")
    return np.stack([sequences[of_I], first_query_I], axis=1)[heaviest]


def prefill_launch(
    q_TND: torch.Tensor,
    cache: LayerCache,
    out_TND: torch.Tensor,
    metadata: PrefillMetadata,
    scale: float,
    softcap: float,
    sinks_N: torch.Tensor | None,
    target: CompileTarget,
) -> Launch:
    """Return the launch that computes attention for the sequences of `metadata`, into their rows of out_TND."""
    num_heads, head_dim = q_TND.shape[1:]
    _, block_size, num_kv_heads, _ = cache.k_CBKD.shape
    assert q_TND.stride()[1:] == (head_dim, 1)
    assert out_TND.is_contiguous()
    is_fp8 = cache.k_CBKD.dtype == FP8
    columns = power_of_two(head_dim, 32 if is_fp8 else 16)
    keys, stages = tile_of(columns, q_TND.element_size(), is_fp8, metadata.window is not None, target)
    own_scale, own_softcap = score_factors(scale, softcap)
    return Launch(
        _prefill,
        (num_kv_heads, len(metadata.item_I2)),
        (
            *(q_TND, *cache_arguments(cache), out_TND),
            *(metadata.item_I2, metadata.query_start_S1, metadata.context_len_S, metadata.block_table_SM),
            sinks_N,
            *(q_TND.stride(0), metadata.block_table_SM.stride(0), own_scale, metadata.window or 0, own_softcap),
        ),
        {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": num_heads // num_kv_heads,
            "HEAD_DIM": head_dim,
            "COLUMNS": columns,
            "BLOCK": block_size,
            "ROWS": rows_of(columns),
            "KEYS": keys,
            "WINDOWED": metadata.window is not None,
            "IS_FP8": is_fp8,
            "CONVERTS": target.converts_fp8,
            "STAGES": stages,
        },
        num_warps=8,
        num_stages=stages,
    )


def tile_of(columns: int, element_size: int, is_fp8: bool, windowed: bool, target: CompileTarget) -> tuple[int, int]:
    """Return the keys per tile and pipeline stages: the largest that fit into 255 registers of 256 threads."""
    row_bytes = columns * element_size
    if row_bytes > 512:
        keys = 16
    elif target.has_wgmma:
        keys = MAX_KEYS if row_bytes <= 128 or (row_bytes == 256 and not windowed) else 64 if row_bytes <= 256 else 32
    else:
        keys = 64 if row_bytes <= 128 else 32
    if is_fp8:
        keys = min(keys, 64)  # with the widened values, more do not fit into registers
    max_buffers = 1 if keys * row_bytes > 64 * 256 else 2
    left = target.max_shared_bytes - rows_of(columns) * (row_bytes + keys * element_size)  # queries and weights
    stored_bytes = 2 * keys * row_bytes
    if is_fp8:  # shared memory holds the widened tile too
        left -= stored_bytes
        stored_bytes = 2 * keys * columns
    return keys, stages_for(max(1, min(max_buffers, left // stored_bytes)))
