"""The loops that numba compiles: elementwise work of a layer in one pass each, and attention of single queries.

All of them stand in this one file (those of linears in `compiled_linear.py`) because numba's cache on disk looks only
at the file a kernel stands in: a shared function elsewhere could change under kernels that are not compiled again.

Arrays are float32, or bfloat16 as its bits in uint16: widening is a shift, because float32 has the same exponent. Keys
and values may be FP8 codes in uint8 beside scales (`kernels/cache.py`); None stands for no scales. Everything is
computed in float32 and rounded once. A NaN comes out as one: broken rows must be found. Suffixes are those of
`kernels/contract.py`.
"""

# pyright: reportCallIssue=false
# It does not see what `intrinsic` makes of a function.

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import config, get_num_threads, njit, prange, set_num_threads, types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic, overload

from pipeline.kernels.cache import FP8, FP8_MAX, SMALLEST_SCALE, LayerCache

PARALLEL_ELEMENTS = 1 << 15
"""Elementwise work below this stays on one thread: waking another one would take longer than it saves."""

_VALUES = 64  # keys whose values are multiplied at a time
_AHEAD_ELEMENTS = 256  # of a row that is read ahead at most: measured, longer ones lose by it

# Sums may be reordered, as in any vectorised sum; NaN and infinity keep their meaning.
# Of numba's parallel transforms only `prange` is wanted: the others split array fills into loops of their own.
options: dict[str, Any] = {
    "parallel": {"prange": True}
    | dict.fromkeys(("numpy", "comprehension", "reduction", "setitem", "stencil", "fusion", "inplace_binop"), False),
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    "error_model": "numpy",
    "cache": True,
}
_as_written: dict[str, Any] = options | {"fastmath": False}


# -- bits


@intrinsic
def _float_of_bits(typing_context, bits):
    def lower(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), lower


@intrinsic
def _bits_of_float(typing_context, value):
    def lower(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), lower


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


def _wide(value):
    raise NotImplementedError("only inside compiled code")


@overload(_wide, inline="always")
def _overload_wide(value):
    if value == types.uint16:  # the bits of a bfloat16
        return lambda value: _float_of_bits(np.uint32(value) << np.uint32(16))
    if value == types.uint8:  # an FP8 code
        return lambda value: _wide_code(value)
    return lambda value: value


@njit(forceinline=True, fastmath={"contract"})
def _wide_code(code):
    """Sign, exponent and mantissa in float32's places are too small by 2^120, those of subnormal codes as well.

    Its own `fastmath`, as in `_exp`: multiplied later, sums of so small products would be lost.
    """
    bits = np.uint32(code)
    shifted = (bits & np.uint32(0x7F)) << np.uint32(20) | (bits & np.uint32(0x80)) << np.uint32(24)
    return _float_of_bits(np.uint32(shifted)) * _CODE_FACTOR


@njit(forceinline=True, fastmath={"contract"})
def _code_of(value):
    """The FP8 code of a number of at most 464 in size, rounded to the nearest, ties to even; as torch does it.

    Adding 2^14 leaves a subnormal code as the lowest bits of the sum. Its own `fastmath`, or the sum would be undone.
    """
    bits = _bits_of_float(value)
    sign, size = (bits >> np.uint32(24)) & np.uint32(0x80), bits & np.uint32(0x7FFFFFFF)
    subnormal = _bits_of_float(_float_of_bits(np.uint32(size)) + _CODE_ROUNDER) - _CODE_ROUNDER_BITS
    odd = (size >> np.uint32(20)) & np.uint32(1)
    normal = ((size + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32(120 << 3)
    return np.uint8(sign | (subnormal if size < _FIRST_NORMAL_BITS else normal))


def _scale_at(scale_CBK, block, offset, head):
    raise NotImplementedError("only inside compiled code")


@overload(_scale_at, inline="always")
def _overload_scale_at(scale_CBK, block, offset, head):
    """1 where there are no scales; what is multiplied by it is then left as it is."""
    if isinstance(scale_CBK, types.NoneType):
        return lambda scale_CBK, block, offset, head: np.float32(1.0)
    return lambda scale_CBK, block, offset, head: scale_CBK[block, offset, head]


def _as_in(array, value):
    raise NotImplementedError("only inside compiled code")


@overload(_as_in, inline="always")
def _overload_as_in(array, value):
    """float32 `value` in the type of `array`, rounded to the nearest, ties to even."""
    if array.dtype == types.uint16:
        return lambda array, value: _bfloat16_bits(value)
    return lambda array, value: value


@njit(forceinline=True)
def _bfloat16_bits(value):
    bits = _bits_of_float(value)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return rounded if value == value else np.uint16(0x7FC0)


_CODE_FACTOR = np.float32(2.0**120)
_CODE_ROUNDER, _CODE_ROUNDER_BITS = np.float32(2.0**14), np.uint32((127 + 14) << 23)
_FIRST_NORMAL_BITS, _INFINITY_BITS = np.uint32((127 - 6) << 23), np.uint32(0xFF << 23)
_FP8_SHARE, _SMALLEST_SCALE = np.float32(1.0 / FP8_MAX), np.float32(SMALLEST_SCALE)

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUNDER = np.float32(12582912.0)  # 1.5 * 2^23: added, it leaves the nearest integer in the lowest bits
_ROUNDER_BITS = np.uint32(0x4B400000)
_EXP = tuple(np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                                     1.6666665459e-1, 5.0000001201e-1))  # fmt: skip
_LOWEST, _HIGHEST = np.float32(-87.33), np.float32(88.0)


@njit(forceinline=True, error_model="numpy", fastmath={"contract"})
def _exp(x):
    """e^x within 2 units in the last place, in plain arithmetic so that loops over it become vector code.

    Arguments are clamped to what float32 holds as normal numbers. The polynomial is that of Cephes' expf. Its own
    `fastmath`, or it would inherit the caller's: where sums may be reordered, the rounder would cancel.
    """
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    shifted = x * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = _EXP[0]
    p = p * r + _EXP[1]
    p = p * r + _EXP[2]
    p = p * r + _EXP[3]
    p = p * r + _EXP[4]
    p = p * r + _EXP[5]
    power = (_bits_of_float(shifted) - _ROUNDER_BITS + np.uint32(127)) << np.uint32(23)
    return (p * r * r + r + np.float32(1.0)) * _float_of_bits(np.uint32(power))


_VECTOR = 8  # float32 values of a vector; processors with wider or narrower ones get them joined or split


@intrinsic(prefer_literal=True)
def tile_product(typing_context, out, out_at, out_row, a, a_at, a_row, a_step, b, b_at, b_row, depth, rows, vectors):
    """A small matrix product whose sums stay in registers: for r < rows and n < 8 * vectors (both literals)

        out[out_at + r * out_row + n] += sum over d < depth of
            a[a_at + r * a_row + d * a_step] * b[b_at + d * b_row + n]

    Arrays are one-dimensional; out is float32, a and b may be bfloat16, a also FP8 codes. Indices are not checked.
    Written in LLVM's own terms because its loop vectorizer keeps no two-dimensional tile of sums in registers; with
    rows * vectors = 8 and a depth of 64 or more it runs at the rate of the processor's multipliers.
    """
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(vectors, types.IntegerLiteral):
        return None
    num_rows, num_vectors = rows.literal_value, vectors.literal_value

    def lower(context, builder, signature, arguments):
        kinds = {"out": signature.args[0], "a": signature.args[3], "b": signature.args[7]}
        out, out_at, out_row, a, a_at, a_row, a_step, b, b_at, b_row, depth = arguments[:11]
        pointer = {
            name: builder.gep(context.make_array(kinds[name])(context, builder, value).data, [at])
            for name, value, at in (("out", out, out_at), ("a", a, a_at), ("b", b, b_at))
        }
        int64, float32, int32 = ir.IntType(64), ir.FloatType(), ir.IntType(32)
        vector, words = ir.VectorType(float32, _VECTOR), ir.VectorType(int32, _VECTOR)
        flags = ("contract", "reassoc", "nsz", "arcp")

        def load(place, dtype):
            """One vector, widened."""
            halves = dtype == types.uint16
            kind = ir.VectorType(ir.IntType(16), _VECTOR) if halves else vector
            loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
            loaded.align = 2 if halves else 4
            if not halves:
                return loaded
            shift = ir.Constant(words, [16] * _VECTOR)
            return builder.bitcast(builder.shl(builder.zext(loaded, words), shift), vector)

        def load_everywhere(place, dtype):
            """One value in all places of a vector."""
            value = builder.load(place)
            if dtype == types.uint16:
                value = builder.bitcast(builder.shl(builder.zext(value, int32), int32(16)), float32)
            if dtype == types.uint8:  # see `_wide_code`
                code = builder.zext(value, int32)
                size = builder.shl(builder.and_(code, int32(0x7F)), int32(20))
                sign = builder.shl(builder.and_(code, int32(0x80)), int32(24))
                value = builder.fmul(builder.bitcast(builder.or_(size, sign), float32), float32(2.0**120))
            single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, int32(0))
            return builder.shuffle_vector(single, single, ir.Constant(words, [0] * _VECTOR))

        def store(value, place):
            builder.store(value, builder.bitcast(place, vector.as_pointer())).align = 4

        place_RV, sum_RV = [], []
        for r in range(num_rows):
            row = builder.gep(pointer["out"], [builder.mul(int64(r), out_row)])
            place_RV.append([builder.gep(row, [int64(v * _VECTOR)]) for v in range(num_vectors)])
            sum_RV.append([cgutils.alloca_once(builder, vector) for _ in range(num_vectors)])  # becomes a register
            for place, held in zip(place_RV[-1], sum_RV[-1]):
                builder.store(load(place, types.float32), held)
        a_R = [builder.gep(pointer["a"], [builder.mul(int64(r), a_row)]) for r in range(num_rows)]
        with cgutils.for_range(builder, depth) as loop:
            b_row_d = builder.gep(pointer["b"], [builder.mul(loop.index, b_row)])
            b_V = [load(builder.gep(b_row_d, [int64(v * _VECTOR)]), kinds["b"].dtype) for v in range(num_vectors)]
            step = builder.mul(loop.index, a_step)
            for r in range(num_rows):
                value = load_everywhere(builder.gep(a_R[r], [step]), kinds["a"].dtype)
                for v in range(num_vectors):
                    product = builder.fmul(value, b_V[v], flags=flags)
                    builder.store(builder.fadd(builder.load(sum_RV[r][v]), product, flags=flags), sum_RV[r][v])
        for places, sums in zip(place_RV, sum_RV):
            for place, held in zip(places, sums):
                store(builder.load(held), place)
        return context.get_dummy_value()

    index = types.intp
    arguments = (out, index, index, a, index, index, index, b, index, index, index, rows, vectors)
    return types.void(*arguments), lower


# -- kernels


@njit(**options)
def add_rms_norm(x_TH, residual_TH, weight_H, eps):
    """residual += x; x = norm of the residual as it was rounded."""
    num_tokens, hidden = x_TH.shape
    for t in prange(num_tokens):
        x, residual = x_TH[t], residual_TH[t]
        total = np.float32(0.0)
        for i in range(hidden):
            residual[i] = _as_in(residual, _wide(residual[i]) + _wide(x[i]))
            total += _wide(residual[i]) * _wide(residual[i])
        scale = np.float32(1.0) / np.sqrt(total / np.float32(hidden) + eps)
        for i in range(hidden):
            x[i] = _as_in(x, _wide(residual[i]) * scale * _wide(weight_H[i]))


@njit(**options)
def norm_rope_write(qkv_TMD, cos_TD2, sin_TD2, with_norm, q_norm_D, k_norm_D, eps, slot_T, k_CBKD, v_CBKD, q_TND):
    """Each head of the queries to `q_TND`, of the keys and values to their slots, normed and rotated on the way.

    Without norms the weights are ones: one loop serves both, and compiles in half the time of two.
    """
    num_tokens, num_heads, head_dim = q_TND.shape
    block_size, num_kv_heads = k_CBKD.shape[1], k_CBKD.shape[2]
    half = head_dim // 2
    for t in prange(num_tokens):
        block, offset = slot_T[t] // block_size, slot_T[t] % block_size
        cos, sin = cos_TD2[t], sin_TD2[t]
        for h in range(num_heads + num_kv_heads):
            source = qkv_TMD[t, h]
            target = q_TND[t, h] if h < num_heads else k_CBKD[block, offset, h - num_heads]
            weight = q_norm_D if h < num_heads else k_norm_D
            scale = np.float32(1.0)
            if with_norm:
                total = np.float32(0.0)
                for i in range(head_dim):
                    total += _wide(source[i]) * _wide(source[i])
                scale /= np.sqrt(total / np.float32(head_dim) + eps)
            low_in, high_in, low_out, high_out = source[:half], source[half:], target[:half], target[half:]
            low_weight, high_weight = weight[:half], weight[half:]
            for i in range(half):
                low = _wide(low_in[i]) * scale * _wide(low_weight[i])
                high = _wide(high_in[i]) * scale * _wide(high_weight[i])
                low_out[i] = _as_in(low_out, low * cos[i] - high * sin[i])
                high_out[i] = _as_in(high_out, high * cos[i] + low * sin[i])
        for h in range(num_kv_heads):
            for i in range(head_dim):
                v_CBKD[block, offset, h, i] = qkv_TMD[t, num_heads + num_kv_heads + h, i]


@njit(**_as_written)
def write_fp8(x_TKD, slot_T, code_CBKD, scale_CBK):
    """Each head of `x_TKD` to its slot as FP8 codes and a scale; products and quotients as they are written."""
    num_tokens, num_heads, head_dim = x_TKD.shape
    block_size = code_CBKD.shape[1]
    for t in prange(num_tokens):
        block, offset = slot_T[t] // block_size, slot_T[t] % block_size
        for h in range(num_heads):
            x, code = x_TKD[t, h], code_CBKD[block, offset, h]
            most = np.uint32(0)  # bits of the largest size; those of infinity and of a NaN are larger than any number's
            for i in range(head_dim):
                most = max(most, _bits_of_float(_wide(x[i])) & np.uint32(0x7FFFFFFF))
            is_sound = most < _INFINITY_BITS
            scale = max(_float_of_bits(most) * _FP8_SHARE, _SMALLEST_SCALE) if is_sound else np.float32(np.nan)
            inverse = np.float32(1.0) / scale
            for i in range(head_dim):
                code[i] = _code_of(_wide(x[i]) * inverse) if is_sound else np.uint8(0)
            scale_CBK[block, offset, h] = scale


@njit(**options)
def silu_mul(gate_up_T2F, out_TF):
    num_tokens, width = out_TF.shape
    for t in prange(num_tokens):
        gate, up, out = gate_up_T2F[t, :width], gate_up_T2F[t, width:], out_TF[t]
        for i in range(width):
            g = _wide(gate[i])
            out[i] = _as_in(out, g / (np.float32(1.0) + _exp(-g)) * _wide(up[i]))


@njit(**options)
def paged_decode(q_SND, k_CBKD, v_CBKD, k_scale_CBK, v_scale_CBK, table_SM, context_S, window, scale, parts, out_SND):
    """One query a sequence over the paged cache; blocks are read where they lie.

    Work is one item a sequence, or `parts` of it, each some KV heads: a block is then read through in the order it lies
    in memory, and the query heads of a KV head share each key and value. Short rows are asked for one block ahead,
    because the processor does not foresee jumps from block to block; long ones keep its own foresight busy enough.
    """
    num_sequences, num_heads, head_dim = q_SND.shape
    block_size, num_kv_heads = k_CBKD.shape[1], k_CBKD.shape[2]
    group, span = num_heads // num_kv_heads, num_kv_heads // parts
    row = span * head_dim
    ahead = row if row <= _AHEAD_ELEMENTS else 0
    k_flat, v_flat = k_CBKD.reshape(-1), v_CBKD.reshape(-1)
    for item in prange(num_sequences * parts):
        s, kv = item // parts, item % parts * span
        context = context_S[s]
        first = max(0, context - window)
        first_block, num_blocks = first // block_size, (context + block_size - 1) // block_size
        q = np.empty((span * group, head_dim), np.float32)
        for g in range(span * group):
            for i in range(head_dim):
                q[g, i] = _wide(q_SND[s, kv * group + g, i]) * scale
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
                            dot += q[g, i] * _wide(k_CBKD[block, offset, kv + h, i])
                        score[g, start + offset] = dot * _scale_at(k_scale_CBK, block, offset, kv + h)
        acc = np.zeros((span * group, head_dim), np.float32)
        total = np.empty(span * group, np.float32)
        for g in range(span * group):
            # A view that begins at 0: then indices are seen to be no negative ones, and the loops become vector code.
            weight = score[g, first:context]
            best, summed = np.float32(-np.inf), np.float32(0.0)
            for i in range(len(weight)):
                best = best if weight[i] <= best else weight[i]  # written so that a NaN replaces the maximum
            for i in range(len(weight)):
                weight[i] = _exp(weight[i] - best)
                summed += weight[i]
            total[g] = summed
        for m in range(first_block, num_blocks):
            block, start, following = table_SM[s, m], m * block_size, table_SM[s, min(m + 1, num_blocks - 1)]
            for offset in range(max(first - start, 0), min(context - start, block_size)):
                next_row = ((following * block_size + offset) * num_kv_heads + kv) * head_dim
                for i in range(0, ahead, 16):
                    _prefetch(v_flat, next_row + i)
                for h in range(span):
                    for g in range(h * group, (h + 1) * group):
                        share = score[g, start + offset] * _scale_at(v_scale_CBK, block, offset, kv + h)
                        for i in range(head_dim):
                            acc[g, i] += share * _wide(v_CBKD[block, offset, kv + h, i])
        for g in range(span * group):
            for i in range(head_dim):
                out_SND[s, kv * group + g, i] = _as_in(out_SND, acc[g, i] / total[g])


@njit(**options)
def paged_prefill(
    q_TND, k_CBKD, v_CBKD, k_scale_CBK, v_scale_CBK, table_SM, item_I3, position_T, window, scale, out_TND
):
    """Several queries a sequence over the paged cache; a query at position p sees the keys p - window + 1 .. p.

    An item (sequence, first token, number of tokens) is some neighbouring queries of one sequence, for each KV head in
    turn. Their rows R (queries times heads of a KV head) lie side by side: keys are read where they lie, each block of
    them multiplied by all rows; the softmax needs no sum across a vector; values serve all rows.
    """
    head_dim = q_TND.shape[2]
    block_size, num_kv_heads = k_CBKD.shape[1], k_CBKD.shape[2]
    group, stride = q_TND.shape[1] // num_kv_heads, num_kv_heads * head_dim
    k_flat = k_CBKD.reshape(-1)
    for j in prange(len(item_I3) * num_kv_heads):
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
                    q_DR[i, r] = _wide(q_TND[query, h * group + r % group, i]) * scale
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
            key_scale = _scale_at(k_scale_CBK, block, offset, h)
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
                some_R[r] = _exp(some_R[r] - best_R[r])
                total_R[r] += some_R[r]
        out_RD, value_LD = np.zeros((rows, head_dim), np.float32), np.empty((_VALUES, head_dim), np.float32)
        out, value = out_RD.reshape(-1), value_LD.reshape(-1)
        for start in range(0, num_keys, _VALUES):
            for n in range(start, min(start + _VALUES, num_keys)):
                block, offset = table_SM[s, first_block + n // block_size], n % block_size
                stored, copy = v_CBKD[block, offset, h], value_LD[n - start]
                value_scale = _scale_at(v_scale_CBK, block, offset, h)
                for i in range(head_dim):
                    copy[i] = _wide(stored[i]) * value_scale
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
            target, sum_D = out_TND[token + r // group, h * group + r % group], out_RD[r]
            for i in range(head_dim):
                target[i] = _as_in(target, sum_D[i] / total_R[r])


@njit(cache=True)
def prefill_items(query_start_S1, context_len_S, most, num_threads):
    """The position of each token of a step in its sequence, (T,), and the pieces of work of `paged_prefill`, (I, 3):
    (sequence, first token, number of tokens) of at most `most` neighbouring queries of the sequences that compute more
    than one token.

    Threads take equal runs of the pieces; the work of one grows with its position, so they are dealt out in turn.
    """
    position_T = np.empty(query_start_S1[-1], np.int64)
    num_items = 0
    for s in range(len(context_len_S)):
        begin, end = query_start_S1[s], query_start_S1[s + 1]
        if end - begin > 1:
            num_items += (end - begin + most - 1) // most
        for t in range(begin, end):
            position_T[t] = context_len_S[s] - end + t
    item_I3, last_I = np.empty((num_items, 3), np.int64), np.empty(num_items, np.int64)
    i = 0
    for s in range(len(context_len_S)):
        begin, end = query_start_S1[s], query_start_S1[s + 1]
        if end - begin > 1:
            for first in range(begin, end, most):
                count = min(most, end - first)
                item_I3[i, 0], item_I3[i, 1], item_I3[i, 2] = s, first, count
                last_I[i] = position_T[first + count - 1]
                i += 1
    heaviest_I = np.argsort(-last_I)
    dealt_I3, i = np.empty_like(item_I3), 0
    for thread in range(num_threads):
        for place in range(thread, num_items, num_threads):
            dealt_I3[i] = item_I3[heaviest_I[place]]
            i += 1
    return position_T, dealt_I3


# -- around them


def bits(tensor: torch.Tensor) -> np.ndarray:
    """`tensor` as a compiled kernel reads and writes it, without a copy."""
    stands_for = {torch.bfloat16: torch.uint16, FP8: torch.uint8}.get(tensor.dtype)
    return (tensor if stands_for is None else tensor.view(stands_for)).numpy()


CacheArrays = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


def arrays_of(cache: LayerCache) -> CacheArrays:
    """Keys, values and their scales as the attention kernels read them."""
    k_scale_CBK = None if cache.k_scale_CBK is None else cache.k_scale_CBK.numpy()
    v_scale_CBK = None if cache.v_scale_CBK is None else cache.v_scale_CBK.numpy()
    return bits(cache.k_CBKD), bits(cache.v_CBKD), k_scale_CBK, v_scale_CBK


def own_threads() -> None:
    """Start numba's threads without changing torch's.

    Both use one OpenMP library, and numba's start sets its number of threads to all cores, also for torch.
    """
    threads = torch.get_num_threads()
    get_num_threads()
    torch.set_num_threads(threads)


def use_threads(parallel: bool) -> int:
    """The next kernel runs on as many threads as torch, or on one; returns how many."""
    most = config.NUMBA_NUM_THREADS  # pyright: ignore[reportAttributeAccessIssue]
    num_threads = min(torch.get_num_threads(), most) if parallel else 1
    if num_threads != getattr(_told, "num_threads", None):
        set_num_threads(num_threads)
        _told.num_threads = num_threads
    return num_threads


_told = threading.local()  # numba keeps a number for each thread too; to tell it again takes 10 us


def is_cached(kernel: Dispatcher) -> bool:
    """Whether this kernel was compiled on this machine before, so that it loads in no time.

    Looks for numba's index file; a type that was not used so far is compiled all the same.
    """
    source = Path(kernel.py_func.__code__.co_filename)
    assert kernel.stats.cache_path is not None
    indexes = Path(kernel.stats.cache_path).glob(f"{source.stem}.{kernel.__name__}-*.nbi")
    return any(index.stat().st_mtime >= source.stat().st_mtime for index in indexes)
