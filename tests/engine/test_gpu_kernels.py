"""The engine on the kernels for NVIDIA GPUs gives the reference's tokens, greedy and drawn: here in Triton's
interpreter, captured steps included, whose replay is the captured function called again on the same tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.engine.tasks import Embed, Score
from pipeline.kernels.triton.attention import cascade_metadata
from pipeline.kernels.triton.attention.cascade_metadata import CascadeShape, Decided
from pipeline.kernels.triton.kernel_set import triton_kernels
from pipeline.kernels.triton.linear.crossover import Crossover
from pipeline.kernels.triton.linear.dispatch import DequantBuffer
from tests.engine.ahead import run_ahead
from tests.kernels.triton.problems import DEVICE, recorded_launches
from tests.model_folders import small_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine runs on the CPU here, and the kernels on the GPU"),
]

WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
WIDE = {"max_position_embeddings": 512, "initializer_range": 0.2}
QWEN3 = small_config(64, 128, 2, 4, 2, head_dim=16, **WINDOWED, **WIDE)


def replayed(function: Callable[[], None]) -> Callable[[], None]:
    """Simulate a CUDA graph: no kernel runs during capture, and a replay repeats the work on the same tensors, whatever
    the arguments of the step were."""
    with recorded_launches():
        function()
    return function


def capture(engine: Engine, function: Callable = replayed, is_asynchronous: bool = False, **sizes: int) -> Any:
    """Capture the engine's steps of these sizes; return its runner."""
    runner: Any = engine.runner
    runner.capture_steps(function, log=lambda done, total: None, **sizes)
    run_ahead(engine, is_asynchronous)
    return runner


def own_slots(runner: Any, step: StepInput) -> set[int]:
    """Return the slots of the first layer's cache that a step may write; layers that share pages follow in it."""
    if step.window_slot_mapping_T is None:
        return set(step.slot_mapping_T.tolist())
    is_windowed, size = runner.kv.is_windowed, runner.block_size
    assert not is_windowed[0]
    return {
        slot + index * size
        for windowed, slot_T in enumerate(step.slot_mappings)
        for index in range(is_windowed.count(bool(windowed)))
        for slot in slot_T.tolist()
    }


def watch_replays(runner: Any) -> list[StepInput]:
    """Return a list that receives replayed steps; assert that each writes only its own slots."""
    run, ran = runner._graphs.run, list[StepInput]()

    def run_and_watch(step: StepInput, *rest: Any) -> torch.Tensor:
        keys_CBKD = runner.kv.layers[0].k_CBKD
        before = keys_CBKD.clone()
        hidden_RH = run(step, *rest)
        num_used = len(keys_CBKD) - runner.kv.pages.stride
        written = (keys_CBKD.float() != before.float()).flatten(2).any(-1)[:num_used].flatten().nonzero().flatten()
        assert set(written.tolist()) <= own_slots(runner, step), "padding wrote into slots of sequences"
        ran.append(step)
        return hidden_RH

    runner._graphs.run = run_and_watch
    return ran


def engine_of(folder: Path, kernels: str, **options: Any) -> Engine:
    settings = {"max_model_len": 48, "max_num_seqs": 3, "max_num_batched_tokens": 24, "block_size": 16} | options
    return Engine(EngineConfig(model=str(folder), device="cpu", dtype="float32", kernels=kernels, **settings))


DRAWN = (
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "frequency_penalty": 0.5, "seed": 9},
    {"temperature": 0.7, "top_k": 20, "min_tokens": 2, "repetition_penalty": 1.3},
)


def tokens_of(engine: Engine, is_drawn: bool) -> tuple[list[list[int]], int]:
    """Return completions of prompts that share a beginning, one computed in two chunks, and the number of steps."""
    rng = np.random.default_rng(3)
    stem = rng.integers(0, 255, 16).tolist()
    prompts = [(stem if n < 2 else []) + rng.integers(0, 255, length).tolist() for n, length in enumerate((10, 1, 5))]
    params = [SamplingParams(max_tokens=3 + n % 3, ignore_eos=True, **(DRAWN[n] if is_drawn else {})) for n in range(3)]
    with engine:
        done = engine.generate(prompts, params)
        return [completion.token_ids for completion in done], engine.stats.num_steps


@pytest.mark.parametrize("kind", ["one step ahead", "drafts", "drafts, fp8 cache", "drawn one step ahead"])
def test_captured_steps_give_the_reference_tokens(
    int4_folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without drafts the engine runs as on a GPU: it launches the next step before the tokens of one are known, and
    writes wide forms of the weights into a shared scratch."""
    with_drafts, is_drawn = kind.startswith("drafts"), kind.startswith("drawn")
    kv_cache_dtype = "fp8" if "fp8" in kind else "auto"
    expected, _ = tokens_of(engine_of(int4_folder, "reference", kv_cache_dtype=kv_cache_dtype), is_drawn)
    speculation = {"method": "lookup", "num_speculative_tokens": 2, "forced": True} if with_drafts else "off"
    if not with_drafts:
        monkeypatch.setattr("pipeline.kernels.triton.linear.dispatch.crossover_of", lambda _: Crossover(4, 4, 4))
        kernels = triton_kernels(torch.float32, DEVICE, scratch=DequantBuffer(torch.float32, DEVICE))
        monkeypatch.setattr("pipeline.engine.startup.loaded.select_kernels", lambda *_: kernels)
    engine = engine_of(int4_folder, "triton", speculation=speculation, kv_cache_dtype=kv_cache_dtype)
    runner = capture(engine, is_asynchronous=not with_drafts, max_num_seqs=3, max_queries=3, max_tokens=6)
    assert runner._graphs._sizes.tolist() == [1, 2, 4, 6]
    steps = watch_replays(runner)
    tokens, num_steps = tokens_of(engine, is_drawn)
    assert tokens == expected
    assert len(steps) > num_steps / 2, "most steps are replayed"
    assert {len(step.token_id_T) for step in steps} - {1, 2, 4, 6}, "some are padded"


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_drafts_checked_in_captured_steps_give_the_reference_tokens(int4_folder: Path, deterministic: bool) -> None:
    """The draft model is the target with some tokens changed, so all, some and none of a row's drafts are accepted."""
    prompts = [[7, 9, 11, 4], [200, 3]]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with engine_of(int4_folder, "reference") as engine:
        expected = [completion.token_ids for completion in engine.generate(prompts, params)]
    speculation = {"method": "draft_model", "model": str(int4_folder), "num_speculative_tokens": 2, "forced": True}
    engine = engine_of(int4_folder, "triton", speculation=speculation, deterministic=deterministic)
    assert engine.spec_decoder is not None
    proposer: Any = engine.spec_decoder.proposer
    for runner, queries in ((engine.runner, 3), (proposer.runner, 2)):
        size: Any = {"max_num_seqs": 3, "max_queries": queries, "max_tokens": 6}
        runner.capture_steps(replayed, **size, log=lambda done, total: None)  # type: ignore[attr-defined]
    proposer.runner.is_asynchronous = True
    run_ahead(engine)
    execute, passes = proposer.runner.execute, []

    def execute_but_for_some(step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        logits_RV = execute(step, future)
        passes.append(len(passes) % 5 in (1, 4))
        return logits_RV.roll(1, dims=1) if passes[-1] else logits_RV

    proposer.runner.execute = execute_but_for_some
    with engine:
        assert [completion.token_ids for completion in engine.generate(prompts, params)] == expected
    assert 0 < sum(engine.stats.accepted_by_position) < sum(engine.stats.drafted_by_position)


def test_graphs_have_up_to_the_kernels_max_queries(int4_folder: Path) -> None:
    with engine_of(int4_folder, "triton") as engine:
        runner = capture(engine, lambda function: function, max_num_seqs=3, max_queries=33, max_tokens=99)
        assert runner._graphs._attention.max_queries == 8


@pytest.mark.parametrize("kind", ["kernel by kernel", "captured, drafts, fp8 cache"])
def test_rows_behind_a_long_prefix_give_the_reference_tokens(
    int4_folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared prefix is read once for all rows, in captured steps too."""
    monkeypatch.setattr(cascade_metadata, "MIN_SAVED_BYTES", 0)
    decide, plans = CascadeShape.decide, []

    def decide_and_watch(*arguments: Any) -> Decided:
        decided = decide(*arguments)
        plans.append(decided.plan)
        return decided

    monkeypatch.setattr(CascadeShape, "decide", decide_and_watch)
    rng = np.random.default_rng(7)
    stem = rng.integers(0, 255, 133).tolist()
    prompts = [stem + rng.integers(0, 255, length).tolist() for length in (3, 12, 20)]
    params = [SamplingParams(max_tokens=4 + n, ignore_eos=True) for n in range(3)]
    options: dict[str, Any] = {"max_model_len": 176, "max_num_batched_tokens": 64}
    if "captured" in kind:
        options |= {"kv_cache_dtype": "fp8"}
    with engine_of(int4_folder, "reference", **options) as reference:
        expected = [completion.token_ids for completion in reference.generate(prompts, params)]
    assert not plans
    if "captured" in kind:
        options |= {"speculation": {"method": "lookup", "num_speculative_tokens": 2, "forced": True}}
    with engine_of(int4_folder, "triton", **options) as engine:
        if "captured" in kind:
            capture(engine, max_num_seqs=3, max_queries=3, max_tokens=6)
        assert [completion.token_ids for completion in engine.generate(prompts, params)] == expected
    found = [plan for plan in plans if plan is not None]
    assert len(found) >= 2, "steps with several rows read it together"
    assert {tuple(plan.tokens_G) for plan in found} == {(128,)}
    assert max(len(plan.groups.sequence_I) for plan in found) == 3


def test_known_texts_read_with_captured_steps_have_the_reference_numbers(int4_folder: Path) -> None:
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 255, length).tolist() for length in (30, 7)]
    prompt, greedy = rng.integers(0, 255, 5).tolist(), SamplingParams(max_tokens=5, ignore_eos=True)
    tasks = [Score(3, top=1), Embed("mean")]

    def results_of(engine: Engine, is_asynchronous: bool) -> list[Any]:
        if is_asynchronous:
            capture(engine, is_asynchronous=True, max_num_seqs=3, max_queries=1, max_tokens=3)
        with engine:
            engine.add(Request("generated", prompt, greedy))
            engine.step()
            done = engine.step()
            for row, (text, task) in enumerate(zip(texts, tasks)):
                engine.add(Request(row, text, greedy, task=task))
            while engine.has_unfinished:
                done += engine.step()
        by_row = {completion.row_id: completion for completion in done}
        return [by_row["generated"].token_ids, by_row[0].result, by_row[1].result]

    tokens, score, vector = results_of(engine_of(int4_folder, "reference"), False)
    ours = results_of(engine_of(int4_folder, "triton"), True)
    assert ours[0] == tokens
    assert [token.logprob for token in ours[1].tokens] == pytest.approx([t.logprob for t in score.tokens], abs=1e-3)
    np.testing.assert_allclose(ours[2].values, vector.values, atol=1e-3)
