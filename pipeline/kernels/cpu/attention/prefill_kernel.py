"""Attention of several queries per sequence over the paged KV cache, compiled by numba.

Its arrays are those of `decode_kernel.py`.
"""

# pyright: reportCallIssue=false
# It does not understand functions made by `intrinsic`.

import math

import numpy as np
from numba import njit

from pipeline.kernels.cpu.attention.key_products import in_pairs, query_lanes
from pipeline.kernels.cpu.compile.numerics import as_in, exp, larger, scale_at, soft_capped, wide
from pipeline.kernels.cpu.compile.prefetch import prefetch_row
from pipeline.kernels.cpu.compile.processor import HAS_WIDE_VECTORS
from pipeline.kernels.cpu.compile.threads import kernel, parallel_for
from pipeline.kernels.cpu.tiles.tile_product import tile_product

ROWS = 64
"""Maximum number of rows (queries times heads of a KV head) that share the reading of keys and values."""
NO_PART = np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)
"""part_TND and log_sum_TN of `paged_prefill` if the keys are all that the queries see."""
_VALUES = 64  # keys whose values are multiplied at a time
# Tiles whose sums stay in registers: keys by adjacent queries (times 8); adjacent values (times 8) for four queries.
_TILE_KEYS, _TILE_UNITS = (8, 4) if HAS_WIDE_VECTORS else (4, 2)
_VALUE_UNITS = 8 if HAS_WIDE_VECTORS else 2


@kernel()
def paged_prefill(
    q_TND, k_CBKD, v_CBKD, k_scale_CKB, v_scale_CKB, table_SM, item_I3, position_T, window, scale, softcap, sinks_N,
    part_TND, log_sum_TN, out_TND, begin, end
):  # fmt: skip
    """Attend with several queries per sequence. A query at position p sees the keys p - window + 1 .. p.

    An item (sequence, first token, number of tokens) is a run of queries of one sequence, computed for each KV head
    in turn. Its rows R (queries times heads of a KV head) are adjacent. Keys are read in place: each block is
    multiplied with all rows while the next one is prefetched. The softmax needs no sum across a vector. All rows share
    the values.

    If the keys are only a prefix of what the queries see, log_sum_TN is not empty: it receives the logarithm of the sum
    of exponentials of each query and head, part_TND the weighted sum of values in float32. out_TND is not written.
    """
    num_heads, head_dim = q_TND.shape[1:]
    block_size, num_kv_heads = k_CBKD.shape[1], k_CBKD.shape[2]
    if end < 0:
        return parallel_for(len(item_I3) * num_kv_heads)
    group = num_heads // num_kv_heads
    q_words, k_words = in_pairs(q_TND, k_CBKD), in_pairs(k_CBKD, q_TND)
    depth, q_flat, k_flat, v_flat = q_words.shape[2], q_words.reshape(-1), k_words.reshape(-1), v_CBKD.reshape(-1)
    for j in range(begin, end):
        item, h = j // num_kv_heads, j % num_kv_heads
        s, token, count = item_I3[item, 0], item_I3[item, 1], item_I3[item, 2]
        num_rows = count * group
        rows = (num_rows + 15) // 16 * 16
        first_block = max(0, position_T[token] - window + 1) // block_size
        table_M, first = table_SM[s, first_block:], first_block * block_size
        num_keys = position_T[token + count - 1] + 1 - first
        start_R, position_R = np.empty(rows, np.int64), np.empty(rows, np.int64)
        for r in range(rows):  # padding rows repeat the last query
            query = token + min(r // group, count - 1)
            start_R[r] = (query * num_heads + h * group + r % group) * depth
            position_R[r] = position_T[query] - first
        q, score_LR = query_lanes(q_flat, start_R, depth), np.zeros((num_keys, rows), np.float32)
        score = score_LR.reshape(-1)
        _multiply_keys(score, q, k_flat, table_M, position_R, num_keys, h, k_CBKD.shape, depth)
        best_R, total_R = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)
        options = window, scale, softcap
        _exponentiate(score_LR, best_R, total_R, position_R, options, k_scale_CKB, table_M, block_size, h)
        out_RD, value_LD = np.zeros((rows, head_dim), np.float32), np.empty((_VALUES, head_dim), np.float32)
        out, value = out_RD.reshape(-1), value_LD.reshape(-1)
        for start in range(0, num_keys, _VALUES):
            _copy_values(value_LD, v_CBKD, v_flat, v_scale_CKB, table_M, start, num_keys, h)
            _add_values(out_RD, out, score_LR, score, value_LD, value, position_R, start, num_rows)
        for r in range(num_rows):
            query, head, sum_D = token + r // group, h * group + r % group, out_RD[r]
            if len(sinks_N):  # `exp` is bounded: a sink far above all scores leaves weights of about 0
                total_R[r] += exp(sinks_N[head] - best_R[r])
            inverse = np.float32(1.0) / total_R[r]
            if len(log_sum_TN):
                part = part_TND[query, head]
                for i in range(head_dim):
                    part[i] = sum_D[i] * inverse
                log_sum_TN[query, head] = best_R[r] + np.float32(math.log(total_R[r]))
            else:
                target = out_TND[query, head]
                for i in range(head_dim):
                    target[i] = as_in(target, sum_D[i] * inverse)


@njit(inline="always")
def _multiply_keys(score, q, k_flat, table_M, position_R, num_keys, h, shape, depth):
    """Set score (keys, rows), flat, to the products of all rows with the keys of each block that any of them sees."""
    block_size, num_kv_heads, rows = shape[1], shape[2], len(position_R)
    k_row = num_kv_heads * depth
    for start in range(0, num_keys, block_size):
        at = (table_M[start // block_size] * block_size * num_kv_heads + h) * depth
        keys, c = min(block_size, num_keys - start), 0
        if start + keys < num_keys:
            ahead = (table_M[start // block_size + 1] * block_size * num_kv_heads + h) * depth
            for n in range(min(block_size, num_keys - start - keys)):
                prefetch_row(k_flat, ahead + n * k_row, depth)
        while c < rows:
            n, is_whole = 0, c + 8 * _TILE_UNITS <= rows
            last = c + (8 * _TILE_UNITS if is_whole else 16)
            if position_R[last - 1] >= start:
                while n + _TILE_KEYS <= keys:
                    score_at, key_at = (start + n) * rows + c, at + n * k_row
                    if is_whole:
                        tile_product(
                            score, score_at, rows, k_flat, key_at, k_row, 1, q, c, rows, depth, None,
                            _TILE_KEYS, _TILE_UNITS
                        )  # fmt: skip
                    else:
                        tile_product(
                            score, score_at, rows, k_flat, key_at, k_row, 1, q, c, rows, depth, None, _TILE_KEYS, 2
                        )
                    n += _TILE_KEYS
                while n < keys:
                    for r in range(c, last, 16):
                        score_at, key_at = (start + n) * rows + r, at + n * k_row
                        tile_product(score, score_at, rows, k_flat, key_at, k_row, 1, q, r, rows, depth, None, 1, 2)
                    n += 1
            c = last


@njit(inline="always")
def _exponentiate(score_LR, best_R, total_R, position_R, options, k_scale_CKB, table_M, block_size, h):
    """Turn scores into softmax weights: exponentials relative to the row's maximum, 0 for keys a row does not see."""
    rows, (window, scale, softcap) = len(best_R), options
    for n in range(len(score_LR)):
        some_R = score_LR[n]
        factor = scale_at(k_scale_CKB, table_M[n // block_size], n % block_size, h) * scale
        has_unseen = n > position_R[0] or n <= position_R[rows - 1] - window
        if softcap > 0:
            for r in range(rows):
                some_R[r] = soft_capped(some_R[r] * factor, softcap)
            factor = np.float32(1.0)
        for r in range(rows):
            value = some_R[r] * factor
            if has_unseen and (n > position_R[r] or n <= position_R[r] - window):
                value = -np.float32(np.inf)
            some_R[r] = value
            best_R[r] = larger(best_R[r], value)
    for n in range(len(score_LR)):
        some_R = score_LR[n]
        for r in range(rows):
            some_R[r] = exp(some_R[r] - best_R[r])
            total_R[r] += some_R[r]


@njit(inline="always")
def _copy_values(value_LD, v_CBKD, v_flat, v_scale_CKB, table_M, start, num_keys, h):
    """Copy the values of _VALUES keys in float32, block by block, because a division per key would cost too much."""
    _, block_size, num_kv_heads, head_dim = v_CBKD.shape
    n, end_n = start, min(start + _VALUES, num_keys)
    while n < end_n:
        m = n // block_size
        block, after = table_M[m], min((m + 1) * block_size, end_n)
        if (m + 1) * block_size < num_keys:
            ahead = (table_M[m + 1] * block_size * num_kv_heads + h) * head_dim
            for offset in range(min(block_size, num_keys - (m + 1) * block_size)):
                prefetch_row(v_flat, ahead + offset * num_kv_heads * head_dim, head_dim)
        for offset in range(n - m * block_size, after - m * block_size):
            stored, copy = v_CBKD[block, offset, h], value_LD[m * block_size + offset - start]
            value_scale = scale_at(v_scale_CKB, block, offset, h)
            for i in range(head_dim):
                copy[i] = wide(stored[i]) * value_scale
        n = after


@njit(inline="always")
def _add_values(out_RD, out, weight_LR, weight, value_LD, value, position_R, start, num_rows):
    """Add the weighted values of the keys from `start` on to out_RD, as far as each row sees them."""
    (num_keys, rows), head_dim = weight_LR.shape, out_RD.shape[1]
    tiled_dim = head_dim // (8 * _VALUE_UNITS) * (8 * _VALUE_UNITS)
    for r in range(0, num_rows, 4):
        num_seen = min(_VALUES, num_keys - start, position_R[r + 3] + 1 - start)
        if num_seen > 0:
            for i in range(0, tiled_dim, 8 * _VALUE_UNITS):
                tile_product(
                    out, r * head_dim + i, head_dim, weight, start * rows + r, 1, rows, value, i, head_dim,
                    num_seen, None, 4, _VALUE_UNITS
                )  # fmt: skip
            for row in range(r, r + 4):
                for n in range(num_seen):
                    for rest in range(tiled_dim, head_dim):
                        out_RD[row, rest] += weight_LR[start + n, row] * value_LD[n, rest]
