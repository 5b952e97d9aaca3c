"""Attention to prefixes that several sequences share, read once for all their queries: cascade attention (Ye et al.
2024, "Cascade Inference"; Juravsky et al. 2024, "Hydragen"; Zhu et al. 2024, "RelayAttention").

The query tokens of a group, with all query heads of a KV head, are packed into tiles of 128 rows, large enough for
wgmma, whichever sequence they belong to: each sees all keys of the prefix, so there is no mask. A tile writes partial
sums with their maxima; the decode kernel continues from them with the rest of each sequence's context. Tiles are split
along the keys and partitioned equally among the programs, as in the decode kernel.

Suffixes: those of `kernels/contract.py`, P positions in the list of tokens, R rows of a tile (queries times heads).
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

import torch
import triton
import triton.language as tl

from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.triton.attention.cascade_metadata import UNIT, CascadeMetadata
from pipeline.kernels.triton.attention.online_softmax import attend, merge, score_factors
from pipeline.kernels.triton.attention.prefill import rows_of, tile_of
from pipeline.kernels.triton.launch import CompileTarget, Launch, cache_arguments, power_of_two


@triton.jit(do_not_specialize=["table_stride"])
def _cascade(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    item_ptr,
    program_start_ptr,
    tile_ptr,
    token_ptr,
    table_ptr,
    partial_ptr,
    best_ptr,
    sum_ptr,
    q_stride,
    table_stride,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    IS_FP8: tl.constexpr,
    CONVERTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head, program = tl.program_id(0), tl.program_id(1)
    QUERIES: tl.constexpr = ROWS // GROUP
    KEPT_ROWS: tl.constexpr = QUERIES * GROUP
    row_R, column_D = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    head_R = kv_head * GROUP + row_R % GROUP
    for item in range(tl.load(program_start_ptr + program), tl.load(program_start_ptr + program + 1)):
        tile = tl.load(item_ptr + 3 * item)
        begin = tl.load(item_ptr + 3 * item + 1) * UNIT
        end = tl.load(item_ptr + 3 * item + 2) * UNIT
        sequence = tl.load(tile_ptr + 3 * tile)
        token_R = tl.load(token_ptr + tile * QUERIES + row_R // GROUP, mask=row_R < KEPT_ROWS, other=-1).to(tl.int64)
        mask_RD = (token_R >= 0)[:, None] & (column_D < HEAD_DIM)[None, :]
        q_at = q_ptr + token_R[:, None] * q_stride + head_R[:, None] * HEAD_DIM + column_D[None, :]
        q_RD = tl.load(q_at, mask=mask_RD, other=0.0)
        weighted_RD, best_R, sum_R = attend(
            tl.zeros([ROWS, COLUMNS], dtype=tl.float32),
            tl.full([ROWS], float("-inf"), dtype=tl.float32),
            tl.zeros([ROWS], dtype=tl.float32),
            q_RD,
            row_R,
            *(k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM),
            k_scale_ptr + kv_head * BLOCK if IS_FP8 else None,
            v_scale_ptr + kv_head * BLOCK if IS_FP8 else None,
            *(table_ptr + sequence.to(tl.int64) * table_stride, end),
            *(begin, end, scale, 0, softcap),
            *(NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, COLUMNS, BLOCK, KEYS, False, False, IS_FP8, CONVERTS, STAGES),
        )
        # Rows without a token are stored too: a mask for them would occupy registers throughout the loop.
        kept_R = (item * NUM_KV_HEADS + kv_head) * KEPT_ROWS + row_R  # 32 bits are enough: see MAX_SUM_BYTES
        is_row_R = row_R < KEPT_ROWS
        kept_RD = is_row_R[:, None] & (column_D < HEAD_DIM)[None, :]
        tl.store(best_ptr + kept_R, best_R, mask=is_row_R)
        tl.store(sum_ptr + kept_R, sum_R, mask=is_row_R)
        tl.store(partial_ptr + kept_R[:, None] * HEAD_DIM + column_D[None, :], weighted_RD, mask=kept_RD)


@triton.jit
def merge_shared(
    weighted_RD,
    best_R,
    sum_R,
    token_R,
    wanted_R,
    head_R,
    column_D,
    kv_head,
    index_ptr,
    tile_ptr,
    partial_ptr,
    best_ptr,
    sum_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Merge the partial sums that `_cascade` wrote for a token (and the KV head's query head `head_R`) into the running
    softmax of each wanted row."""
    index_R = tl.load(index_ptr + token_R, mask=wanted_R, other=0)
    item_R = tl.load(tile_ptr + index_R // QUERIES * 3 + 1, mask=wanted_R, other=0)
    pieces_R = tl.load(tile_ptr + index_R // QUERIES * 3 + 2, mask=wanted_R, other=0)
    for piece in range(0, tl.max(pieces_R, axis=0)):
        here_R = piece < pieces_R
        kept_R = ((item_R + piece) * NUM_KV_HEADS + kv_head).to(tl.int64) * (QUERIES * GROUP)
        kept_R += index_R % QUERIES * GROUP + head_R
        here_RD = here_R[:, None] & (column_D < HEAD_DIM)[None, :]
        weighted_RD, best_R, sum_R = merge(
            weighted_RD,
            best_R,
            sum_R,
            tl.load(partial_ptr + kept_R[:, None] * HEAD_DIM + column_D[None, :], mask=here_RD, other=0.0),
            tl.load(best_ptr + kept_R, mask=here_R, other=float("-inf")),
            tl.load(sum_ptr + kept_R, mask=here_R, other=0.0),
        )
    return weighted_RD, best_R, sum_R


def cascade_launch(
    q_TND: torch.Tensor,
    cache: LayerCache,
    metadata: CascadeMetadata,
    table_SM: torch.Tensor,
    scale: float,
    softcap: float,
    target: CompileTarget,
) -> Launch:
    """Return the launch that computes the partial sums of every tile of `metadata` over its shared prefix."""
    head_dim = q_TND.shape[2]
    is_fp8 = cache.k_CBKD.dtype == FP8
    columns = power_of_two(head_dim, 32 if is_fp8 else 16)
    keys, stages = tile_of(columns, q_TND.element_size(), is_fp8, False, target)
    assert q_TND.stride()[1:] == (head_dim, 1)
    assert UNIT % keys == 0
    return Launch(
        _cascade,
        (metadata.shape.num_kv_heads, metadata.shape.num_programs),
        (
            q_TND,
            *cache_arguments(cache),
            metadata.numbers.item_U3,
            metadata.numbers.program_start,
            metadata.numbers.tile_W3,
            metadata.numbers.token_P,
            table_SM,
            metadata.partial_UKRD,
            metadata.best_UKR,
            metadata.sum_UKR,
            q_TND.stride(0),
            table_SM.stride(0),
            *score_factors(scale, softcap),
        ),
        {
            "NUM_KV_HEADS": metadata.shape.num_kv_heads,
            "GROUP": metadata.shape.group,
            "HEAD_DIM": head_dim,
            "COLUMNS": columns,
            "BLOCK": cache.k_CBKD.shape[1],
            "ROWS": rows_of(columns),
            "KEYS": keys,
            "UNIT": UNIT,
            "IS_FP8": is_fp8,
            "CONVERTS": target.converts_fp8,
            "STAGES": stages,
        },
        num_warps=8,
        num_stages=stages,
    )
