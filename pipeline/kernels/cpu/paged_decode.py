"""One query row a sequence over the paged cache."""

import numpy as np
import torch

from pipeline.kernels.cpu.compiled import PARALLEL_ELEMENTS, bits, use_threads
from pipeline.kernels.cpu.compiled import paged_decode as kernel

_UNBOUNDED = np.iinfo(np.int64).max


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
    q_SND = q_SND.contiguous()
    out_SND = torch.empty_like(q_SND)
    num_kv_heads = k_cache_CBKD.shape[2]
    num_threads = use_threads(int(context_len_S.sum()) * num_kv_heads * k_cache_CBKD.shape[3] >= PARALLEL_ELEMENTS)
    kernel(
        bits(q_SND),
        bits(k_cache_CBKD),
        bits(v_cache_CBKD),
        np.ascontiguousarray(block_table_SM),
        context_len_S,
        _UNBOUNDED if window is None else window,
        np.float32(scale),
        1 if len(context_len_S) >= 8 * num_threads else _parts(num_kv_heads, num_threads),
        bits(out_SND),
    )
    return out_SND


def _parts(num_kv_heads: int, num_threads: int) -> int:
    """The fewest equal parts of the KV heads of which each thread gets one; all of them where there are too few."""
    return next((p for p in range(num_threads, num_kv_heads) if num_kv_heads % p == 0), num_kv_heads)
