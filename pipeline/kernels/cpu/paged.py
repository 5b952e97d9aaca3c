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
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pipeline.kernels.cpu.numerics import as_in, exp, scale_at, wide
from pipeline.kernels.cpu.threads import kernel, share_out
from pipeline.kernels.cpu.tile import tile_product

UNBOUNDED = np.iinfo(np.int64).max // 2
"""The window of full attention."""
ROWS = 64
"""Queries times heads of a KV head that share the reading of keys and values in `paged_prefill`, at most."""
NO_PART = np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)
"""part_TND and log_sum_TN of `paged_prefill` where its queries see no other keys."""
_VALUES = 64  # keys whose values are multiplied at a time
_AHEAD_ELEMENTS = 256  # of a row that is read ahead at most: measured, longer ones lose by it


@intrinsic
def _prefetch(typing_context, array, index):
    """Ask for the cache line of one element. The index is not checked."""

    def lower(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        int32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, int32, int32, int32])
        to_read, keep, data_cache = int32(0), int32(3), int32(1)
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        builder.call(prefetch, [address, to_read, keep, data_cache])
        return context.get_dummy_value()

    return types.void(array, index), lower


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

    Work is one item a sequence, or `parts` of it, each some KV heads: a block is then read through in the order it lies
    in memory, and the query heads of a KV head share each key and value. Short rows are asked for one block ahead,
    because the processor does not foresee jumps from block to block; long ones keep its own foresight busy enough.
    """
    num_sequences, num_heads, head_dim = q_SND.shape
    if end < 0:
        return share_out(num_sequences * parts)
    block_size, num_kv_heads = k_CBKD.shape[1], k_CBKD.shape[2]
    group, span = num_heads // num_kv_heads, num_kv_heads // parts
    row = span * head_dim
    ahead = row if row <= _AHEAD_ELEMENTS else 0
    k_flat, v_flat = k_CBKD.reshape(-1), v_CBKD.reshape(-1)
    for item in range(begin, end):
        s, kv = item // parts, item % parts * span
        context = context_S[s]
        first = max(read_S[s], context - window)
        first_block, num_blocks = first // block_size, (context + block_size - 1) // block_size
        q = np.empty((span * group, head_dim), np.float32)
        for g in range(span * group):
            for i in range(head_dim):
                q[g, i] = wide(q_SND[s, kv * group + g, i]) * scale
        score = np.empty((span * group, context), np.float32)
        for m in range(first_block, num_blocks):
            block, start, following = table_SM[s, m], m * block_size, table_SM[s, min(m + 1, num_blocks - 1)]
            for offset in range(max(first - start, 0), min(context - start, block_size)):
                next_row = ((following * block_size + offset) * num_kv_heads + kv) * head_dim
                for i in range(0, ahead, 16):
                    _prefetch(k_flat, next_row + i)
                for h in range(span):
                    for g in range(h * group, (h + 1) * group):
                        dot = np.float32(0.0)
                        for i in range(head_dim):
                            dot += q[g, i] * wide(k_CBKD[block, offset, kv + h, i])
                        score[g, start + offset] = dot * scale_at(k_scale_CBK, block, offset, kv + h)
        acc = np.zeros((span * group, head_dim), np.float32)
        best, total = np.empty(span * group, np.float32), np.empty(span * group, np.float32)
        for g in range(span * group):
            # A view that begins at 0: then indices are seen to be no negative ones, and the loops become vector code.
            weight = score[g, first:context]
            most, summed = np.float32(-np.inf), np.float32(0.0)
            for i in range(len(weight)):
                most = most if weight[i] <= most else weight[i]  # written so that a NaN replaces the maximum
            for i in range(len(weight)):
                weight[i] = exp(weight[i] - most)
                summed += weight[i]
            best[g], total[g] = most, summed
        for m in range(first_block, num_blocks):
            block, start, following = table_SM[s, m], m * block_size, table_SM[s, min(m + 1, num_blocks - 1)]
            for offset in range(max(first - start, 0), min(context - start, block_size)):
                next_row = ((following * block_size + offset) * num_kv_heads + kv) * head_dim
                for i in range(0, ahead, 16):
                    _prefetch(v_flat, next_row + i)
                for h in range(span):
                    for g in range(h * group, (h + 1) * group):
                        share = score[g, start + offset] * scale_at(v_scale_CBK, block, offset, kv + h)
                        for i in range(head_dim):
                            acc[g, i] += share * wide(v_CBKD[block, offset, kv + h, i])
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
    them multiplied by all rows; the softmax needs no sum across a vector; values serve all rows.

    Where the keys are only the first ones of what the queries see, log_sum_TN is not empty: it gets the logarithm of
    each query's and head's sum of exponentials, part_TND what the values came to, in float32, and out_TND nothing.
    """
    head_dim = q_TND.shape[2]
    block_size, num_kv_heads = k_CBKD.shape[1], k_CBKD.shape[2]
    if end < 0:
        return share_out(len(item_I3) * num_kv_heads)
    group, stride = q_TND.shape[1] // num_kv_heads, num_kv_heads * head_dim
    k_flat = k_CBKD.reshape(-1)
    for j in range(begin, end):
        item, h = j // num_kv_heads, j % num_kv_heads
        s, token, count = item_I3[item, 0], item_I3[item, 1], item_I3[item, 2]
        num_rows = count * group
        rows = (num_rows + 15) // 16 * 16
        first_block = max(0, position_T[token] - window + 1) // block_size
        first = first_block * block_size
        num_keys = position_T[token + count - 1] + 1 - first
        q_DR, position_R = np.zeros((head_dim, rows), np.float32), np.empty(rows, np.int64)
        for r in range(rows):
            query = token + min(r // group, count - 1)
            position_R[r] = position_T[query] - first
            if r < num_rows:
                for i in range(head_dim):
                    q_DR[i, r] = wide(q_TND[query, h * group + r % group, i]) * scale
        score_LR, q = np.zeros((num_keys, rows), np.float32), q_DR.reshape(-1)
        score = score_LR.reshape(-1)
        for start in range(0, num_keys, block_size):
            at = (table_SM[s, first_block + start // block_size] * block_size * num_kv_heads + h) * head_dim
            keys = min(block_size, num_keys - start)
            for c in range(0, rows, 16):
                if position_R[c + 15] >= start:
                    n = 0
                    while n + 4 <= keys:
                        place = (start + n) * rows + c
                        tile_product(score, place, rows, k_flat, at + n * stride, stride, 1, q, c, rows, head_dim, 4, 2)
                        n += 4
                    while n < keys:
                        place = (start + n) * rows + c
                        tile_product(score, place, rows, k_flat, at + n * stride, stride, 1, q, c, rows, head_dim, 1, 2)
                        n += 1
        best_R, total_R = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)
        for n in range(num_keys):
            some_R = score_LR[n]
            block, offset = table_SM[s, first_block + n // block_size], n % block_size
            key_scale = scale_at(k_scale_CBK, block, offset, h)
            for r in range(rows):
                some_R[r] *= key_scale
            if n > position_R[0] or n <= position_R[rows - 1] - window:
                for r in range(rows):
                    if n > position_R[r] or n <= position_R[r] - window:
                        some_R[r] = -np.inf
            for r in range(rows):
                best_R[r] = best_R[r] if some_R[r] <= best_R[r] else some_R[r]  # so that a NaN replaces the maximum
        for n in range(num_keys):
            some_R = score_LR[n]
            for r in range(rows):
                some_R[r] = exp(some_R[r] - best_R[r])
                total_R[r] += some_R[r]
        out_RD, value_LD = np.zeros((rows, head_dim), np.float32), np.empty((_VALUES, head_dim), np.float32)
        out, value = out_RD.reshape(-1), value_LD.reshape(-1)
        for start in range(0, num_keys, _VALUES):
            for n in range(start, min(start + _VALUES, num_keys)):
                block, offset = table_SM[s, first_block + n // block_size], n % block_size
                stored, copy = v_CBKD[block, offset, h], value_LD[n - start]
                value_scale = scale_at(v_scale_CBK, block, offset, h)
                for i in range(head_dim):
                    copy[i] = wide(stored[i]) * value_scale
            for r in range(0, num_rows, 4):
                depth = min(_VALUES, num_keys - start, position_R[r + 3] + 1 - start)
                i = 0
                while i + 16 <= head_dim and depth > 0:
                    place = r * head_dim + i
                    tile_product(
                        out, place, head_dim, score, start * rows + r, 1, rows, value, i, head_dim, depth, 4, 2
                    )
                    i += 16
                if i < head_dim:
                    for row in range(r, r + 4):
                        for n in range(depth):
                            for rest in range(i, head_dim):
                                out_RD[row, rest] += score_LR[start + n, row] * value_LD[n, rest]
        for r in range(num_rows):
            query, head, sum_D = token + r // group, h * group + r % group, out_RD[r]
            if len(log_sum_TN):
                part = part_TND[query, head]
                for i in range(head_dim):
                    part[i] = sum_D[i] / total_R[r]
                log_sum_TN[query, head] = best_R[r] + np.float32(math.log(total_R[r]))
            else:
                target = out_TND[query, head]
                for i in range(head_dim):
                    target[i] = as_in(target, sum_D[i] / total_R[r])
