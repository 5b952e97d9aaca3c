"""Random inputs for single kernels: a step over a paged cache with blocks in random order, and an int4 weight.

Suffixes as in `kernels/contract.py`; N and K of a weight are its outputs and inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import LayerCache, head_bytes
from pipeline.kernels.reference import read_kv, to_fp8
from pipeline.weights.packed import Fp8Weight, GroupIntWeight

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class PagedStep:
    """Queries of a step, their cache and attention metadata. shared: tokens that all contexts begin with."""

    q_TND: torch.Tensor
    cache: LayerCache
    attn_metadata: AttentionInput
    shared: int = 0

    @property
    def kv_bytes(self) -> float:
        """Bytes of one layer's keys and values in the contexts; shared ones count once."""
        num_kv_heads, head_dim = self.cache.k_CBKD.shape[2:]
        token_bytes = 2.0 * num_kv_heads * head_bytes(head_dim, self.cache.k_CBKD.dtype)
        return token_bytes * float((self.attn_metadata.context_len_S - self.shared).sum() + self.shared)

    @property
    def flops(self) -> float:
        """Operations of one layer: products of queries with the keys they see, and of weights with values."""
        count_S = np.diff(self.attn_metadata.query_start_S1).astype(np.float64)
        seen = (count_S * self.attn_metadata.context_len_S - count_S * (count_S - 1) / 2).sum()
        return 4.0 * self.q_TND.shape[1] * self.q_TND.shape[2] * float(seen)


def paged_step(
    counts: Sequence[int],
    contexts: Sequence[int],
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    block_size: int = BLOCK_SIZE,
    with_fp8_cache: bool = False,
    shared: int = 0,
) -> PagedStep:
    """Build a step in which sequence s computes the last counts[s] tokens of its contexts[s]. Values are normal, from
    `seed`; the cache is in `dtype` or in FP8. All contexts begin with the same `shared` tokens, in whole blocks."""
    assert shared % block_size == 0
    assert min(context - count for context, count in zip(contexts, counts)) >= shared
    rng, random = np.random.default_rng(seed), torch.Generator(device).manual_seed(seed)
    context_S, query_start_S1 = np.array(contexts), np.append(0, np.cumsum(counts))
    in_common, blocks_S = shared // block_size, -(-context_S // block_size)
    order = rng.permutation(int((blocks_S - in_common).sum()) + in_common)
    table_SM = np.zeros((len(contexts), int(blocks_S.max())), dtype=np.int32)
    table_SM[:, :in_common] = order[:in_common]
    first = in_common
    for s, blocks in enumerate(blocks_S.tolist()):
        table_SM[s, in_common:blocks] = order[first : first + blocks - in_common]
        first += blocks - in_common
    sequence_T = np.repeat(np.arange(len(counts)), counts)
    position_T = np.arange(query_start_S1[-1]) - (query_start_S1[1:] - context_S)[sequence_T]
    slot_T = table_SM[sequence_T, position_T // block_size].astype(np.int64) * block_size + position_T % block_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device, generator=random).to(dtype)

    shape = (len(order), block_size, heads.num_kv_heads, heads.head_dim)
    attn_metadata = AttentionInput(
        query_start_S1=query_start_S1.astype(np.int32),
        context_len_S=context_S.astype(np.int32),
        block_table_SM=table_SM,
        slot_mapping_T=torch.from_numpy(slot_T).to(device),
        block_size=block_size,
    )
    q_TND, keys, values = (
        normal(int(query_start_S1[-1]), heads.num_heads, heads.head_dim),
        normal(*shape),
        normal(*shape),
    )
    if not with_fp8_cache:
        return PagedStep(q_TND, LayerCache(keys, values), attn_metadata, shared)
    (k_code, k_scale_CBK), (v_code, v_scale_CBK) = to_fp8(keys), to_fp8(values)
    scales = (scale_CBK.transpose(1, 2).contiguous() for scale_CBK in (k_scale_CBK, v_scale_CBK))
    return PagedStep(q_TND, LayerCache(k_code, v_code, *scales), attn_metadata, shared)


def widened(cache: LayerCache) -> LayerCache:
    """Return a copy of the cache in float32."""
    everywhere = torch.arange(len(cache.k_CBKD), device=cache.k_CBKD.device)
    stored = (cache.k_CBKD, cache.k_scale_CKB), (cache.v_CBKD, cache.v_scale_CKB)
    return LayerCache(*(read_kv(values, scale, everywhere).to(torch.float32, copy=True) for values, scale in stored))


def random_fp8(n: int, k: int) -> Fp8Weight:
    """Return an fp8 weight on the host in blocks of 128 x 128 whose outputs have about the magnitude of its inputs."""
    random = torch.Generator().manual_seed(1)
    scales_RG = (0.5 + torch.rand(-(-n // 128), -(-k // 128), generator=random)) * (k**-0.5 / 100)
    return Fp8Weight((100 * torch.randn(n, k, generator=random)).to(torch.float8_e4m3fn), scales_RG, (128, 128))


def random_int4(n: int, k: int, group: int, random: torch.Generator) -> GroupIntWeight:
    """Return an int4 weight on the host whose outputs have about the magnitude of its inputs."""
    return GroupIntWeight(
        torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=random),
        (0.5 + torch.rand(n, k // group, generator=random)) * (k**-0.5 / 4.6),
        torch.randint(6, 10, (n, k // group), generator=random).float(),
        group,
    )
