"""Attention over the paged cache on CPU: a compiled kernel for rows that compute one token, another for longer ones."""

import numpy as np
import torch

from pipeline.kernels.contract import AttentionInput
from pipeline.kernels.cpu import compiled
from pipeline.kernels.cpu.compiled import PARALLEL_ELEMENTS, bits, use_threads

ROWS = 64  # queries times heads of a KV head that share the reading of keys and values

_UNBOUNDED = np.iinfo(np.int64).max // 2


def attention(
    q_TND: torch.Tensor,
    k_cache_CBKD: torch.Tensor,
    v_cache_CBKD: torch.Tensor,
    where: AttentionInput,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """See `contract.Kernels.attention`. float32 and bfloat16; the caches must be contiguous."""
    count_S = np.diff(where.query_start_S1)
    single = np.flatnonzero(count_S == 1)
    if len(single) == len(count_S):
        return _decode(q_TND, k_cache_CBKD, v_cache_CBKD, where.block_table_SM, where.context_len_S, scale, window)
    out_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
    if len(single):
        token_S = torch.from_numpy(where.query_start_S1[single].astype(np.int64))
        tables, lengths = where.block_table_SM[single], where.context_len_S[single]
        out_TND[token_S] = _decode(q_TND[token_S], k_cache_CBKD, v_cache_CBKD, tables, lengths, scale, window)
    num_kv_heads, head_dim = k_cache_CBKD.shape[2:]
    position_T = _positions(where)
    longer = int(where.context_len_S[count_S > 1].sum())
    num_threads = use_threads(longer * num_kv_heads * head_dim >= PARALLEL_ELEMENTS)
    compiled.paged_prefill(
        bits(q_TND.contiguous()),
        bits(k_cache_CBKD),
        bits(v_cache_CBKD),
        np.ascontiguousarray(where.block_table_SM),
        _items(where, count_S, position_T, max(1, ROWS * num_kv_heads // q_TND.shape[1]), num_threads),
        position_T,
        _UNBOUNDED if window is None else window,
        np.float32(scale),
        bits(out_TND),
    )
    return out_TND


def _positions(where: AttentionInput) -> np.ndarray:
    """The position of each token of the step in its sequence, int64."""
    behind_S = where.context_len_S.astype(np.int64) - where.query_start_S1[1:]
    return np.arange(where.query_start_S1[-1]) + np.repeat(behind_S, np.diff(where.query_start_S1))


def _items(
    where: AttentionInput, count_S: np.ndarray, position_T: np.ndarray, most: int, num_threads: int
) -> np.ndarray:
    """(sequence, first token, number of tokens) of at most `most` neighbouring queries of the longer sequences, int64.

    Threads take equal runs of the list; the work of an item grows with its position, so they are dealt out in turn.
    """
    longer = np.flatnonzero(count_S > 1)
    pieces_L = -(-count_S[longer] // most)
    sequence_I = np.repeat(longer, pieces_L)
    index_I = np.arange(len(sequence_I)) - np.repeat(np.cumsum(pieces_L) - pieces_L, pieces_L)
    first_I = where.query_start_S1[sequence_I].astype(np.int64) + index_I * most
    size_I = np.minimum(most, where.query_start_S1[sequence_I + 1] - first_I)
    heaviest = np.argsort(-position_T[first_I + size_I - 1], kind="stable")
    dealt = np.concatenate([heaviest[thread::num_threads] for thread in range(num_threads)])
    return np.stack([sequence_I, first_I, size_I], axis=1)[dealt].astype(np.int64)


def _decode(
    q_SND: torch.Tensor,
    k_cache_CBKD: torch.Tensor,
    v_cache_CBKD: torch.Tensor,
    block_table_SM: np.ndarray,
    context_len_S: np.ndarray,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of each sequence's last token over its context: (S, N, D) in q's type."""
    q_SND = q_SND.contiguous()
    out_SND = torch.empty_like(q_SND)
    num_kv_heads = k_cache_CBKD.shape[2]
    num_threads = use_threads(int(context_len_S.sum()) * num_kv_heads * k_cache_CBKD.shape[3] >= PARALLEL_ELEMENTS)
    compiled.paged_decode(
        bits(q_SND),
        bits(k_cache_CBKD),
        bits(v_cache_CBKD),
        np.ascontiguousarray(block_table_SM),
        context_len_S,
        _UNBOUNDED if window is None else window,
        np.float32(scale),
        1 if len(context_len_S) >= 8 * num_threads else _parts(num_kv_heads, num_threads),
        bits(out_SND),
    )
    return out_SND


def _parts(num_kv_heads: int, num_threads: int) -> int:
    """The fewest equal parts of the KV heads of which each thread gets one; all of them where there are too few."""
    return next((p for p in range(num_threads, num_kv_heads) if num_kv_heads % p == 0), num_kv_heads)
