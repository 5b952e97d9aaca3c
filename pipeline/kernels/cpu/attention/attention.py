"""Attention over the paged cache on CPU: a compiled kernel for sequences of one query, another for longer ones."""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import LayerCache
from pipeline.kernels.cpu.attention.decode_kernel import SoftmaxOptions, nothing_read, paged_decode
from pipeline.kernels.cpu.attention.prefill_kernel import NO_PART, ROWS, paged_prefill
from pipeline.kernels.cpu.attention.shared_prefix import SharedReading, pieces
from pipeline.kernels.cpu.compile.numerics import CacheArrays, arrays_of, bits
from pipeline.kernels.cpu.compile.processor import HAS_WIDE_VECTORS
from pipeline.kernels.cpu.compile.threads import ALL_ITEMS, use_threads

PARALLEL_KEYS = 1 << 19 if HAS_WIDE_VECTORS else 1 << 17
"""Single queries with fewer key elements than this stay on one thread: waking another one costs more than it saves."""
PARALLEL_QUERIES = 1 << 20 if HAS_WIDE_VECTORS else 1 << 19
"""The same for several queries per sequence: elements of keys times queries."""


@dataclass(frozen=True)
class _Decode:
    """Arguments of the decode kernel, for sequences that compute one token.

    token_S: indices of their tokens in the step; None: all tokens. shared: prefixes read once per group of sequences,
    used by layers that see all of the longest context. alone: the kernel's arguments without shared prefixes.
    """

    token_S: np.ndarray | None
    block_table_SM: np.ndarray
    context_len_S: np.ndarray
    longest: int
    parts: int
    shared: SharedReading | None
    alone: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class _Prefill:
    """Arguments of the prefill kernel, for sequences that compute several tokens: see `_prefill_items`."""

    block_table_SM: np.ndarray
    item_I3: np.ndarray
    position_T: np.ndarray


@dataclass(frozen=True)
class Plan:
    """Host-side plan for all layers of a step. parallel: whether it uses several threads."""

    parallel: bool
    decode: _Decode | None
    prefill: _Prefill | None


def attention(
    q_TND: torch.Tensor,
    cache: LayerCache,
    attn_metadata: AttentionInput,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implement `contract.Kernels.attention`. float32 and bfloat16, on a contiguous cache of the same type or FP8."""
    (_, num_heads, head_dim), num_kv_heads = q_TND.shape, cache.k_CBKD.shape[2]
    key = (num_heads, num_kv_heads, head_dim)
    if key not in attn_metadata.plans:
        attn_metadata.plans[key] = plan_of(attn_metadata, num_heads, num_kv_heads, head_dim)
    plan = attn_metadata.plans[key]
    use_threads(plan.parallel)
    q_TND = q_TND.contiguous()
    out_TND = torch.empty_like(q_TND)
    options = SoftmaxOptions.from_arguments(scale, window, softcap, sinks_N)
    attend(bits(q_TND), arrays_of(cache), plan, options, bits(out_TND))
    return out_TND


def attend(q_TND: np.ndarray, arrays: CacheArrays, plan: Plan, options: SoftmaxOptions, out_TND: np.ndarray) -> None:
    """Attend on arrays and write to `out_TND`, on the current number of numba threads, which the plan must have set."""
    decode, prefill = plan.decode, plan.prefill
    if decode is not None:
        token_S, table_SM, before = decode.token_S, decode.block_table_SM, decode.alone
        q_SND, out_SND = (q_TND, out_TND) if token_S is None else (q_TND[token_S], np.empty_like(q_TND[token_S]))
        if decode.shared is not None and options.window >= decode.longest:
            before = decode.shared.read(q_SND, arrays, table_SM, options)
        keys = table_SM, decode.context_len_S
        paged_decode(q_SND, *arrays, *keys, *options, decode.parts, *before, out_SND, *ALL_ITEMS)
        if token_S is not None:
            out_TND[token_S] = out_SND
    if prefill is not None:
        items = prefill.block_table_SM, prefill.item_I3, prefill.position_T
        paged_prefill(q_TND, *arrays, *items, *options, *NO_PART, out_TND, *ALL_ITEMS)


def plan_of(
    attn_metadata: AttentionInput, num_heads: int, num_kv_heads: int, head_dim: int, parallel: bool = False
) -> Plan:
    """Plan attention for a step. parallel: use several threads even if attention alone does not need them.

    Sets numba's number of threads to the plan's.
    """
    table_SM, context_len_S = attn_metadata.block_table_SM, attn_metadata.context_len_S
    count_S = (
        attn_metadata.query_start_S1[1:] - attn_metadata.query_start_S1[:-1]
    )  # np.diff takes several times as long
    heads = num_heads, num_kv_heads, head_dim
    if count_S.max() == 1:
        parallel = parallel or many_keys(context_len_S, num_kv_heads, head_dim)
        return Plan(parallel, _decode(attn_metadata, None, context_len_S, table_SM, heads, use_threads(parallel)), None)
    (single,) = (count_S == 1).nonzero()
    products = int(count_S.astype(np.int64) @ context_len_S)
    parallel = parallel or products * num_kv_heads * head_dim >= PARALLEL_QUERIES
    parallel = parallel or (len(single) > 0 and many_keys(context_len_S[single], num_kv_heads, head_dim))
    num_threads, decode = use_threads(parallel), None
    if len(single):
        token_S = attn_metadata.query_start_S1[single]
        decode = _decode(attn_metadata, token_S, context_len_S[single], table_SM[single], heads, num_threads)
    max_queries = max(1, ROWS * num_kv_heads // num_heads)
    items = _prefill_items(attn_metadata.query_start_S1, count_S, context_len_S, max_queries, num_threads)
    return Plan(parallel, decode, _Prefill(np.ascontiguousarray(table_SM), *items))


def _decode(
    attn_metadata: AttentionInput,
    token_S: np.ndarray | None,
    context_len_S: np.ndarray,
    table_SM: np.ndarray,
    heads: tuple[int, int, int],
    num_threads: int,
) -> _Decode:
    return _Decode(
        token_S,
        np.ascontiguousarray(table_SM),
        context_len_S,
        int(context_len_S.max()),
        parts_of(len(context_len_S), heads[1], num_threads),
        SharedReading.from_block_table(table_SM, context_len_S, attn_metadata.block_size, heads),
        nothing_read(len(context_len_S)),
    )


def _prefill_items(
    query_start_S1: np.ndarray, count_S: np.ndarray, context_len_S: np.ndarray, max_queries: int, num_threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the work items of `paged_prefill`, and the position of each token of the step in its sequence, (T,).

    An item of (I, 3) is (sequence, first token, number of tokens): up to `max_queries` consecutive queries of a
    sequence that computes more than one token. Each thread processes an equal run of items. The work of an item grows
    with its position, so items are dealt to the threads in turn, longest first.
    """
    position_T = np.arange(query_start_S1[-1]) + (context_len_S - query_start_S1[1:]).repeat(count_S)
    if count_S.max() <= max_queries:
        (sequence_I,) = (count_S > 1).nonzero()
        first_I, num_tokens_I = query_start_S1[sequence_I], count_S[sequence_I]
    else:
        sequence_I, first_I, num_tokens_I = pieces(query_start_S1, np.where(count_S > 1, count_S, 0), max_queries)
    item_I3 = np.empty((len(sequence_I), 3), dtype=np.int64)
    item_I3[:, 0], item_I3[:, 1], item_I3[:, 2] = sequence_I, first_I, num_tokens_I
    if num_threads > 1 and len(item_I3) > 1:
        heaviest_I = np.argsort(-position_T[first_I + num_tokens_I - 1])
        item_I3 = item_I3[np.concatenate([heaviest_I[thread::num_threads] for thread in range(num_threads)])]
    return item_I3, position_T


def many_keys(context_len_S: np.ndarray, num_kv_heads: int, head_dim: int) -> bool:
    """Return whether single queries over this many keys justify more than one thread."""
    return int(context_len_S.sum()) * num_kv_heads * head_dim >= PARALLEL_KEYS


def parts_of(num_sequences: int, num_kv_heads: int, num_threads: int) -> int:
    """Return the number of parts into which to split the KV heads of each single query.

    1 if there are enough queries for all threads; else the smallest even split with a part per thread, up to one part
    per KV head.
    """
    if num_sequences >= 8 * num_threads:
        return 1
    return next((p for p in range(num_threads, num_kv_heads) if num_kv_heads % p == 0), num_kv_heads)
