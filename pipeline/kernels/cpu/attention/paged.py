"""Attention over the paged KV cache, compiled by numba: of single queries, and of several a sequence.

Arrays are float32, or bfloat16 as its bits in uint16: widening is a shift, because float32 has the same exponent. Keys
and values may be FP8 codes in uint8 beside scales (`kernels/cache.py`); None stands for no scales. Everything is
computed in float32 and rounded once. A NaN comes out as one: broken rows must be found. Suffixes are
those of `kernels/contract.py`.
"""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

import math

import numpy as np

from pipeline.kernels.cpu.attention.key_products import (
    KEYS,
    WIDTH,
    add_key_products,
    dot_products,
    in_pairs,
    product,
    query_lanes,
    query_rows,
)
from pipeline.kernels.cpu.compile.numerics import as_in, exp, larger, scale_at, wide
from pipeline.kernels.cpu.compile.prefetch import ask_for_row
from pipeline.kernels.cpu.compile.processor import HAS_WIDE_VECTORS
from pipeline.kernels.cpu.compile.threads import kernel, share_out
from pipeline.kernels.cpu.tiles.float_tile import tile_product, tile_product_ahead

UNBOUNDED = np.iinfo(np.int64).max // 2
"""The window of full attention."""
ROWS = 64
"""Queries times heads of a KV head that share the reading of keys and values in `paged_prefill`, at most."""
NO_PART = np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)
"""part_TND and log_sum_TN of `paged_prefill` where its queries see no other keys."""
_VALUES = 64  # keys whose values are multiplied at a time
# Tiles of a product whose sums stay in registers. Of prompts: keys and queries side by side (times 8); values side by
# side (times 8), of four queries. Of single queries: values side by side (times 8), of two heads or one.
_TILE_KEYS, _TILE_UNITS = (8, 4) if HAS_WIDE_VECTORS else (4, 2)
_VALUE_UNITS = 8 if HAS_WIDE_VECTORS else 2
_SINGLE_UNITS = 8 if HAS_WIDE_VECTORS else 4


def nothing_read(num_sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """read_S, place_S, part_PND and log_sum_PN of `paged_decode` where each sequence reads all of its keys itself."""
    nothing_S = np.zeros(num_sequences, np.int64)
    return nothing_S, nothing_S, *NO_PART


@kernel()
def paged_decode(
    q_SND,
    k_CBKD,
    v_CBKD,
    k_scale_CBK,
    v_scale_CBK,
    table_SM,
    context_S,
    window,
    scale,
    parts,
    read_S,
    place_S,
    part_PND,
    log_sum_PN,
    out_SND,
    begin,
    end,
):
    """One query a sequence over the paged cache; blocks are read where they lie.

    The first read_S[s] keys, which are whole blocks, have been read for it before (see `shared.py`):
    part_PND[place_S[s]] is what their values came to, log_sum_PN the logarithm of the sum of their exponentials.

    Work is one item a sequence, or `parts` of it, each some KV heads; the query heads of a KV head share each key and
    value. Blocks are gone through one by one, in each the keys (then the values) of one head after the other, which are
    multiplied side by side: those of the next block are asked for on the way, since the processor foresees neither
    jumps from block to block nor those from key to key. Of keys that fill a tile beside the ones that are seen, the
    products are never read.
    """
    num_sequences, num_heads, head_dim = q_SND.shape
    if end < 0:
        return share_out(num_sequences * parts)
    block_size, num_kv_heads = k_CBKD.shape[1], k_CBKD.shape[2]
    group, span = num_heads // num_kv_heads, num_kv_heads // parts
    q_words, k_words = in_pairs(q_SND, k_CBKD), in_pairs(k_CBKD, q_SND)
    depth = q_words.shape[2]
    q_flat, k_flat, v_flat = q_words.reshape(-1), k_words.reshape(-1), v_CBKD.reshape(-1)
    in_tiles = block_size % KEYS == 0 and depth % WIDTH == 0
    in_tiles_dims = head_dim // (8 * _SINGLE_UNITS) * (8 * _SINGLE_UNITS)
    for item in range(begin, end):
        s, kv = item // parts, item % parts * span
        context = context_S[s]
        first = max(read_S[s], context - window)
        first_block, num_blocks = first // block_size, (context + block_size - 1) // block_size
        q = query_rows(q_flat, (s * num_heads + kv * group) * depth, span * group * depth)
        score = np.empty((span * group, context + KEYS), np.float32)
        scores, score_row = score.reshape(-1), context + KEYS
        for m in range(first_block, num_blocks):
            block, start, following = table_SM[s, m], m * block_size, table_SM[s, min(m + 1, num_blocks - 1)]
            low, high = max(first - start, 0), min(context - start, block_size)
            ahead = (following - block) * block_size * num_kv_heads * depth
            if in_tiles:
                for n in range(low // KEYS * KEYS, high, KEYS):
                    for h in range(span):
                        at = (block * block_size * num_kv_heads + kv + h) * depth
                        for g in range(h * group, (h + 1) * group):
                            dot_products(
                                scores, g * score_row + start + n, q, g * depth,
                                k_flat, at + n * num_kv_heads * depth, num_kv_heads * depth, depth, scale,
                                ahead if g == h * group else 0
                            )  # fmt: skip
            else:
                for h in range(span):
                    at = (block * block_size * num_kv_heads + kv + h) * depth
                    for g in range(h * group, (h + 1) * group):
                        for n in range(low, high):
                            dot = np.float32(0.0)
                            for i in range(depth):
                                dot += product(q[g * depth + i], k_flat[at + n * num_kv_heads * depth + i])
                            score[g, start + n] = dot * scale
            for g in range(span * group):
                for n in range(low, high):
                    score[g, start + n] *= scale_at(k_scale_CBK, block, n, kv + g // group)
        acc = np.zeros((span * group, head_dim), np.float32)
        best, total = np.empty(span * group, np.float32), np.empty(span * group, np.float32)
        for g in range(span * group):
            # A view that begins at 0: then indices are seen to be no negative ones, and the loops become vector code.
            weight = score[g, first:context]
            most, summed = np.float32(-np.inf), np.float32(0.0)
            for i in range(len(weight)):
                most = larger(most, weight[i])
            for i in range(len(weight)):
                weight[i] = exp(weight[i] - most)
                summed += weight[i]
            best[g], total[g] = most, summed
        acc_flat = acc.reshape(-1)
        for m in range(first_block, num_blocks):
            block, start, following = table_SM[s, m], m * block_size, table_SM[s, min(m + 1, num_blocks - 1)]
            low, high = max(first - start, 0), min(context - start, block_size)
            for h in range(span):
                at = ((block * block_size + low) * num_kv_heads + kv + h) * head_dim
                ahead = (following - block) * block_size * num_kv_heads * head_dim
                for g in range(h * group, (h + 1) * group):
                    for n in range(low, high):
                        score[g, start + n] *= scale_at(v_scale_CBK, block, n, kv + h)
                for i in range(0, in_tiles_dims, 8 * _SINGLE_UNITS):
                    g = h * group
                    while g + 2 <= (h + 1) * group:
                        tile_product_ahead(
                            acc_flat, g * head_dim + i, head_dim, scores, g * score_row + start + low, score_row, 1,
                            v_flat, at + i, num_kv_heads * head_dim, high - low, 2, _SINGLE_UNITS, ahead
                        )  # fmt: skip
                        g += 2
                    if g < (h + 1) * group:
                        tile_product_ahead(
                            acc_flat, g * head_dim + i, head_dim, scores, g * score_row + start + low, score_row, 1,
                            v_flat, at + i, num_kv_heads * head_dim, high - low, 1, _SINGLE_UNITS, ahead
                        )  # fmt: skip
                if in_tiles_dims < head_dim:
                    for g in range(h * group, (h + 1) * group):
                        for n in range(low, high):
                            for i in range(in_tiles_dims, head_dim):
                                acc[g, i] += score[g, start + n] * wide(v_CBKD[block, n, kv + h, i])
        for g in range(span * group):
            if read_S[s] > 0:
                log_sum, part = log_sum_PN[place_S[s], kv * group + g], part_PND[place_S[s], kv * group + g]
                top = log_sum if log_sum > best[g] else best[g]  # a NaN in either comes through the differences
                own, before = exp(best[g] - top), exp(log_sum - top)
                whole = own * total[g] + before
                own, before = own / whole, before / whole
                for i in range(head_dim):
                    out_SND[s, kv * group + g, i] = as_in(out_SND, acc[g, i] * own + part[i] * before)
            else:
                for i in range(head_dim):
                    out_SND[s, kv * group + g, i] = as_in(out_SND, acc[g, i] / total[g])


@kernel()
def paged_prefill(
    q_TND,
    k_CBKD,
    v_CBKD,
    k_scale_CBK,
    v_scale_CBK,
    table_SM,
    item_I3,
    position_T,
    window,
    scale,
    part_TND,
    log_sum_TN,
    out_TND,
    begin,
    end,
):
    """Several queries a sequence over the paged cache; a query at position p sees the keys p - window + 1 .. p.

    An item (sequence, first token, number of tokens) is some neighbouring queries of one sequence, for each KV head in
    turn. Their rows R (queries times heads of a KV head) lie side by side: keys are read where they lie, each block of
    them multiplied by all rows, while the next one is asked for; the softmax needs no sum across a vector; values serve
    all rows.

    Where the keys are only the first ones of what the queries see, log_sum_TN is not empty: it gets the logarithm of
    each query's and head's sum of exponentials, part_TND what the values came to, in float32, and out_TND nothing.
    """
    num_heads, head_dim = q_TND.shape[1:]
    block_size, num_kv_heads = k_CBKD.shape[1], k_CBKD.shape[2]
    if end < 0:
        return share_out(len(item_I3) * num_kv_heads)
    group = num_heads // num_kv_heads
    q_words, k_words = in_pairs(q_TND, k_CBKD), in_pairs(k_CBKD, q_TND)
    depth, q_flat, k_flat, v_flat = q_words.shape[2], q_words.reshape(-1), k_words.reshape(-1), v_CBKD.reshape(-1)
    for j in range(begin, end):
        item, h = j // num_kv_heads, j % num_kv_heads
        s, token, count = item_I3[item, 0], item_I3[item, 1], item_I3[item, 2]
        num_rows = count * group
        rows = (num_rows + 15) // 16 * 16
        first_block = max(0, position_T[token] - window + 1) // block_size
        first = first_block * block_size
        num_keys = position_T[token + count - 1] + 1 - first
        start_R, position_R = np.empty(rows, np.int64), np.empty(rows, np.int64)
        for r in range(rows):  # the last ones, which fill up, are as the last query
            query = token + min(r // group, count - 1)
            start_R[r] = (query * num_heads + h * group + r % group) * depth
            position_R[r] = position_T[query] - first
        q, score_LR = query_lanes(q_flat, start_R, depth), np.zeros((num_keys, rows), np.float32)
        score, k_row = score_LR.reshape(-1), num_kv_heads * depth
        for start in range(0, num_keys, block_size):
            at = (table_SM[s, first_block + start // block_size] * block_size * num_kv_heads + h) * depth
            keys, c = min(block_size, num_keys - start), 0
            if start + keys < num_keys:
                ahead = (table_SM[s, first_block + start // block_size + 1] * block_size * num_kv_heads + h) * depth
                for n in range(min(block_size, num_keys - start - keys)):
                    ask_for_row(k_flat, ahead + n * k_row, depth)
            while c < rows:
                n, is_whole = 0, c + 8 * _TILE_UNITS <= rows
                last = c + (8 * _TILE_UNITS if is_whole else 16)
                if position_R[last - 1] >= start:
                    while n + _TILE_KEYS <= keys:
                        place, key_at = (start + n) * rows + c, at + n * k_row
                        if is_whole:
                            add_key_products(
                                score, place, rows, k_flat, key_at, k_row, q, c, rows, depth, _TILE_KEYS, _TILE_UNITS
                            )
                        else:
                            add_key_products(
                                score, place, rows, k_flat, key_at, k_row, q, c, rows, depth, _TILE_KEYS, 2
                            )
                        n += _TILE_KEYS
                    while n < keys:
                        for r in range(c, last, 16):
                            place, key_at = (start + n) * rows + r, at + n * k_row
                            add_key_products(score, place, rows, k_flat, key_at, k_row, q, r, rows, depth, 1, 2)
                        n += 1
                c = last
        best_R, total_R = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)
        for n in range(num_keys):
            some_R = score_LR[n]
            block, offset = table_SM[s, first_block + n // block_size], n % block_size
            factor = scale_at(k_scale_CBK, block, offset, h) * scale
            some_see_it_not = n > position_R[0] or n <= position_R[rows - 1] - window
            for r in range(rows):
                value = some_R[r] * factor
                if some_see_it_not and (n > position_R[r] or n <= position_R[r] - window):
                    value = -np.float32(np.inf)
                some_R[r] = value
                best_R[r] = larger(best_R[r], value)
        for n in range(num_keys):
            some_R = score_LR[n]
            for r in range(rows):
                some_R[r] = exp(some_R[r] - best_R[r])
                total_R[r] += some_R[r]
        out_RD, value_LD = np.zeros((rows, head_dim), np.float32), np.empty((_VALUES, head_dim), np.float32)
        out, value = out_RD.reshape(-1), value_LD.reshape(-1)
        in_tiles_dims = head_dim // (8 * _VALUE_UNITS) * (8 * _VALUE_UNITS)
        for start in range(0, num_keys, _VALUES):
            n, end_n = start, min(start + _VALUES, num_keys)
            while n < end_n:  # block by block: a division takes as long as copying half a value
                m = n // block_size
                block, behind = table_SM[s, first_block + m], min((m + 1) * block_size, end_n)
                if (m + 1) * block_size < num_keys:
                    ahead = (table_SM[s, first_block + m + 1] * block_size * num_kv_heads + h) * head_dim
                    for offset in range(min(block_size, num_keys - (m + 1) * block_size)):
                        ask_for_row(v_flat, ahead + offset * num_kv_heads * head_dim, head_dim)
                for offset in range(n - m * block_size, behind - m * block_size):
                    stored, copy = v_CBKD[block, offset, h], value_LD[m * block_size + offset - start]
                    value_scale = scale_at(v_scale_CBK, block, offset, h)
                    for i in range(head_dim):
                        copy[i] = wide(stored[i]) * value_scale
                n = behind
            for r in range(0, num_rows, 4):
                num_seen = min(_VALUES, num_keys - start, position_R[r + 3] + 1 - start)
                if num_seen > 0:
                    for i in range(0, in_tiles_dims, 8 * _VALUE_UNITS):
                        tile_product(
                            out, r * head_dim + i, head_dim, score, start * rows + r, 1, rows,
                            value, i, head_dim, num_seen, 4, _VALUE_UNITS
                        )  # fmt: skip
                    for row in range(r, r + 4):
                        for n in range(num_seen):
                            for rest in range(in_tiles_dims, head_dim):
                                out_RD[row, rest] += score_LR[start + n, row] * value_LD[n, rest]
        for r in range(num_rows):
            query, head, sum_D = token + r // group, h * group + r % group, out_RD[r]
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
