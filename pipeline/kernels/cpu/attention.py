"""Attention over the paged cache on CPU: decoding rows batched by similar length, longer queries one by one.

Decoding rows are gathered into a padded batch with the query heads of a KV head as its query rows (torch's attention
is slow on single query rows). Padding reads the sequence's own first key, never a foreign block, and is masked.
"""

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.kernels.contract import AttentionInput

MIN_GROUP = 16  # decoding rows are split into groups of similar length no smaller than this
MAX_GROUPS = 4


class DecodeGroup:
    """Rows that compute one token each: where their queries lie and a padded gather of their contexts."""

    def __init__(self, where: AttentionInput, rows: np.ndarray, window: int | None) -> None:
        context_S = where.context_len_S[rows].astype(np.int64)
        first_S = np.zeros_like(context_S) if window is None else np.maximum(context_S - window, 0)
        length_S = context_S - first_S
        offset_L = np.arange(int(length_S.max()))
        valid_SL = offset_L < length_S[:, None]
        position_SL = np.where(valid_SL, first_S[:, None] + offset_L, first_S[:, None])
        block_SL = np.take_along_axis(where.block_table_SM[rows], position_SL // where.block_size, axis=1)
        slot_SL = block_SL.astype(np.int64) * where.block_size + position_SL % where.block_size
        self.query_S = torch.from_numpy(where.query_start_S1[rows].astype(np.int64))
        self.slot_SL = torch.from_numpy(slot_SL.ravel())
        self.mask_S11L = None if valid_SL.all() else torch.from_numpy(valid_SL)[:, None, None, :]
        self.shape = valid_SL.shape


def _decode_groups(where: AttentionInput, window: int | None) -> list[DecodeGroup]:
    key = f"decode_groups/{window}"
    if key not in where.derived:
        rows = np.flatnonzero(np.diff(where.query_start_S1) == 1)
        rows = rows[np.argsort(where.context_len_S[rows], kind="stable")]
        num_groups = max(1, min(MAX_GROUPS, len(rows) // MIN_GROUP))
        where.derived[key] = [DecodeGroup(where, part, window) for part in np.array_split(rows, num_groups) if len(part)]
    return where.derived[key]  # type: ignore[return-value]


def attention(
    q_TND: torch.Tensor, k_cache_CBKD: torch.Tensor, v_cache_CBKD: torch.Tensor, where: AttentionInput,
    scale: float, window: int | None,
) -> torch.Tensor:
    """See `contract.Kernels.attention`."""
    out_TND = torch.empty_like(q_TND)
    num_heads, head_dim = q_TND.shape[1:]
    num_kv_heads = k_cache_CBKD.shape[2]
    k_slots, v_slots = k_cache_CBKD.flatten(0, 1), v_cache_CBKD.flatten(0, 1)
    for group in _decode_groups(where, window):
        rows, length = group.shape
        k_SLKD = k_slots.index_select(0, group.slot_SL).view(rows, length, num_kv_heads, head_dim)
        v_SLKD = v_slots.index_select(0, group.slot_SL).view(rows, length, num_kv_heads, head_dim)
        q_SKGD = q_TND[group.query_S].view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        o_SKGD = F.scaled_dot_product_attention(
            q_SKGD, k_SLKD.transpose(1, 2), v_SLKD.transpose(1, 2), attn_mask=group.mask_S11L, scale=scale
        )
        out_TND[group.query_S] = o_SKGD.reshape(rows, num_heads, head_dim)
    for s in np.flatnonzero(np.diff(where.query_start_S1) > 1).tolist():
        start, stop = int(where.query_start_S1[s]), int(where.query_start_S1[s + 1])
        out_TND[start:stop] = _attend_one(q_TND[start:stop], k_cache_CBKD, v_cache_CBKD, where, s, scale, window)
    return out_TND


def _attend_one(
    q_QND: torch.Tensor, k_cache_CBKD: torch.Tensor, v_cache_CBKD: torch.Tensor, where: AttentionInput, s: int,
    scale: float, window: int | None,
) -> torch.Tensor:
    context, num_queries = int(where.context_len_S[s]), q_QND.shape[0]
    blocks = torch.from_numpy(where.block_table_SM[s, : -(-context // where.block_size)].astype(np.int64))
    k_KLD = k_cache_CBKD.index_select(0, blocks).flatten(0, 1)[:context].transpose(0, 1)
    v_KLD = v_cache_CBKD.index_select(0, blocks).flatten(0, 1)[:context].transpose(0, 1)
    causal = context == num_queries and (window is None or window >= context)
    mask_QL = None
    if not causal:
        query_Q1 = torch.arange(context - num_queries, context).unsqueeze(1)
        key_L = torch.arange(context)
        mask_QL = key_L <= query_Q1
        if window is not None:
            mask_QL &= key_L > query_Q1 - window
    o_1NQD = F.scaled_dot_product_attention(
        q_QND.transpose(0, 1).unsqueeze(0), k_KLD.unsqueeze(0), v_KLD.unsqueeze(0),
        attn_mask=mask_QL, is_causal=causal, scale=scale, enable_gqa=q_QND.shape[1] != k_KLD.shape[0],
    )
    return o_1NQD.squeeze(0).transpose(0, 1)
