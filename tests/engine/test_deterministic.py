"""`deterministic: true`: a row's log-probabilities are the same bits alone and in a batch, in chunks, after preemption,
behind a shared prefix and with drafts. Each comparison finds differences where the mode is off."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from pipeline import Engine, SamplingParams
from pipeline.engine.completion import Completion
from pipeline.engine.schedule.admission import BlockDemand
from pipeline.engine.speculation.config import SpeculationConfig
from tests.engine.drafts.proposers import Recorded, draft_with
from tests.engine.test_gpu_kernels import capture, watch_replays
from tests.kernels.triton.problems import DEVICE, make_dots_ordered
from tests.model_folders import Family, make_family
from tests.parity.harness import float32_engine

LENGTHS = (1, 9, 23, 30, 37, 41, 56, 70)
STEM = 18  # tokens that half of the prompts begin with: two blocks of 8

Rows = list[tuple[list[int], list[float]]]
"""Of each row the tokens, and their log-probabilities with those of the three best in each place."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that bfloat16 does not hold, grouped heads, a window on the second layer."""
    family = Family("qwen2-window", "qwen2", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1})
    return make_family(tmp_path_factory.mktemp("deterministic"), family, seed=3)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    stem = rng.integers(0, 255, STEM).tolist()
    return [(stem if n % 2 else []) + rng.integers(0, 255, length).tolist() for n, length in enumerate(LENGTHS)]


def params() -> list[SamplingParams]:
    """Half greedy, half drawn."""
    drawn = {"temperature": 0.9, "top_p": 0.95}
    return [
        SamplingParams(max_tokens=14 + n, ignore_eos=True, seed=n, logprobs=3, **(drawn if n % 4 > 1 else {}))
        for n in range(len(LENGTHS))
    ]


def likelihoods_of(done: list[Completion]) -> Rows:
    assert all(completion.error is None for completion in done)
    return [
        (c.token_ids, [value for t in c.logprobs or [] for value in (t.logprob, *(v for _, v in t.top))]) for c in done
    ]


def alone(folder: Path, **options: Any) -> Rows:
    """Each row by itself, its prompt in one chunk, nothing shared."""
    with float32_engine(folder, enable_prefix_caching=False, **options) as engine:
        return [likelihoods_of(engine.generate([prompt], own))[0] for prompt, own in zip(prompts(), params())]


def in_a_batch(folder: Path, **options: Any) -> Rows:
    with float32_engine(folder, enable_prefix_caching=False, **options) as engine:
        return likelihoods_of(engine.generate(prompts(), params()))


def in_chunks(folder: Path, **options: Any) -> Rows:
    return in_a_batch(folder, max_num_batched_tokens=13, **options)


def preempted(folder: Path, **options: Any) -> Rows:
    few: dict[str, Any] = {"max_model_len": 120, "enable_prefix_caching": False}
    with float32_engine(folder, **few, **options) as engine:
        pages = engine.table.pages
    few["kv_cache_memory_bytes"] = (pages.num_pages(120) + 7) * pages.page_bytes
    # Nothing is expected to grow, so that too much is admitted.
    with float32_engine(folder, **few, **options) as engine, patch.object(BlockDemand, "peak", 0.0):
        rows = likelihoods_of(engine.generate(prompts(), params()))
        assert engine.stats.num_preemptions > 0
        return rows


def behind_a_shared_prefix(folder: Path, **options: Any) -> Rows:
    with float32_engine(folder, **options) as engine:
        engine.generate([prompts()[1]], SamplingParams(max_tokens=1))
        done = engine.generate(prompts(), params())
        assert sum(completion.num_cached_tokens for completion in done) >= 4 * (STEM // 8 * 8)
        return likelihoods_of(done)


def with_right_and_wrong_drafts(folder: Path, **options: Any) -> Rows:
    with float32_engine(folder, enable_prefix_caching=False, **options) as engine:
        outputs = {n: tokens for n, (tokens, _) in enumerate(likelihoods_of(engine.generate(prompts(), params())))}
        proposer = Recorded(engine.table, outputs, np.random.default_rng(1), vocab_size=250)
        draft_with(engine, proposer)
        return _drafted(engine)


def with_a_draft_model(folder: Path, **options: Any) -> Rows:
    """The target drafts for itself: where tokens are drawn, with the numbers that the target draws with."""
    speculation = SpeculationConfig("draft_model", str(folder), 3, forced=True)
    with float32_engine(folder, speculation=speculation, **options) as engine:
        return _drafted(engine)


def _drafted(engine: Engine) -> Rows:
    rows = likelihoods_of(engine.generate(prompts(), params()))
    assert sum(engine.stats.accepted_by_position) > sum(engine.stats.drafted_by_position) / 3 > 0
    return rows


WAYS = [in_a_batch, in_chunks, preempted, behind_a_shared_prefix, with_right_and_wrong_drafts, with_a_draft_model]


@pytest.fixture(scope="module")
def rows_alone(folder: Path) -> dict[bool, Rows]:
    return {deterministic: alone(folder, deterministic=deterministic) for deterministic in (True, False)}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_a_row_is_the_same_bits_however_it_is_computed(
    way: Callable[..., Rows], folder: Path, rows_alone: dict[bool, Rows]
) -> None:
    assert way(folder, deterministic=True) == rows_alone[True]
    assert way(folder) != rows_alone[False], "the comparison finds differences where there are some"


def test_it_is_said_and_close_to_what_other_steps_give(folder: Path, rows_alone: dict[bool, Rows]) -> None:
    with float32_engine(folder, deterministic=True) as engine:
        assert engine.resolved["deterministic"] == "on"
        assert "batch-invariant" in str(engine.resolved["kernel.linear"])
        assert "batch-invariant" in str(engine.resolved["kernel.attention"])
    with float32_engine(folder) as engine:
        assert engine.resolved["deterministic"] == "off"
    for (ours, values), (theirs, others) in zip(rows_alone[True], rows_alone[False]):
        assert ours == theirs
        assert values == pytest.approx(others, abs=1e-4)


# -- the kernels for NVIDIA GPUs, in Triton's interpreter


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine runs on the CPU here, and the kernels on the GPU")
def test_on_gpu_kernels_captured_or_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding alone against a batch of captured steps, its prompts in chunks, with drafts."""
    make_dots_ordered(monkeypatch)
    two, own = prompts()[1:3], SamplingParams(max_tokens=4, ignore_eos=True, logprobs=3)

    def engine_of(deterministic: bool, **options: Any) -> Engine:
        size = {"max_model_len": 48, "max_num_seqs": 2, "block_size": 16, "enable_prefix_caching": False}
        return float32_engine(folder, kernels="triton", deterministic=deterministic, **size, **options)

    for deterministic in (True, False):
        with engine_of(deterministic) as engine:
            expected = [likelihoods_of(engine.generate([prompt], own))[0] for prompt in two]
        with engine_of(deterministic, max_num_batched_tokens=20) as engine:
            replays = watch_replays(capture(engine, max_num_seqs=2, max_queries=3, max_tokens=6))
            outputs = {n: tokens for n, (tokens, _) in enumerate(expected)}
            proposer = Recorded(engine.table, outputs, np.random.default_rng(2), max_drafts=2, vocab_size=250)
            draft_with(engine, proposer)
            found = likelihoods_of(engine.generate(two, own))
            assert len(replays) >= 2, "steps were replayed"
            assert sum(engine.stats.drafted_by_position) > 0
        assert (found == expected) == deterministic
