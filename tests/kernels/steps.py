"""Steps over a paged cache, and vectors that are hard to store in 8 bits."""

import numpy as np
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.reference import write_kv

CPU = torch.device("cpu")
Lengths = list[tuple[int, int]]
"""Context of each sequence, and the number of its last tokens that are queries."""
SOFTMAX_KINDS = "softcap", "sinks", "softcap and sinks"


def softmax_options(kind: str, num_heads: int, device: torch.device = CPU) -> tuple[float, torch.Tensor | None]:
    """Return softcap and sinks_N of `contract.Attention` for one of SOFTMAX_KINDS, or for "". Scores of normal queries
    and keys come near the cap; some sinks outweigh all keys, others hardly count."""
    sinks_N = torch.linspace(9.0, -9.0, num_heads) if num_heads > 1 else torch.tensor([1.5])
    return 1.5 if "softcap" in kind else 0.0, sinks_N.to(device) if "sinks" in kind else None


def paged_step(
    lengths: Lengths,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    rng: np.random.Generator,
    with_fp8: bool = False,
) -> tuple[AttentionInput, LayerCache]:
    """Build a step of sequences in scattered blocks of a CPU cache whose unused slots are NaN. With FP8, heads of
    values differ in size a thousandfold."""
    context_S, count_S = np.array(lengths, dtype=np.int32).T.copy()
    blocks_S = -(-context_S // block_size)
    num_blocks = int(blocks_S.sum()) + 3
    order, firsts = rng.permutation(num_blocks), np.cumsum(blocks_S) - blocks_S
    table = np.full((len(lengths), blocks_S.max()), -1, dtype=np.int32)
    cache = LayerCache.allocate(num_blocks, block_size, kv_heads, head_dim, FP8 if with_fp8 else dtype, CPU)
    cache.fill(list(range(num_blocks)), float("nan"))
    slots = []
    for s, (context, count) in enumerate(lengths):
        table[s, : blocks_S[s]] = order[firsts[s] : firsts[s] + blocks_S[s]]
        position = np.arange(context)
        slot = table[s, position // block_size].astype(np.int64) * block_size + position % block_size
        k_LKD, v_LKD = torch.randn(context, kv_heads, head_dim), torch.randn(context, kv_heads, head_dim)
        if with_fp8:
            v_LKD *= 10 ** (-3 * torch.rand(context, kv_heads, 1))
        write_kv(k_LKD.to(dtype), v_LKD.to(dtype), cache, torch.from_numpy(slot))
        slots.append(slot[context - count :])
    query_start_S1 = np.append(0, np.cumsum(count_S)).astype(np.int32)
    slot_T = torch.from_numpy(np.concatenate(slots))
    return AttentionInput(query_start_S1, context_S, table, slot_T, block_size), cache


def widened(cache: LayerCache) -> LayerCache:
    """Return the cache on the CPU, in float32 but for codes, for the oracle."""
    return LayerCache(*(tensor.cpu() if tensor.dtype == FP8 else tensor.float().cpu() for tensor in cache.tensors))


def hostile_vectors(count: int, head_dim: int) -> torch.Tensor:
    """Return (count, head_dim) float32 vectors of sizes from 1e-6 to 1e4: some with few large values, some of zeros, of
    halfway cases, and with NaN or infinity."""
    torch.manual_seed(count)
    vectors = torch.randn(count, head_dim) * 10 ** (10 * torch.rand(count, 1) - 6)
    vectors[1::9] *= 10 ** (-6 * torch.rand(len(vectors[1::9]), head_dim))  # down to subnormal codes and below
    vectors[2::9] = 0.0
    vectors[3::9] = torch.randint(-448, 449, vectors[3::9].shape).float()  # halfway between codes, many of them
    vectors[3::9, 0] = 448.0
    vectors[4::9, 1:] = 0.0
    for start, broken in ((5, float("nan")), (6, float("inf")), (7, float("-inf"))):
        vectors[start::9, head_dim // 3] = broken
    return vectors
