"""Attention over the paged cache on CPU: a compiled kernel for rows that compute one token, another for longer ones."""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.kernels.cache import LayerCache
from pipeline.kernels.contract import AttentionInput
from pipeline.kernels.cpu import paged
from pipeline.kernels.cpu.numerics import CacheArrays, arrays_of, bits
from pipeline.kernels.cpu.paged import NO_LOG_SUM, ROWS, UNBOUNDED, nothing_read
from pipeline.kernels.cpu.shared import SharedReading
from pipeline.kernels.cpu.threads import WHOLE, use_threads

PARALLEL_KEYS = 1 << 17
"""Elements of keys below which single queries stay on one thread: waking another one would take longer than it saves.
"""
PARALLEL_QUERIES = 1 << 19
"""The same for several queries a sequence: elements of keys times queries."""


@dataclass(frozen=True)
class _Decode:
    """Sequences that compute one token: which of the step's tokens (None: all), and what the kernel is told of them."""

    token_S: torch.Tensor | None
    block_table_SM: np.ndarray
    context_len_S: np.ndarray
    parallel: bool
    parts: int
    shared: SharedReading | None
    alone: tuple[np.ndarray, ...]  # what the kernel is told where nothing is read together


@dataclass(frozen=True)
class _Prefill:
    """Sequences that compute several tokens: see `_prefill_items`."""

    block_table_SM: np.ndarray
    item_I3: np.ndarray
    position_T: np.ndarray
    parallel: bool


Plan = tuple[_Decode | None, _Prefill | None]


def attention(
    q_TND: torch.Tensor, cache: LayerCache, where: AttentionInput, scale: float, window: int | None
) -> torch.Tensor:
    """See `contract.Kernels.attention`. float32 and bfloat16, on a cache of the same type or FP8; it must be
    contiguous."""
    (_, num_heads, head_dim), num_kv_heads = q_TND.shape, cache.k_CBKD.shape[2]
    sees_all = window is None or window >= int(where.context_len_S.max())
    key = (num_heads, num_kv_heads, head_dim, sees_all)
    if key not in where.worked_out:
        where.worked_out[key] = _plan(where, num_heads, num_kv_heads, head_dim, sees_all)
    decode, prefill = where.worked_out[key]
    arrays = arrays_of(cache)
    options = UNBOUNDED if window is None else window, np.float32(scale)
    q_TND = q_TND.contiguous()
    if prefill is None:
        assert decode is not None
        return _decode(q_TND, arrays, decode, *options)
    out_TND = torch.empty_like(q_TND)
    if decode is not None:
        assert decode.token_S is not None
        out_TND[decode.token_S] = _decode(q_TND[decode.token_S], arrays, decode, *options)
    use_threads(prefill.parallel)
    paged.paged_prefill(
        *(bits(q_TND), *arrays, prefill.block_table_SM, prefill.item_I3, prefill.position_T, *options),
        *(NO_LOG_SUM, bits(out_TND), *WHOLE),
    )
    return out_TND


def _decode(q_SND: torch.Tensor, arrays: CacheArrays, plan: _Decode, window: int, scale: np.float32) -> torch.Tensor:
    """Attention of each sequence's last token over its context: (S, N, D) in q's type."""
    out_SND = torch.empty_like(q_SND)
    use_threads(plan.parallel)
    before = plan.alone
    if plan.shared is not None:
        before = plan.shared.read(bits(q_SND), arrays, plan.block_table_SM, scale)
    shape = plan.block_table_SM, plan.context_len_S, window, scale, plan.parts
    paged.paged_decode(bits(q_SND), *arrays, *shape, *before, bits(out_SND), *WHOLE)
    return out_SND


def _plan(where: AttentionInput, num_heads: int, num_kv_heads: int, head_dim: int, sees_all: bool) -> Plan:
    """What the host works out once for all layers of a step. sees_all: each query sees its whole context."""
    count_S = np.diff(where.query_start_S1)
    single, longer = np.flatnonzero(count_S == 1), np.flatnonzero(count_S > 1)
    decode = prefill = None
    if len(single):
        all_single = not len(longer)
        table_SM, context_len_S = where.block_table_SM, where.context_len_S
        token_S = None
        if not all_single:
            token_S = torch.from_numpy(where.query_start_S1[single].astype(np.int64))
            table_SM, context_len_S = table_SM[single], context_len_S[single]
        parallel = many_keys(context_len_S, num_kv_heads, head_dim)
        parts = parts_of(len(single), num_kv_heads, use_threads(parallel))
        shared = None
        if sees_all:
            heads = num_heads, num_kv_heads, head_dim
            shared = SharedReading.of(table_SM, context_len_S, where.block_size, heads)
        alone = nothing_read(len(single))
        decode = _Decode(token_S, np.ascontiguousarray(table_SM), context_len_S, parallel, parts, shared, alone)
    if len(longer):
        products = int((count_S[longer].astype(np.int64) * where.context_len_S[longer]).sum())
        parallel = products * num_kv_heads * head_dim >= PARALLEL_QUERIES
        most = max(1, ROWS * num_kv_heads // num_heads)
        item_I3, position_T = _prefill_items(where.query_start_S1, where.context_len_S, most, use_threads(parallel))
        prefill = _Prefill(np.ascontiguousarray(where.block_table_SM), item_I3, position_T, parallel)
    return decode, prefill


def _prefill_items(
    query_start_S1: np.ndarray, context_len_S: np.ndarray, most: int, num_threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """The pieces of work of `paged.paged_prefill`, (I, 3): (sequence, first token, number of tokens) of at most `most`
    neighbouring queries of the sequences that compute more than one token; and the position of each token of a step in
    its sequence, (T,).

    Threads take equal runs of the pieces; the work of one grows with its position, so they are dealt out in turn.
    """
    count_S = np.diff(query_start_S1).astype(np.int64)
    position_T = np.arange(query_start_S1[-1]) + np.repeat(context_len_S - query_start_S1[1:], count_S)
    pieces_S = np.where(count_S > 1, -(-count_S // most), 0)
    sequence_I = np.repeat(np.arange(len(count_S)), pieces_S)
    number_I = np.arange(len(sequence_I)) - np.repeat(np.cumsum(pieces_S) - pieces_S, pieces_S)
    first_I = query_start_S1[sequence_I] + number_I * most
    num_tokens_I = np.minimum(most, query_start_S1[sequence_I + 1] - first_I)
    item_I3 = np.stack([sequence_I, first_I, num_tokens_I], axis=1)
    heaviest_I = np.argsort(-position_T[first_I + num_tokens_I - 1])
    dealt_I = np.concatenate([heaviest_I[thread::num_threads] for thread in range(num_threads)])
    return item_I3[dealt_I], position_T


def many_keys(context_len_S: np.ndarray, num_kv_heads: int, head_dim: int) -> bool:
    """Whether single queries over so many keys are worth more than one thread."""
    return int(context_len_S.sum()) * num_kv_heads * head_dim >= PARALLEL_KEYS


def parts_of(num_sequences: int, num_kv_heads: int, num_threads: int) -> int:
    """Of so many single queries: 1 where there are enough to deal out whole ones, else the fewest equal parts of the KV
    heads of which each thread gets one; all of them where there are too few."""
    if num_sequences >= 8 * num_threads:
        return 1
    return next((p for p in range(num_threads, num_kv_heads) if num_kv_heads % p == 0), num_kv_heads)
