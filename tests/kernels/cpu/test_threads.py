"""Division of compiled kernels' work among threads, whose number changes no result."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numba import config

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import LayerCache
from pipeline.kernels.cpu import elementwise
from pipeline.kernels.cpu.attention.attention import attention
from pipeline.kernels.cpu.compile.threads import ALL_ITEMS, init_thread_pool, kernel, parallel_for, use_threads
from pipeline.kernels.cpu.linear.linear_widened import widened_linear
from pipeline.weights.packed import DenseWeight

MAX_THREADS = config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]


@kernel(cache=False)
def record_runs(part_I, count_I, factor, begin, end):
    """Record for each item the first item of its run times `factor`, and the number of its computations."""
    if end < 0:
        return parallel_for(len(part_I))
    for i in range(begin, end):
        part_I[i] = begin * factor
        count_I[i] += 1


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore torch's number of threads after a test."""
    before = torch.get_num_threads()
    init_thread_pool()
    yield
    torch.set_num_threads(before)
    use_threads(True)


@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 16, 101])
def test_each_item_is_computed_once_in_equal_runs(threads: None, num_items: int) -> None:
    for num_threads in range(1, MAX_THREADS + 1):
        torch.set_num_threads(num_threads)
        assert use_threads(True) == num_threads
        part_I, count_I = np.full(num_items, -1), np.zeros(num_items, np.int64)
        record_runs(part_I, count_I, 7, *ALL_ITEMS)
        assert (count_I == 1).all()
        begins, sizes = np.unique(part_I, return_counts=True)
        ends = np.append(begins[1:] // 7, num_items)
        assert (sizes == ends - begins // 7).all(), "neighbours"
        assert len(begins) == min(num_items, num_threads)
        assert not num_items or sizes.max() - sizes.min() <= 1


@pytest.mark.skipif(MAX_THREADS < 2, reason="one processor")
def test_the_number_of_threads_changes_no_bit(threads: None) -> None:
    """Sizes are large enough to be divided: see PARALLEL_ELEMENTS and those of attention and linears."""
    torch.manual_seed(0)
    heads, kv_heads, head_dim, block_size = 4, 2, 64, 16
    queries = [1] * 32 + [200] * 8
    table_SM = np.arange(40 * 13, dtype=np.int32).reshape(40, 13)
    starts_S1 = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    slots = [table_SM[s, p // block_size] * block_size + p % block_size for s in range(40) for p in range(200)]
    tokens = np.concatenate([np.arange(200 * s + 200 - n, 200 * s + 200) for s, n in enumerate(queries)])
    slot_T = torch.tensor(slots)[tokens]
    attn_metadata = AttentionInput(starts_S1, np.full(40, 200, dtype=np.int32), table_SM, slot_T, block_size)
    qkv_TMD = torch.randn(len(tokens), heads + 2 * kv_heads, head_dim)
    angle_TD2 = torch.rand(len(tokens), head_dim // 2)
    linear = widened_linear(DenseWeight(torch.randn(512, 256).bfloat16()))
    assert linear is not None
    found = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        cache = LayerCache.allocate(40 * 13, block_size, kv_heads, head_dim, torch.float32, torch.device("cpu"))
        for tensor, seed in zip(cache.tensors, (1, 2)):
            tensor.normal_(generator=torch.Generator().manual_seed(seed))
        q_TND = elementwise.norm_rope_write(
            qkv_TMD.clone(), angle_TD2.cos(), angle_TD2.sin(), None, 1e-6, cache, slot_T
        )
        attn_metadata.plans.clear()
        x_TH = attention(q_TND, cache, attn_metadata, 0.1, None).reshape(len(tokens), -1)
        normed_TH, residual_TH = elementwise.add_rms_norm(x_TH, torch.ones_like(x_TH), torch.ones(x_TH.shape[1]), 1e-6)
        found.append([q_TND, *cache.tensors, normed_TH, residual_TH, elementwise.gate_mul(linear(normed_TH), "silu")])
    for one, two in zip(*found):
        assert torch.equal(one, two)
        assert bool(one.isfinite().all())
