"""Captured attention of steps with prompts: one list of launches serves steps with one prompt next to decoding, with
several alone, after a prefix that some share, and without leftovers of the previous step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.graph_attention import GraphShape, LayerKind
from pipeline.kernels.reference import attention as reference_attention
from pipeline.kernels.triton.attention import cascade_metadata
from pipeline.kernels.triton.attention.captured_attention import CapturedAttention
from pipeline.kernels.triton.attention.dispatch import PagedAttention, plan_key
from pipeline.kernels.triton.batch_invariant import BatchInvariantAttention, CapturedBatchInvariantAttention
from pipeline.kernels.triton.launch import Launch
from tests.kernels.steps import softmax_options
from tests.kernels.triton.problems import ATTENTION, DEVICE, make_step, recorded_launches, sharing

# numpy's, of padding rows: 0 / 0 in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PADDED, BLOCKS = 200, 40
KINDS = LayerKind(None, 2, 16), LayerKind(70, 2, 16), LayerKind(None, 1, 32)
SHAPE = GraphShape(6, 32, 64, 4, KINDS, 3, 12, PADDED)
STEPS: list[tuple[list[tuple[int, int]], list[tuple[list[int], int]]]] = [
    ([(300, 1), (150, 3), (90, 90), (200, 40)], []),
    ([(200, 1), (270, 2), (190, 3), (210, 80), (4, 4)], [([0, 1, 2, 3], 2)]),
    ([(70, 70)], []),
    ([(5, 5), (9, 4), (140, 10), (30, 30), (66, 66), (7, 7)], []),
    ([(200, 1)] * 4 + [(600, 150)], [([0, 1, 2, 3], 3)]),
]


def kept(launches: list[Launch]) -> list[Any]:
    """Return what a graph keeps of launches."""
    arguments = ([a.data_ptr() if isinstance(a, torch.Tensor) else a for a in each.arguments] for each in launches)
    return [(each.kernel.__name__, each.grid, each.options, given) for each, given in zip(launches, arguments)]


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("", KINDS[0]),
        ("", KINDS[1]),
        ("", KINDS[2]),
        ("fp8 cache", KINDS[0]),
        ("deterministic", KINDS[1]),
        ("deterministic", KINDS[2]),
        ("softcap and sinks", KINDS[0]),
    ],
)
def test_launches_do_not_change_from_step_to_step(
    kind: str, layers: LayerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    window, num_kv_heads, head_dim = layers
    monkeypatch.setattr(cascade_metadata, "MIN_SAVED_BYTES", 0)
    is_fp8, is_deterministic = kind == "fp8 cache", kind == "deterministic"
    captured: Any = (CapturedBatchInvariantAttention if is_deterministic else CapturedAttention)(SHAPE, DEVICE)
    attention = (BatchInvariantAttention if is_deterministic else PagedAttention)(DEVICE)
    q_TND, out_TND = (torch.zeros(PADDED, 4, head_dim, device=DEVICE) for _ in "qo")
    cache = LayerCache.allocate(BLOCKS, 64, num_kv_heads, head_dim, FP8 if is_fp8 else torch.float32, DEVICE)
    none = np.zeros(1, dtype=np.int32)
    empty_step = none, none, none[None], torch.zeros(0, dtype=torch.int64), 64
    (softcap, sinks_N), launches, shared = softmax_options(kind, 4, DEVICE), [], []
    for lengths, groups in STEPS:
        step = sharing(make_step(lengths, (4, num_kv_heads), head_dim, 64, torch.float32, with_fp8=is_fp8), groups)
        count_S, num_tokens = np.diff(step.attn_metadata.query_start_S1), len(step.q_TND)
        assert captured.fits_mixed(count_S, PADDED)
        captured.prepare_mixed_replay(step.attn_metadata, np.zeros(0, dtype=np.int64))
        captured.unpack()
        cache.fill(list(range(BLOCKS)), float("nan"))
        for tensor, its in zip(cache.tensors, step.cache.tensors):
            tensor[: len(its)] = its
        q_TND.fill_(0.0)[:num_tokens] = step.q_TND
        out_TND.fill_(7.0)
        attn_metadata = AttentionInput(*empty_step, captured.mixed_plans(PADDED))
        with recorded_launches() as recorded, monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", lambda tensor: out_TND)
            attention(q_TND, cache, attn_metadata, 0.3, window, softcap, sinks_N)
        launches.append(kept(recorded))
        for launch in recorded:
            launch.run()
        of_tile_I = attn_metadata.plans[plan_key(*layers)].prefill.item_I2[:, 0]
        tiles_S = -(-count_S // (32 * num_kv_heads))
        assert int((of_tile_I >= 0).sum()) == tiles_S[is_deterministic | (count_S > 3)].sum(), "the others are empty"
        oracle = reference_attention(*step.wide, step.attn_metadata, 0.3, window, *softmax_options(kind, 4))
        assert float((out_TND[:num_tokens].cpu() - oracle).abs().max()) < ATTENTION[torch.float32]
        assert (out_TND[num_tokens:] == 7.0).all(), "padding attends to nothing"
        if not is_deterministic and window is None:
            recorded_cascade = attn_metadata.plans[plan_key(*layers)].decode.cascade
            shared.append((recorded_cascade.numbers.shared_S[: len(count_S)] > 0).tolist())
    assert all(each == launches[0] for each in launches)
    if shared:
        assert shared[1] == [True, True, True, False, False], "a prompt reads its context by itself"
        assert shared[4] == [True] * 4 + [False]
        assert not any(map(any, (shared[0], shared[2], shared[3])))


def test_steps_with_more_tiles_than_launched_do_not_fit() -> None:
    """64 query tokens fill a tile."""
    captured = CapturedAttention(replace(SHAPE, max_seqs=300, max_mixed_tokens=4096), DEVICE)
    assert captured.fits_mixed(np.array([1, 4, 4, 65]), 80)
    assert not captured.fits_mixed(np.array([1, 4, 4, 4, 65]), 80)
