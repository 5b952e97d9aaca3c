"""Attention of single queries over the paged KV cache, compiled by numba.

Arrays are float32, or bfloat16 as its bits in uint16. Keys and values may be FP8 codes in uint8 with scales
(`kernels/cache.py`); None means no scales. Everything is computed in float32 and rounded once. NaNs propagate, so that
broken rows are detected. Suffixes are those of `kernels/contract.py`.
"""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from pipeline.kernels.cpu.attention.key_products import KEYS, WIDTH, dot_products, in_pairs, product, query_rows
from pipeline.kernels.cpu.compile.numerics import as_in, bits, exp, larger, scale_at, soft_capped, wide
from pipeline.kernels.cpu.compile.processor import HAS_WIDE_VECTORS
from pipeline.kernels.cpu.compile.threads import kernel, parallel_for
from pipeline.kernels.cpu.tiles.tile_product import tile_product

UNBOUNDED = np.iinfo(np.int64).max // 2
"""The window of full attention."""
NO_SINKS = np.empty(0, np.float32)
_UNITS = 8 if HAS_WIDE_VECTORS else 4  # adjacent values (times 8) in a tile of one or two heads


class SoftmaxOptions(NamedTuple):
    """Arguments of both kernels, as in `contract.Attention`: window `UNBOUNDED` is full attention."""

    window: int
    scale: np.float32
    softcap: np.float32
    sinks_N: np.ndarray

    @classmethod
    def from_arguments(
        cls, scale: float, window: int | None, softcap: float, sinks_N: torch.Tensor | None
    ) -> "SoftmaxOptions":
        return cls(
            UNBOUNDED if window is None else window,
            np.float32(scale),
            np.float32(softcap),
            NO_SINKS if sinks_N is None else bits(sinks_N),
        )


def nothing_read(num_sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return read_S, place_S, part_PND and log_sum_PN of `paged_decode` for steps without shared prefixes."""
    nothing_S = np.zeros(num_sequences, np.int64)
    return nothing_S, nothing_S, np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)


@kernel()
def paged_decode(
    q_SND, k_CBKD, v_CBKD, k_scale_CKB, v_scale_CKB, table_SM, context_S, window, scale, softcap, sinks_N, parts,
    read_S, part_index_S, part_PND, log_sum_PN, out_SND, begin, end
):  # fmt: skip
    """Attend with one query per sequence over the paged cache; blocks are read in place.

    The first read_S[s] keys, whole blocks, were read earlier for a group of sequences (see `shared_prefix.py`):
    part_PND[place_S[s]] is their weighted sum of values, log_sum_PN the logarithm of the sum of their exponentials.

    Each sequence is one work item, or `parts` items of some KV heads each; the query heads of a KV head share each key
    and value. Blocks are read one by one, first all keys, then all values. The next block is prefetched meanwhile,
    since the processor predicts neither jumps between blocks nor those between keys.
    """
    num_sequences, num_heads, head_dim = q_SND.shape
    if end < 0:
        return parallel_for(num_sequences * parts)
    block_size, num_kv_heads = k_CBKD.shape[1], k_CBKD.shape[2]
    group, span = num_heads // num_kv_heads, num_kv_heads // parts
    q_words, k_words = in_pairs(q_SND, k_CBKD), in_pairs(k_CBKD, q_SND)
    depth = q_words.shape[2]
    q_flat, k_flat, v_flat = q_words.reshape(-1), k_words.reshape(-1), v_CBKD.reshape(-1)
    for item in range(begin, end):
        s, kv = item // parts, item % parts * span
        heads = kv, span, group
        first = max(read_S[s], context_S[s] - window)
        q = query_rows(q_flat, (s * num_heads + kv * group) * depth, span * group * depth)
        score = np.empty((span * group, context_S[s] + KEYS), np.float32)
        flat_score = score.reshape(-1)
        keys = first, context_S[s], block_size
        _multiply_keys(score, flat_score, q, k_flat, k_scale_CKB, table_SM[s], keys, heads, num_kv_heads, depth, scale)
        best, total = np.empty(span * group, np.float32), np.empty(span * group, np.float32)
        _exponentiate(score, first, context_S[s], softcap, sinks_N, kv * group, best, total)
        acc = np.zeros((span * group, head_dim), np.float32)
        flat_acc = acc.reshape(-1)
        _add_values(acc, flat_acc, score, flat_score, v_CBKD, v_flat, v_scale_CKB, table_SM[s], keys, heads)
        _write_rows(out_SND, s, kv * group, acc, best, total, read_S[s] > 0, part_PND, log_sum_PN, part_index_S[s])


@njit(inline="always")
def _multiply_keys(score, flat_score, q, k_flat, k_scale_CKB, table_M, keys, heads, num_kv_heads, depth, scale):
    """Compute the scores of one query. keys: the first one it sees, the end of its context, and the block size. Tiles
    also compute products with unseen keys; those are never read."""
    (first, context, block_size), (kv, span, group) = keys, heads
    k_row, score_row = num_kv_heads * depth, score.shape[1]
    num_blocks = (context + block_size - 1) // block_size
    for m in range(first // block_size, num_blocks):
        block, start, following = table_M[m], m * block_size, table_M[min(m + 1, num_blocks - 1)]
        low, high = max(first - start, 0), min(context - start, block_size)
        block_at = (block * block_size * num_kv_heads + kv) * depth
        ahead = (following - block) * block_size * k_row
        if block_size % KEYS == 0 and depth % WIDTH == 0:
            for n in range(low // KEYS * KEYS, high, KEYS):
                for h in range(span):
                    for g in range(h * group, (h + 1) * group):
                        dot_products(
                            flat_score, g * score_row + start + n, q, g * depth,
                            k_flat, block_at + h * depth + n * k_row, k_row, depth, scale,
                            ahead if g == h * group else 0
                        )  # fmt: skip
        else:
            for g in range(span * group):
                for n in range(low, high):
                    dot = np.float32(0.0)
                    for i in range(depth):
                        dot += product(q[g * depth + i], k_flat[block_at + g // group * depth + n * k_row + i])
                    score[g, start + n] = dot * scale
        for g in range(span * group):
            for n in range(low, high):
                score[g, start + n] *= scale_at(k_scale_CKB, block, n, kv + g // group)


@njit(inline="always")
def _exponentiate(score, first, context, softcap, sinks_N, first_head, best, total):
    """Turn scores into softmax weights: exponentials relative to the maximum (`best`), their sums in `total`. Both
    include the sinks."""
    for g in range(len(score)):
        # A view that begins at 0: the compiler then knows that indices are not negative, and vectorizes the loops.
        weight = score[g, first:context]
        largest, summed = np.float32(-np.inf), np.float32(0.0)
        if softcap > 0:
            for i in range(len(weight)):
                weight[i] = soft_capped(weight[i], softcap)
        for i in range(len(weight)):
            largest = larger(largest, weight[i])
        if len(sinks_N):
            sink = sinks_N[first_head + g]
            largest = larger(largest, sink)
            summed = exp(sink - largest)
        for i in range(len(weight)):
            weight[i] = exp(weight[i] - largest)
            summed += weight[i]
        best[g], total[g] = largest, summed


@njit(inline="always")
def _add_values(acc, flat_acc, weight, flat_weight, v_CBKD, v_flat, v_scale_CKB, table_M, keys, heads):
    """Add the weighted values of one query to `acc`. The other arguments are those of `_multiply_keys`."""
    (first, context, block_size), (kv, span, group) = keys, heads
    num_kv_heads, head_dim = v_CBKD.shape[2], v_CBKD.shape[3]
    v_row, weight_row = num_kv_heads * head_dim, weight.shape[1]
    tiled_dim, num_blocks = head_dim // (8 * _UNITS) * (8 * _UNITS), (context + block_size - 1) // block_size
    for m in range(first // block_size, num_blocks):
        block, start, following = table_M[m], m * block_size, table_M[min(m + 1, num_blocks - 1)]
        low, high = max(first - start, 0), min(context - start, block_size)
        ahead = (following - block) * block_size * v_row
        for h in range(span):
            at = (block * block_size + low) * v_row + (kv + h) * head_dim
            for g in range(h * group, (h + 1) * group):
                for n in range(low, high):
                    weight[g, start + n] *= scale_at(v_scale_CKB, block, n, kv + h)
            for i in range(0, tiled_dim, 8 * _UNITS):
                g = h * group
                while g + 2 <= (h + 1) * group:
                    tile_product(
                        flat_acc, g * head_dim + i, head_dim, flat_weight, g * weight_row + start + low, weight_row, 1,
                        v_flat, at + i, v_row, high - low, ahead, 2, _UNITS
                    )  # fmt: skip
                    g += 2
                if g < (h + 1) * group:
                    tile_product(
                        flat_acc, g * head_dim + i, head_dim, flat_weight, g * weight_row + start + low, weight_row, 1,
                        v_flat, at + i, v_row, high - low, ahead, 1, _UNITS
                    )  # fmt: skip
            if tiled_dim < head_dim:
                for g in range(h * group, (h + 1) * group):
                    for n in range(low, high):
                        for i in range(tiled_dim, head_dim):
                            acc[g, i] += weight[g, start + n] * wide(v_CBKD[block, n, kv + h, i])


@njit(inline="always")
def _write_rows(out_SND, s, first_head, acc, best, total, has_part, part_PND, log_sum_PN, part_index):
    """Write the query's results, merged with those of its shared prefix if it has one."""
    for g in range(len(acc)):
        if has_part:
            log_sum, part = log_sum_PN[part_index, first_head + g], part_PND[part_index, first_head + g]
            top = log_sum if log_sum > best[g] else best[g]  # the differences propagate a NaN in either
            own, before = exp(best[g] - top), exp(log_sum - top)
            whole = own * total[g] + before
            own, before = own / whole, before / whole
            for i in range(acc.shape[1]):
                out_SND[s, first_head + g, i] = as_in(out_SND, acc[g, i] * own + part[i] * before)
        else:
            for i in range(acc.shape[1]):
                out_SND[s, first_head + g, i] = as_in(out_SND, acc[g, i] / total[g])
