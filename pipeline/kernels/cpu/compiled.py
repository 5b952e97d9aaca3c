"""The loops that numba compiles: elementwise work of a layer in one pass each, and attention of single queries.

All of them stand in this one file (those of linears in `compiled_linear.py`) because numba's cache on disk looks only
at the file a kernel stands in: a shared function elsewhere could change under kernels that are not compiled again.

Arrays are float32, or bfloat16 as its bits in uint16: widening is a shift, because float32 has the same exponent.
Everything is computed in float32 and rounded once. A NaN comes out as one: broken rows must be found. Suffixes are
those of `kernels/contract.py`.
"""

from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from numba import config, get_num_threads, njit, prange, set_num_threads, types
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic, overload

PARALLEL_ELEMENTS = 1 << 15
"""Elementwise work below this stays on one thread: waking another one would take longer than it saves."""

_AHEAD_ELEMENTS = 256  # of a row that is read ahead at most: measured, longer ones lose by it

# Sums may be reordered, as in any vectorised sum; NaN and infinity keep their meaning.
# Of numba's parallel transforms only `prange` is wanted: the others split array fills into loops of their own.
options = {
    "parallel": {"prange": True}
    | dict.fromkeys(("numpy", "comprehension", "reduction", "setitem", "stencil", "fusion", "inplace_binop"), False),
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    "error_model": "numpy",
    "cache": True,
}


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
        return lambda value: _float_of_bits(np.uint32(value) << np.uint32(16))  # pyright: ignore[reportCallIssue]
    return lambda value: value


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
    bits = _bits_of_float(value)  # pyright: ignore[reportCallIssue]
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return rounded if value == value else np.uint16(0x7FC0)


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
    power = (_bits_of_float(shifted) - _ROUNDER_BITS + np.uint32(127)) << np.uint32(23)  # pyright: ignore[reportCallIssue]
    return (p * r * r + r + np.float32(1.0)) * _float_of_bits(np.uint32(power))  # pyright: ignore[reportCallIssue]


@njit(inline="always")
def add_products(sum_L, x0, x1, x2, x3, x4, x5, x6, x7, w0, w1, w2, w3, w4, w5, w6, w7):
    """sum += x0 * w0 + .. + x7 * w7, for each of L: so that the sum is read and written once for eight products."""
    for n in range(len(sum_L)):
        sum_L[n] += (
            x0 * w0[n] + x1 * w1[n] + x2 * w2[n] + x3 * w3[n] + x4 * w4[n] + x5 * w5[n] + x6 * w6[n] + x7 * w7[n]
        )


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


@njit(**options)
def silu_mul(gate_up_T2F, out_TF):
    num_tokens, width = out_TF.shape
    for t in prange(num_tokens):
        gate, up, out = gate_up_T2F[t, :width], gate_up_T2F[t, width:], out_TF[t]
        for i in range(width):
            g = _wide(gate[i])
            out[i] = _as_in(out, g / (np.float32(1.0) + _exp(-g)) * _wide(up[i]))


@njit(**options)
def paged_decode(q_SND, k_CBKD, v_CBKD, table_SM, context_S, window, scale, parts, out_SND):
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
                    _prefetch(k_flat, next_row + i)  # pyright: ignore[reportCallIssue]
                for h in range(span):
                    for g in range(h * group, (h + 1) * group):
                        dot = np.float32(0.0)
                        for i in range(head_dim):
                            dot += q[g, i] * _wide(k_CBKD[block, offset, kv + h, i])
                        score[g, start + offset] = dot
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
                    _prefetch(v_flat, next_row + i)  # pyright: ignore[reportCallIssue]
                for h in range(span):
                    for g in range(h * group, (h + 1) * group):
                        share = score[g, start + offset]
                        for i in range(head_dim):
                            acc[g, i] += share * _wide(v_CBKD[block, offset, kv + h, i])
        for g in range(span * group):
            for i in range(head_dim):
                out_SND[s, kv * group + g, i] = _as_in(out_SND, acc[g, i] / total[g])


# -- around them


def bits(tensor: torch.Tensor) -> np.ndarray:
    """`tensor` as a compiled kernel reads and writes it, without a copy."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


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
    set_num_threads(num_threads)
    return num_threads


def is_cached(kernel: Dispatcher) -> bool:
    """Whether this kernel was compiled on this machine before, so that it loads in no time.

    Looks for numba's index file; a type that was not used so far is compiled all the same.
    """
    source = Path(kernel.py_func.__code__.co_filename)
    assert kernel.stats.cache_path is not None
    indexes = Path(kernel.stats.cache_path).glob(f"{source.stem}.{kernel.__name__}-*.nbi")
    return any(index.stat().st_mtime >= source.stat().st_mtime for index in indexes)
