"""Attention of the CPU against the reference, on ragged batches over a cache whose unused slots are NaN."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.cpu.attention.attention import attention
from pipeline.kernels.reference import attention as reference_attention
from pipeline.kernels.triton.attention.dispatch import PagedAttention
from tests.kernels.steps import SOFTMAX_KINDS, paged_step, softmax_options, widened
from tests.kernels.triton.problems import DEVICE

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
SOUND_CODES = torch.arange(256, dtype=torch.uint8)[torch.arange(256) & 0x7F != 0x7F]


def ragged_step(
    rng: np.random.Generator, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, with_fp8: bool = False
) -> tuple[AttentionInput, LayerCache]:
    """Draw a mixture of decoding rows, whole prompts and chunks after a prefix, in scattered blocks."""
    contexts = rng.integers(1, 90, int(rng.integers(1, 40))).tolist()
    lengths = [(n, int(rng.choice([1, 1, 1, n, int(rng.integers(1, n + 1))]))) for n in contexts]
    return paged_step(lengths, kv_heads, head_dim, block_size, dtype, rng, with_fp8)


def check(
    q_TND: torch.Tensor,
    cache: LayerCache,
    attn_metadata: AttentionInput,
    window: int | None,
    scale: float = 0.3,
    kind: str = "",
) -> None:
    options = scale, window, *softmax_options(kind, q_TND.shape[1])
    ours = attention(q_TND, cache, attn_metadata, *options)
    oracle = reference_attention(q_TND.float(), widened(cache), attn_metadata, *options)
    assert torch.isfinite(ours).all(), "a slot outside the context was read"
    assert float((ours.float() - oracle).abs().max()) < TOLERANCE[q_TND.dtype], window


@pytest.mark.parametrize("with_fp8", [False, True], ids=["as-computed", "fp8"])
@pytest.mark.parametrize("seed", range(6))
def test_attention(seed: int, with_fp8: bool) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype = torch.float32 if seed % 3 else torch.bfloat16
    kv_heads, group, head_dim = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 5])), int(rng.choice([8, 16, 40]))
    attn_metadata, cache = ragged_step(rng, kv_heads, head_dim, int(rng.choice([1, 4, 16])), dtype, with_fp8)
    q_TND = torch.randn(int(attn_metadata.query_start_S1[-1]), kv_heads * group, head_dim).to(dtype)
    for window in (None, 1, 13):
        check(q_TND, cache, attn_metadata, window)
    for window, kind in zip((None, None, 13), SOFTMAX_KINDS):
        check(q_TND, cache, attn_metadata, window, kind=kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [(2, 1, 32, 8), (2, 2, 64, 12), (1, 2, 80, 16), (1, 4, 96, 16), (2, 3, 128, 32)],
)
def test_attention_of_heads_that_fill_whole_tiles(
    kv_heads: int, group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Some head sizes nearly fill tiles; rows decode next to prompts; blocks are whole numbers of tiles or not."""
    torch.manual_seed(head_dim)
    for with_fp8 in (False, True):
        attn_metadata, cache = ragged_step(
            np.random.default_rng(head_dim), kv_heads, head_dim, block_size, dtype, with_fp8
        )
        q_TND = torch.randn(int(attn_metadata.query_start_S1[-1]), kv_heads * group, head_dim).to(dtype)
        for window in (None, 13):
            check(q_TND, cache, attn_metadata, window, head_dim**-0.5)


@pytest.mark.parametrize("kind", ["", *SOFTMAX_KINDS])
def test_reference_attention_is_softmax_over_the_visible_keys(kind: str) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(1, 6, 1, 4), torch.randn(1, 6, 1, 4)
    starts, contexts = np.array([0, 2], dtype=np.int32), np.array([5], dtype=np.int32)
    attn_metadata = AttentionInput(starts, contexts, np.array([[0]], dtype=np.int32), torch.tensor([3, 4]), 6)
    q_TND = torch.randn(2, 2, 4)
    softcap, sinks_N = softmax_options(kind, 2)
    out = reference_attention(q_TND, LayerCache(keys, values), attn_metadata, 0.5, 3, softcap, sinks_N)
    for row, visible in ((0, slice(1, 4)), (1, slice(2, 5))):
        for head in range(2):
            scores = 0.5 * keys[0, visible, 0] @ q_TND[row, head]
            size = (softcap * torch.tanh(scores / softcap) if softcap else scores).exp()
            weights = size / (size.sum() + (0.0 if sinks_N is None else sinks_N[head].exp()))
            assert torch.allclose(out[row, head], weights @ values[0, visible, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("attend", "device"), [(attention, CPU), (PagedAttention(DEVICE), DEVICE)], ids=["cpu", "triton"]
)
@pytest.mark.parametrize("queries", [1, 5, 20])
def test_every_code_is_widened_exactly(queries: int, attend: Callable[..., torch.Tensor], device: torch.device) -> None:
    """Each code is the only value in its context."""
    count = len(SOUND_CODES)
    cache = LayerCache.allocate(count, queries, 1, 16, FP8, device)
    cache.fill(list(range(count)), 1.0)
    cache.v_CBKD.view(torch.uint8).copy_(SOUND_CODES[:, None, None, None])
    attn_metadata = AttentionInput(
        np.arange(0, count * queries + 1, queries, dtype=np.int32),
        np.full(count, queries, dtype=np.int32),
        np.arange(count, dtype=np.int32)[:, None],
        torch.arange(count * queries),
        queries,
    )
    out_TND = attend(torch.ones(count * queries, 1, 16, device=device), cache, attn_metadata, 0.25, None).cpu()
    expected_T = SOUND_CODES.view(FP8).float().repeat_interleave(queries)
    assert torch.allclose(out_TND[:, 0, 0], expected_T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["", "softcap and sinks"])
def test_a_broken_value_or_key_stays_in_its_head_and_sequence(kind: str) -> None:
    torch.manual_seed(3)
    attn_metadata, cache = ragged_step(np.random.default_rng(3), 2, 16, 4, torch.float32, with_fp8=True)
    for name in ("k_scale_CKB", "v_scale_CKB"):
        broken = LayerCache(*(tensor.clone() for tensor in cache.tensors))
        getattr(broken, name)[attn_metadata.block_table_SM[1, 0], 1, 0] = float("nan")
        q_TND = torch.randn(int(attn_metadata.query_start_S1[-1]), 4, 16)
        ours = attention(q_TND, broken, attn_metadata, 0.3, None, *softmax_options(kind, 4)).isfinite().all(-1)
        rows = slice(*attn_metadata.query_start_S1[1:3].tolist())
        assert not ours[rows, 2:].any()
        ours[rows, 2:] = True
        assert ours.all()


@pytest.mark.parametrize("size", [-200.0, 200.0])
def test_scores_and_sinks_of_any_size(size: float) -> None:
    """Exponentials of large scores overflow, and those of small ones vanish. The last sequence is a prompt."""
    attn_metadata, cache = paged_step([(40, 1), (40, 40)], 1, 16, 4, torch.float32, np.random.default_rng(0))
    for sinks_N in (torch.tensor([size, 0.0]), torch.tensor([0.0, size])):
        for q_TND in (torch.randn(41, 2, 16), 100 * torch.randn(41, 2, 16)):
            for softcap in (0.0, 3.0, 300.0):
                options = 0.3, None, softcap, sinks_N
                ours = attention(q_TND, cache, attn_metadata, *options)
                oracle = reference_attention(q_TND, cache, attn_metadata, *options)
                assert float((ours - oracle).abs().max()) < 2e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_some_rows_of_a_step_attend_as_in_the_whole_step(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(8)
    torch.manual_seed(8)
    attn_metadata, cache = ragged_step(rng, 2, 16, 4, dtype)
    tokens = int(attn_metadata.query_start_S1[-1])
    q_TND = torch.randn(tokens, 4, 16).to(dtype)
    rows = rng.permutation(tokens)[: tokens // 2]
    whole = reference_attention(q_TND.float(), widened(cache), attn_metadata, 0.3, 9)
    ours = attention(q_TND[rows], cache, attn_metadata.rows(rows), 0.3, 9)
    assert float((ours.float() - whole[rows]).abs().max()) < TOLERANCE[dtype]
    assert torch.equal(attn_metadata.rows(rows).slot_mapping_T, attn_metadata.slot_mapping_T[rows])
