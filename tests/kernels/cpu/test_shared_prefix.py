"""Decoding sequences that begin with the same blocks: read together, against the reference that reads each alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import LayerCache
from pipeline.kernels.cpu.attention import shared_prefix as shared
from pipeline.kernels.cpu.attention.attention import attention
from pipeline.kernels.cpu.attention.shared_prefix import SharedReading
from tests.kernels.cpu.test_attention import check, ragged_step
from tests.kernels.steps import SOFTMAX_KINDS


def beginning_alike(attn_metadata: AttentionInput, sizes: list[int]) -> AttentionInput:
    """Return the step with groups of these sizes that share all blocks before the queries of their shortest member."""
    table_SM, num_grouped = attn_metadata.block_table_SM.copy(), 0
    order = np.argsort(-attn_metadata.context_len_S, kind="stable")  # so that members of a group have similar lengths
    for size in sizes:
        members = order[num_grouped : num_grouped + size]
        num_grouped += size
        computed_S = np.diff(attn_metadata.query_start_S1)[members]
        blocks = int(((attn_metadata.context_len_S[members] - computed_S) // attn_metadata.block_size).min())
        table_SM[members, :blocks] = table_SM[members[0], :blocks]
    return replace(attn_metadata, block_table_SM=table_SM, plans={})


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives, for each layer that reads sequences together, their number."""
    seen: list[int] = []
    read = SharedReading.read

    def watched(self: SharedReading, *arguments):
        seen.append(len(self.member_P))
        return read(self, *arguments)

    monkeypatch.setattr(SharedReading, "read", watched)
    return seen


@pytest.mark.parametrize("with_fp8", [False, True], ids=["as-computed", "fp8"])
@pytest.mark.parametrize("seed", range(12))
def test_attention_over_beginnings_read_together(
    seed: int, with_fp8: bool, readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps decode only or next to prompts; groups have any size and length, some more members than fit together."""
    for name in ("_SHARED_COST", "_ROW_KEYS", "_MIN_ELEMENTS"):
        monkeypatch.setattr(shared, name, 0)  # so that small groups are read together as well
    monkeypatch.setattr(shared, "ROWS", 16)
    rng = np.random.default_rng(100 + seed)
    torch.manual_seed(seed)
    dtype = torch.float32 if seed % 3 else torch.bfloat16
    kv_heads, group, head_dim = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 5])), int(rng.choice([8, 16, 40]))
    attn_metadata, cache = ragged_step(rng, kv_heads, head_dim, int(rng.choice([1, 4, 16])), dtype, with_fp8)
    if seed % 2:
        attn_metadata = attn_metadata.rows(attn_metadata.query_start_S1[1:] - 1)
    count = len(attn_metadata.context_len_S)
    sizes = [count] if seed % 4 < 2 else [2, max(2, count // 2), 3]
    attn_metadata = beginning_alike(attn_metadata, sizes)
    q_TND = torch.randn(int(attn_metadata.query_start_S1[-1]), kv_heads * group, head_dim).to(dtype)
    for window in (None, 13, 1000):
        check(q_TND, cache, attn_metadata, window)
    check(q_TND, cache, attn_metadata, None, kind=SOFTMAX_KINDS[seed % 3])
    assert len(readings) % 3 == 0, "with a window that hides keys each reads its own"


def decoding(sequences: int, alike: int, own: int, block_size: int = 16) -> AttentionInput:
    """Build a step of sequences that decode after `alike` common tokens and `own` tokens of their own."""
    shared_blocks, own_blocks = alike // block_size, -(-own // block_size)
    table_SM = np.tile(np.arange(shared_blocks + own_blocks, dtype=np.int32), (sequences, 1))
    table_SM[:, shared_blocks:] += np.arange(sequences, dtype=np.int32)[:, None] * own_blocks
    return AttentionInput(
        np.arange(sequences + 1, dtype=np.int32),
        np.full(sequences, shared_blocks * block_size + own, np.int32),
        table_SM,
        torch.zeros(sequences, dtype=torch.int64),
        block_size,
    )


def test_sequences_are_read_together_where_that_is_less_work() -> None:
    def members(sequences: int, shared_tokens: int, own: int) -> int:
        step = decoding(sequences, shared_tokens, own)
        found = SharedReading.from_block_table(step.block_table_SM, step.context_len_S, 16, (4, 2, 64))
        return 0 if found is None else len(found.member_P)

    assert members(64, 160, 90) == 64
    assert members(8, 2048, 1) == 8
    assert members(8, 160, 90) == 0, "saves less than the search and another kernel cost"
    assert members(64, 0, 90) == members(1, 160, 90) == members(3, 2048, 90) == 0
    assert members(64, 16, 90) == 0, "one block of keys saves less than the overhead"


def test_a_sequence_has_a_key_of_its_own_to_read() -> None:
    found = SharedReading.from_block_table(np.zeros((64, 20), np.int32), np.full(64, 320, np.int32), 16, (4, 2, 64))
    assert found is not None
    assert (found.read_S == 304).all()


def test_a_broken_shared_key_breaks_its_head_in_all_sequences(
    readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_MIN_ELEMENTS", 0)
    step = decoding(16, 64, 5)
    cache = LayerCache.allocate(int(step.block_table_SM.max()) + 1, 16, 2, 8, torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    for tensor in (cache.k_CBKD, cache.v_CBKD):
        tensor.normal_()
    for broken in (cache.k_CBKD, cache.v_CBKD):
        kept = broken[1, 3, 1].clone()
        broken[1, 3, 1, 2] = float("nan")
        step.plans.clear()
        out_TND = attention(torch.randn(16, 4, 8), cache, step, 0.3, None)
        assert not out_TND[:, 2:].isfinite().all(-1).any()
        assert out_TND[:, :2].isfinite().all()
        broken[1, 3, 1] = kept
    assert readings == [16, 16]


def test_sinks_count_as_much_as_the_prefix_if_own_keys_do_not(
    readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own scores are so low that exponentials relative to them overflow."""
    monkeypatch.setattr(shared, "_MIN_ELEMENTS", 0)
    step = decoding(16, 64, 5)
    cache = LayerCache.allocate(int(step.block_table_SM.max()) + 1, 16, 2, 8, torch.float32, torch.device("cpu"))
    cache.k_CBKD[:4], cache.k_CBKD[4:] = 1.0, -100.0
    torch.manual_seed(0)
    cache.v_CBKD.normal_()
    check(torch.ones(16, 4, 8), cache, step, None, kind="sinks")
    assert readings == [16]
