"""Captured steps with prompts: the engine's tokens are the reference's, and launches never change.

They run in Triton's interpreter, as in `test_gpu_kernels.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.shape_costs import weight_layout
from benchmarks.shapes import model_size
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.forward.graphs import graph_sizes, mixed_sizes
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.engine.startup.build import _max_mixed_tokens
from pipeline.engine.startup.mixed_tokens import host_bound_tokens, max_mixed_tokens
from pipeline.engine.startup.resolve import resolve
from pipeline.kernels.activations.act_quant import Activations
from pipeline.kernels.triton.attention import cascade_metadata
from pipeline.kernels.triton.launch import Launch
from pipeline.kernels.triton.linear.crossover import crossover_of
from pipeline.model.config import read_config
from pipeline.roofline.cards import find_card
from pipeline.roofline.cost_model import Ceilings
from pipeline.roofline.shares import MEASURED
from pipeline.weights.awq import AwqFormat
from tests.engine.test_gpu_kernels import QWEN3, WIDE, capture, engine_of, watch_replays
from tests.kernels.triton.problems import DEVICE, recorded_launches
from tests.model_folders import DELTA, GEMMA4, Family, small_config, write_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine runs on the CPU here, and the kernels on the GPU"),
]

BLOCK_BYTES = 2 * 2 * 8 * 2 * 16 * 4  # of 8 tokens of QWEN3, in both layers
MAX_MIXED = 40
SIZES: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": 16}
DRAFTS = {"method": "lookup", "num_speculative_tokens": 2, "forced": True}
KINDS: dict[str, dict[str, Any]] = {
    "one step ahead, preempted": {"kv_cache_memory_bytes": 13 * BLOCK_BYTES, "block_size": 8},
    "own heads, drafts, fp8 cache": {"speculation": DRAFTS, "kv_cache_dtype": "fp8"},
    "own heads, deterministic": {"deterministic": True},
    "states, one step ahead": {},
    "states, drafts": {"speculation": DRAFTS},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint with a window on the second layer."""
    return write_checkpoint(tmp_path_factory.mktemp("mixed"), Family("qwen3", "qwen3"), QWEN3, seed=4)


@pytest.fixture(scope="module")
def states_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint whose first layer keeps a state."""
    config = small_config(64, 128, 2, 4, 2) | DELTA | WIDE
    return write_checkpoint(tmp_path_factory.mktemp("states"), Family("qwen3-5", "qwen3_5_text"), config, seed=4)


@pytest.fixture(scope="module")
def heads_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint whose layers with a window have heads of another number and size than the others."""
    types = ["full_attention", "sliding_attention", "full_attention"]
    own = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32}
    config = small_config(64, 128, 3, 4, 2) | GEMMA4 | own | WIDE | {"layer_types": types, "sliding_window": 5}
    return write_checkpoint(tmp_path_factory.mktemp("heads"), Family("gemma4", "gemma4_text"), config, seed=4)


def captured_parts(launches: list[Launch]) -> list[Any]:
    """Return what a graph keeps of launches, except tensors that the step allocates."""
    return [
        (each.kernel.__name__, each.grid, each.options, [a for a in each.arguments if not isinstance(a, torch.Tensor)])
        for each in launches
    ]


def replayed_and_compared(function: Callable[[], None]) -> Callable[[], None]:
    """Simulate a CUDA graph: assert that the launches of a replay are the captured ones."""
    with recorded_launches() as captured:
        function()

    def replay() -> None:
        again, run = [], Launch.run
        with patch.object(Launch, "run", lambda launch: again.append(launch) or run(launch)):
            function()
        assert captured_parts(again) == captured_parts(captured), "launches depend on the step"

    return replay


def tokens_of(engine: Engine, max_tokens: int) -> list[list[int]]:
    """Return completions of a prompt in several chunks, of prompts that share its beginning, long enough to be read
    together, and of short ones; more than run at once. max_tokens: of the first ones."""
    rng = np.random.default_rng(3)
    stem = rng.integers(0, 255, 133).tolist()
    prompts = [stem + rng.integers(0, 255, 3).tolist()]
    prompts += [rng.integers(0, 255, length).tolist() for length in (15, 30, 14)]
    prompts += [stem + rng.integers(0, 255, length).tolist() for length in (14, 2, 9)]
    lengths = [max_tokens, max_tokens + 2] * 2 + [3, 4, 3]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    with engine:
        return [completion.token_ids for completion in engine.generate(prompts, params)]


@pytest.mark.parametrize("kind", KINDS)
def test_captured_mixed_steps_give_the_reference_tokens(
    kind: str, folder: Path, states_folder: Path, heads_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = states_folder if "states" in kind else heads_folder if "own heads" in kind else folder
    monkeypatch.setattr(cascade_metadata, "MIN_SAVED_BYTES", 0)
    options = SIZES | KINDS[kind]
    of_reference = {name: value for name, value in options.items() if name not in ("speculation", "deterministic")}
    max_tokens = 4 if "own heads" in kind else 12  # long rows grow out of the blocks
    expected = tokens_of(engine_of(folder, "reference", **of_reference), max_tokens)
    engine = engine_of(folder, "triton", **options)
    is_ahead = "one step ahead" in kind
    sizes = {"max_num_seqs": 4, "max_queries": 3 if "drafts" in kind else 1, "max_tokens": 4}
    runner = capture(engine, replayed_and_compared, is_ahead, **sizes, max_mixed_tokens=MAX_MIXED)
    assert runner._graphs._mixed_sizes.tolist() == [16, 24, 32, 40]
    engine.scheduler.admission.expected_output = 1 if is_ahead else None
    steps, supports, launched = watch_replays(runner), runner._graphs.supports, []

    def supports_or_recorded(step: StepInput, *rest: Any) -> bool:
        if not supports(step, *rest):
            launched.append(len(step.token_id_T))
        return supports(step, *rest)

    runner._graphs.supports = supports_or_recorded
    assert tokens_of(engine, max_tokens) == expected
    mixed = [step for step in steps if np.diff(step.query_start_S1).max() > runner._graphs._attention.max_queries]
    assert len(mixed) >= 2, "prompts are replayed"
    assert {len(step.token_id_T) for step in mixed} - {16, 24, 32, 40}, "some are padded"
    assert any(len(step.context_len_S) > 1 for step in mixed), "next to decoding"
    before = [step.context_len_S.max() - np.diff(step.query_start_S1).max() for step in mixed]
    assert max(before) > 0, "after a chunk or a cached beginning"
    if (
        "states" not in kind
    ):  # whose prompts are cut where others share them, so that steps compute a few tokens of them
        assert all(size > MAX_MIXED for size in launched), "only larger steps are launched kernel by kernel"
    assert launched
    assert engine.stats.num_preemptions > 0 or "preempted" not in kind


def test_sizes_of_captured_steps_waste_little() -> None:
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert (mixed_sizes(0), mixed_sizes(9), mixed_sizes(40)) == ([], [9], [16, 24, 32, 40])
    for sizes, max_size in ((graph_sizes(512), 512), (graph_sizes(3584), 3584), (mixed_sizes(2304), 2304)):
        assert sizes[-1] == max_size
        assert all(high <= low * 1.125 for low, high in pairwise(sizes) if low >= 64)
        assert len(sizes) < 100
    assert set(mixed_sizes(2304)) <= {*graph_sizes(2304)}, "a size that decoding has too is captured with it"


@pytest.mark.parametrize(
    ("card", "model", "expected"),
    [("h200", "qwen3-0.6b", 2048), ("l4", "qwen3-0.6b", 416), ("h200", "llama3-8b", 288), ("l4", "llama3-8b-awq", 0)],
)
def test_mixed_steps_are_captured_where_launching_takes_longer_than_computing(
    card: str, model: str, expected: int
) -> None:
    known, (size, weights) = find_card(card), model_size(model)
    ceilings = Ceilings.of_card(known, MEASURED)
    weights = weight_layout(weights, size, ceilings, crossover_of(known.compute_capability), 512)
    assert host_bound_tokens(size, weights, ceilings, 8192) == expected
    assert host_bound_tokens(size, weights, ceilings, 512) == min(expected, 512), "no step has more"


def test_an_engine_reads_the_properties_of_its_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint's shape, the limits and CUDA's name of the card decide; on an unknown card nothing is captured."""
    config = EngineConfig(str(folder), device="cpu", max_num_seqs=512, max_num_batched_tokens=8192)
    resolved, h100, a100 = resolve(config, read_config(folder)), find_card("h100"), find_card("a100 80")
    expected = max_mixed_tokens(read_config(folder), resolved, h100)
    assert (
        max_mixed_tokens(read_config(folder), replace(resolved, max_num_batched_tokens=expected // 2), h100)
        == expected // 2
    )
    awq = replace(read_config(folder), quantization=AwqFormat(128, True, "gemm"))
    rounded = replace(resolved, activations=Activations.for_all_weights("fp8"))
    assert max_mixed_tokens(awq, rounded, h100) > 0
    assert max_mixed_tokens(awq, rounded, a100) == 0, "it has no such products; the reference computes them uncaptured"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    names = [h100.device, a100.device, "another"]
    devices = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 2), torch.device("cpu")]
    on_card = [_max_mixed_tokens(read_config(folder), replace(resolved, device=device)) for device in devices]
    assert on_card == [expected, max_mixed_tokens(read_config(folder), resolved, a100), 0, 0]
