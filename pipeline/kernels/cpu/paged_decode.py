"""One query row a sequence over the paged cache, compiled by numba: blocks are read where they lie.

Work is one item a (sequence, KV head): the query heads of a KV head share each key and value that is read. Sums are in
float32. bfloat16 is read as its bits: widening is a shift, because float32 has the same exponent.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import get_num_threads, njit, prange, set_num_threads, types
from numba.extending import intrinsic, overload


@intrinsic
def _float_of_bits(typing_context, bits):
    def lower(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), lower


def _as_float32(value):
    raise NotImplementedError("only inside compiled code")


@overload(_as_float32, inline="always")
def _overload_as_float32(value):
    if value == types.uint16:  # the bits of a bfloat16
        return lambda value: _float_of_bits(np.uint32(value) << np.uint32(16))  # pyright: ignore[reportCallIssue]
    return lambda value: value


@njit(parallel=True, fastmath={"contract", "reassoc", "nsz", "arcp"}, error_model="numpy", cache=True)
def _kernel(q_SND, k_CBKD, v_CBKD, table_SM, context_S, window, scale, out_SND):
    num_sequences, num_heads, head_dim = q_SND.shape
    block_size, num_kv_heads = k_CBKD.shape[1], k_CBKD.shape[2]
    group = num_heads // num_kv_heads
    for item in prange(num_sequences * num_kv_heads):
        s, h = item // num_kv_heads, item % num_kv_heads
        context = context_S[s]
        first = max(0, context - window)
        q = np.empty((group, head_dim), np.float32)
        for g in range(group):
            for d in range(head_dim):
                q[g, d] = _as_float32(q_SND[s, h * group + g, d]) * scale
        score = np.empty((group, context - first), np.float32)
        best = np.full(group, -np.inf, np.float32)
        for position in range(first, context):
            block, offset = table_SM[s, position // block_size], position % block_size
            for g in range(group):
                dot = np.float32(0.0)
                for d in range(head_dim):
                    dot += q[g, d] * _as_float32(k_CBKD[block, offset, h, d])
                score[g, position - first] = dot
                # written so that a NaN replaces the maximum: broken rows must come out broken
                if not dot <= best[g]:
                    best[g] = dot
        acc = np.zeros((group, head_dim), np.float32)
        total = np.zeros(group, np.float32)
        for position in range(first, context):
            block, offset = table_SM[s, position // block_size], position % block_size
            for g in range(group):
                weight = np.exp(score[g, position - first] - best[g])
                total[g] += weight
                for d in range(head_dim):
                    acc[g, d] += weight * _as_float32(v_CBKD[block, offset, h, d])
        for g in range(group):
            for d in range(head_dim):
                out_SND[s, h * group + g, d] = acc[g, d] / total[g]


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def paged_decode(
    q_SND: torch.Tensor,
    k_cache_CBKD: torch.Tensor,
    v_cache_CBKD: torch.Tensor,
    block_table_SM: np.ndarray,
    context_len_S: np.ndarray,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of each sequence's last token over its context: (S, N, D) in q's type.

    float32 and bfloat16; the caches must be contiguous. Compiled at the first call of each type, then cached on disk.
    """
    out_SND = np.empty(q_SND.shape, dtype=np.float32)
    if get_num_threads() != torch.get_num_threads():
        set_num_threads(min(torch.get_num_threads(), get_num_threads()))
    unbounded = np.iinfo(np.int64).max
    _kernel(
        _bits(q_SND.contiguous()),
        _bits(k_cache_CBKD),
        _bits(v_cache_CBKD),
        np.ascontiguousarray(block_table_SM),
        context_len_S,
        unbounded if window is None else window,
        np.float32(scale),
        out_SND,
    )
    return torch.from_numpy(out_SND).to(q_SND.dtype)
