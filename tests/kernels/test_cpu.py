"""The CPU kernels against the reference, on ragged batches over a cache whose unused slots are NaN."""

import numpy as np
import pytest
import torch

from pipeline.kernels.contract import AttentionInput
from pipeline.kernels.cpu.attention import attention
from pipeline.kernels.cpu.linear import DenseLinear, padded_tokens, prepare_linear
from pipeline.kernels.reference import attention as reference_attention
from pipeline.kernels.select import select_kernels
from pipeline.quant.packed import DenseWeight

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def ragged_step(rng: np.random.Generator, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype):
    """A random mixture of decoding rows, whole prompts and chunks behind a prefix, in scattered blocks."""
    contexts, queries = [], []
    for _ in range(int(rng.integers(1, 40))):
        context = int(rng.integers(1, 90))
        contexts.append(context)
        queries.append(int(rng.choice([1, 1, 1, context, int(rng.integers(1, context + 1))])))
    blocks_of = [-(-c // block_size) for c in contexts]
    num_blocks = sum(blocks_of) + 3
    order = rng.permutation(num_blocks)
    table = np.full((len(contexts), max(blocks_of)), -1, dtype=np.int32)
    keys = torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    values = keys.clone()
    slots, taken = [], 0
    for s, (context, count) in enumerate(zip(contexts, queries)):
        mine = order[taken : taken + blocks_of[s]]
        taken += blocks_of[s]
        table[s, : len(mine)] = mine
        position = np.arange(context)
        slot = mine[position // block_size] * block_size + position % block_size
        keys.flatten(0, 1)[torch.from_numpy(slot)] = torch.randn(context, kv_heads, head_dim).to(dtype)
        values.flatten(0, 1)[torch.from_numpy(slot)] = torch.randn(context, kv_heads, head_dim).to(dtype)
        slots.append(slot[context - count :])
    where = AttentionInput(
        np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        np.array(contexts, dtype=np.int32),
        table,
        torch.from_numpy(np.concatenate(slots)),
        block_size,
    )
    return where, keys, values


@pytest.mark.parametrize("window", [None, 1, 13])
@pytest.mark.parametrize("seed", range(6))
def test_attention(seed: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype = torch.float32 if seed % 3 else torch.bfloat16
    kv_heads, group, head_dim = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 5])), int(rng.choice([8, 16, 40]))
    where, keys, values = ragged_step(rng, kv_heads, head_dim, int(rng.choice([1, 4, 16])), dtype)
    q_TND = torch.randn(int(where.query_start_S1[-1]), kv_heads * group, head_dim).to(dtype)
    ours = attention(q_TND, keys, values, where, 0.3, window)
    oracle = reference_attention(q_TND.float(), keys.float(), values.float(), where, 0.3, window)
    assert torch.isfinite(ours).all(), "a slot outside the context was read"
    assert float((ours.float() - oracle).abs().max()) < TOLERANCE[dtype]


def test_reference_attention_is_softmax_over_the_visible_keys() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(1, 6, 1, 4), torch.randn(1, 6, 1, 4)
    where = AttentionInput(
        np.array([0, 2], dtype=np.int32),
        np.array([5], dtype=np.int32),
        np.array([[0]], dtype=np.int32),
        torch.tensor([3, 4]),
        6,
    )
    q_TND = torch.randn(2, 1, 4)
    out = reference_attention(q_TND, keys, values, where, 0.5, 3)
    for row, visible in ((0, slice(1, 4)), (1, slice(2, 5))):
        weights = (0.5 * keys[0, visible, 0] @ q_TND[row, 0]).softmax(0)
        assert torch.allclose(out[row, 0], weights @ values[0, visible, 0], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_dense_linear(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(1)
    weight, bias = torch.randn(48, 80), torch.randn(48)
    x_TK = torch.randn(tokens, 80).to(dtype)
    ours = prepare_linear(DenseWeight(weight, bias), dtype)(x_TK)
    exact = x_TK.float() @ weight.to(dtype).float().T + bias.to(dtype).float()
    assert ours.dtype == dtype
    assert float((ours.float() - exact).abs().max() / exact.abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 100, 1023])
def test_the_packed_linear_pads_its_tokens_and_gives_them_back(tokens: int) -> None:
    torch.manual_seed(2)
    weight, bias, x_TK = torch.randn(48, 80), torch.randn(48), torch.randn(tokens, 80)
    ours = DenseLinear(weight, bias, torch.float32, packed=True)(x_TK)
    assert ours.shape == (tokens, 48)
    assert float((ours - (x_TK @ weight.T + bias)).abs().max()) < 1e-4


def test_padding_costs_little_and_leaves_few_numbers_of_tokens() -> None:
    assert all(t <= padded_tokens(t) <= t + t // 8 for t in range(1, 5000))
    assert len({padded_tokens(t) for t in range(1, 2049)}) < 80


def test_selection_says_who_serves_each_operation() -> None:
    kernels = select_kernels(torch.device("cpu"), torch.float32)
    assert set(kernels.served_by) == {"linear", "rms_norm", "add_rms_norm", "rope", "write_kv", "attention", "silu_mul"}
    assert "numba" in kernels.served_by["attention"]
