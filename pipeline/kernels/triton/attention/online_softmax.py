"""The inner loop of the attention kernels: rows of queries over tiles of keys and values found through a block table,
with an online softmax (Milakov and Gimelshein 2018; FlashAttention-2: Dao 2023).

A row is one query token of one query head; the rows of a tile share a KV head. Scores are exponents of two: the scale
includes log2(e). Suffixes in kernels: R rows, L keys of a tile, D head size.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# It does not understand functions made by `triton.jit`.

import triton
import triton.language as tl

from pipeline.kernels.triton.attention.fp8_cache import halves

LOG2_E = 1.4426950408889634
_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)


def score_factors(scale: float, softcap: float) -> tuple[float, float | None]:
    """Return `scale` and `softcap` of `attend` for those of `contract.Attention`."""
    return (2 * LOG2_E * scale / softcap, LOG2_E * softcap) if softcap else (LOG2_E * scale, None)


def stages_for(buffers: int) -> int:
    """Return the pipeline stages that keep this many tiles of keys and values in shared memory.

    A tile's block number is loaded before the tile, and Triton divides the stages among dependent loads.
    """
    return 2 * buffers + 1


@triton.jit
def attend(
    weighted_RD,
    best_R,
    sum_R,
    q_RD,
    position_R,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    context,
    begin,
    end,
    scale,
    window,
    softcap,
    KV_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    IS_FP8: tl.constexpr,
    CONVERTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the keys at positions `begin` to `end` (`begin` a multiple of KEYS) to the running softmax of each row.

    Without MASKED every row must see all of these keys. k_ptr and v_ptr point at the KV head in slot 0; the stride of
    slots is KV_STRIDE elements. With IS_FP8 they hold codes, and the scale pointers point at the KV head's scales in
    block 0. weighted_RD and sum_R are relative to 2^best_R; best_R is -inf until a row has seen a key. scale and
    softcap are those of `score_factors`.

    Codes are loaded in pairs of columns, as elements of 16 bits, and multiplied as even and odd columns: the
    instruction that transposes operands of a product does not support elements of 8 bits, which would be read from
    shared memory one by one. Products are in float16 (float32 if q is), to which two codes are converted at once.
    The keys' scales multiply scores, the values' scales weights, so that the products read exact codes. Rows of q are
    divided by powers of two, and best_R is the maximum of score + log2(the value's scale) - LIFT, so that q and the
    weights stay in float16's range.
    """
    NUM_KV_HEADS: tl.constexpr = KV_STRIDE // HEAD_DIM
    CODES: tl.constexpr = 2 if IS_FP8 else 1
    STRIDE: tl.constexpr = KV_STRIDE // CODES
    column = tl.arange(0, COLUMNS // CODES)
    offset = tl.arange(0, KEYS)
    if IS_FP8:
        DTYPE: tl.constexpr = tl.float32 if q_RD.dtype == tl.float32 else tl.float16
        FACTOR: tl.constexpr = 1.0 if CONVERTS else 256.0
        LIFT: tl.constexpr = 15 if CONVERTS else 7
        k_ptr, v_ptr = k_ptr.to(tl.pointer_type(tl.int16)), v_ptr.to(tl.pointer_type(tl.int16))
        wide_RD = q_RD.to(tl.float32)
        exponent_R = tl.max(tl.abs(wide_RD), axis=1).to(tl.int32, bitcast=True) & 0x7F800000
        unit_R = tl.maximum(exponent_R.to(tl.float32, bitcast=True), 2.0**-100)
        q_RD = (wide_RD * (2.0**14 / unit_R)[:, None]).to(DTYPE)
        unit_R = unit_R * (2.0**-14 * FACTOR) * scale
        q_even_RD, q_odd_RD = tl.split(q_RD.reshape(q_RD.shape[0], COLUMNS // 2, 2))
        even_RD, odd_RD = tl.split(weighted_RD.reshape(q_RD.shape[0], COLUMNS // 2, 2))
    # With few rows, threads keep their shares of a row's sum in registers and add them after the loop.
    LATE_SUM: tl.constexpr = q_RD.shape[0] <= 16
    if LATE_SUM:
        sum_RL = tl.zeros([q_RD.shape[0], KEYS], dtype=tl.float32)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = start + offset
        if BLOCK % KEYS == 0:
            block = tl.load(table_ptr + start // BLOCK).to(tl.int64)
            slot_at = block * BLOCK * STRIDE + (start % BLOCK + offset)[:, None] * STRIDE + column[None, :]
            scale_at = block * BLOCK * NUM_KV_HEADS + start % BLOCK + offset
        else:
            block = tl.load(table_ptr + key // BLOCK, mask=key < context, other=0).to(tl.int64)
            slot_at = (block * BLOCK + key % BLOCK)[:, None] * STRIDE + column[None, :]
            scale_at = block * BLOCK * NUM_KV_HEADS + key % BLOCK
        # Memory past the context may contain anything, also NaN, and 0 * NaN is NaN. No FP8 code is NaN.
        if MASKED and not (IS_FP8 and BLOCK % KEYS == 0):
            mask = (key < context)[:, None] & (column < HEAD_DIM // CODES)[None, :]
            k_LD = tl.load(k_ptr + slot_at, mask=mask, other=0)
            v_LD = tl.load(v_ptr + slot_at, mask=mask, other=0)
        elif COLUMNS != HEAD_DIM:
            mask = (column < HEAD_DIM // CODES)[None, :]
            k_LD = tl.load(k_ptr + slot_at, mask=mask, other=0)
            v_LD = tl.load(v_ptr + slot_at, mask=mask, other=0)
        else:
            k_LD = tl.load(k_ptr + slot_at)
            v_LD = tl.load(v_ptr + slot_at)
        if IS_FP8:
            if MASKED:
                k_scale_L = tl.load(k_scale_ptr + scale_at, mask=key < context, other=0.0)
                v_scale_L = tl.load(v_scale_ptr + scale_at, mask=key < context, other=0.0)
            else:
                k_scale_L = tl.load(k_scale_ptr + scale_at)
                v_scale_L = tl.load(v_scale_ptr + scale_at)
            k_even_LD, k_odd_LD = halves(k_LD, DTYPE, CONVERTS)
            v_even_LD, v_odd_LD = halves(v_LD, DTYPE, CONVERTS)
            score_RL = tl.dot(q_even_RD, tl.trans(k_even_LD), input_precision="ieee")
            score_RL = tl.dot(q_odd_RD, tl.trans(k_odd_LD), score_RL, input_precision="ieee")
            score_RL = score_RL * k_scale_L[None, :] * unit_R[:, None]
        else:
            score_RL = tl.dot(q_RD, tl.trans(k_LD), input_precision="ieee") * scale
        if softcap is not None:  # tanh(x) = 1 - 2 / (e^2x + 1)
            score_RL = softcap - 2 * softcap / (tl.exp2(score_RL) + 1)
        if MASKED:
            seen_RL = key[None, :] <= position_R[:, None]
            if WINDOWED:
                seen_RL = seen_RL & (key[None, :] > position_R[:, None] - window)
            score_RL = tl.where(seen_RL, score_RL, float("-inf"))
        if IS_FP8:
            v_scale_L = v_scale_L * FACTOR
            bits_L = tl.maximum(v_scale_L, 2.0**-100).to(tl.int32, bitcast=True)
            size_RL = score_RL + (bits_L.to(tl.float32) * 2.0**-23 - (127 + LIFT))[None, :]
            new_best_R = tl.maximum(best_R, tl.max(size_RL, axis=1))
        else:
            new_best_R = tl.maximum(best_R, tl.max(score_RL, axis=1))
        # A row that has seen no key keeps -inf. Its base is 0 instead, because -inf - -inf is NaN.
        base_R = tl.where(new_best_R == float("-inf"), 0.0, new_best_R)
        weight_RL = tl.exp2(score_RL - base_R[:, None])
        shrink_R = tl.exp2(best_R - base_R)
        if LATE_SUM:
            sum_R = sum_R * shrink_R
            sum_RL = sum_RL * shrink_R[:, None] + weight_RL
        else:
            sum_R = sum_R * shrink_R + tl.sum(weight_RL, axis=1)
        if IS_FP8:
            weight_RL = (weight_RL * v_scale_L[None, :]).to(DTYPE)
            even_RD = even_RD * shrink_R[:, None]
            even_RD = tl.dot(weight_RL, v_even_LD, even_RD, input_precision="ieee")
            odd_RD = odd_RD * shrink_R[:, None]
            odd_RD = tl.dot(weight_RL, v_odd_LD, odd_RD, input_precision="ieee")
        else:
            weighted_RD = weighted_RD * shrink_R[:, None]
            weighted_RD = tl.dot(weight_RL.to(v_LD.dtype), v_LD, weighted_RD, input_precision="ieee")
        best_R = new_best_R
    if LATE_SUM:
        sum_R += tl.sum(sum_RL, axis=1)
    if IS_FP8:
        weighted_RD = tl.interleave(even_RD, odd_RD)
    return weighted_RD, best_R, sum_R


@triton.jit
def add_sink(best_R, sum_R, sinks_ptr, head_R):
    """Add each row's sink to its complete sum."""
    return sum_R + tl.exp2(tl.load(sinks_ptr + head_R) * _LOG2_E - best_R)


@triton.jit
def merge(weighted_RD, best_R, sum_R, its_RD, its_best_R, its_sum_R):
    """Merge two running softmaxes of each row; a maximum of -inf means no keys."""
    new_best_R = tl.maximum(best_R, its_best_R)
    base_R = tl.where(new_best_R == float("-inf"), 0.0, new_best_R)
    shrink_R, its_shrink_R = tl.exp2(best_R - base_R), tl.exp2(its_best_R - base_R)
    sum_R = sum_R * shrink_R + its_sum_R * its_shrink_R
    weighted_RD = weighted_RD * shrink_R[:, None] + its_RD * its_shrink_R[:, None]
    return weighted_RD, new_best_R, sum_R
