"""Attention over the paged cache on CPU: few tokens of a sequence by numba's kernel, as if each were a sequence of its
own, longer chunks one by one."""

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.kernels.contract import AttentionInput
from pipeline.kernels.cpu.paged_decode import paged_decode


def attention(
    q_TND: torch.Tensor,
    k_cache_CBKD: torch.Tensor,
    v_cache_CBKD: torch.Tensor,
    where: AttentionInput,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """See `contract.Kernels.attention`."""

    def decode(q_RND: torch.Tensor, rows: AttentionInput) -> torch.Tensor:
        table, contexts = rows.block_table_SM, rows.context_len_S
        return paged_decode(q_RND, k_cache_CBKD, v_cache_CBKD, table, contexts, scale, window)

    if len(where.query_start_S1) - 1 == len(q_TND):
        return decode(q_TND, where)
    row_R, rows, long = where.short_and_long
    if not len(long):
        return decode(q_TND, rows)
    out_TND = torch.empty_like(q_TND)
    if len(row_R):
        token_R = torch.from_numpy(row_R)
        out_TND[token_R] = decode(q_TND[token_R], rows)
    for s in long.tolist():
        start, stop = int(where.query_start_S1[s]), int(where.query_start_S1[s + 1])
        out_TND[start:stop] = _attend_one(q_TND[start:stop], k_cache_CBKD, v_cache_CBKD, where, s, scale, window)
    return out_TND


def _attend_one(
    q_QND: torch.Tensor,
    k_cache_CBKD: torch.Tensor,
    v_cache_CBKD: torch.Tensor,
    where: AttentionInput,
    s: int,
    scale: float,
    window: int | None,
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
        q_QND.transpose(0, 1).unsqueeze(0),
        k_KLD.unsqueeze(0),
        v_KLD.unsqueeze(0),
        attn_mask=mask_QL,
        is_causal=causal,
        scale=scale,
        enable_gqa=q_QND.shape[1] != k_KLD.shape[0],
    )
    return o_1NQD.squeeze(0).transpose(0, 1)
