"""The engine on the kernels for NVIDIA GPUs gives the reference's tokens, greedy and drawn: here in Triton's
interpreter, captured steps included, whose replay is the captured function called again on the same tensors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.drafts.drafting import MAX_CHECKED_TOKENS
from pipeline.engine.engine import Engine
from pipeline.engine.forward.graphs import graph_sizes
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.params import EngineConfig, Request, SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.engine.startup.build import captured_shapes
from pipeline.engine.startup.resolve import resolve
from pipeline.engine.tasks import Embed, Score
from pipeline.kernels.contract import AttentionInput
from pipeline.kernels.triton.attention import cascade_metadata
from pipeline.kernels.triton.attention.cascade_metadata import CascadeShape, Decided
from pipeline.kernels.triton.attention.decode_metadata import DecodeMetadata
from pipeline.kernels.triton.kernel_set import triton_kernels
from pipeline.kernels.triton.linear.crossover import Crossover
from pipeline.kernels.triton.linear.dispatch import Scratch
from pipeline.model.config import read_config
from tests.kernels.triton.problems import DEVICE, recorded_launches
from tests.model_folders import VOCAB, Family, write_checkpoint
from tests.weights.packers import quantize_randomly

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine runs on the CPU here, and the kernels on the GPU"),
]

QWEN3 = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "use_sliding_window": True,
    "sliding_window": 5,
    "max_window_layers": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 257,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4-bit weights, norms on queries and keys, a window on the second layer."""
    path = tmp_path_factory.mktemp("gpu")
    write_checkpoint(path / "plain", Family("qwen3", "qwen3"), QWEN3, seed=4)
    return quantize_randomly(path / "plain", path / "int4", group_size=64, zero_point=True, seed=5)


def replayed(function: Callable[[], None]) -> Callable[[], None]:
    """What a CUDA graph does: no kernel runs while it is captured, and a replay is the same work on the same tensors,
    whatever the arguments of the step were."""
    with recorded_launches():
        function()
    return function


def engine_of(folder: Path, kernels: str, **options: Any) -> Engine:
    settings = {"max_model_len": 48, "max_num_seqs": 3, "max_num_batched_tokens": 24, "block_size": 16} | options
    return Engine(EngineConfig(model=str(folder), device="cpu", dtype="float32", kernels=kernels, **settings))


DRAWN = (
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "frequency_penalty": 0.5, "seed": 9},
    {"temperature": 0.7, "top_k": 20, "min_tokens": 2, "repetition_penalty": 1.3},
)


def tokens_of(engine: Engine, is_drawn: bool) -> tuple[list[list[int]], int]:
    """Completions of prompts that share a beginning, one computed in two chunks, and how many steps they took."""
    rng = np.random.default_rng(3)
    stem = rng.integers(0, 255, 16).tolist()
    prompts = [(stem if n < 2 else []) + rng.integers(0, 255, length).tolist() for n, length in enumerate((10, 1, 5))]
    params = [SamplingParams(max_tokens=3 + n % 3, ignore_eos=True, **(DRAWN[n] if is_drawn else {})) for n in range(3)]
    with engine:
        done = engine.generate(prompts, params)
        return [completion.token_ids for completion in done], engine.stats.num_steps


@pytest.mark.parametrize("kind", ["one step ahead", "drafts", "drafts, fp8 cache", "drawn one step ahead"])
def test_captured_steps_give_the_reference_tokens(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drafts as on a GPU: the next step is launched before the tokens of one are known, and wide forms of the
    weights are written into a shared scratch."""
    with_drafts, is_drawn = kind.startswith("drafts"), kind.startswith("drawn")
    kv_cache_dtype = "fp8" if "fp8" in kind else "auto"
    expected, _ = tokens_of(engine_of(folder, "reference", kv_cache_dtype=kv_cache_dtype), is_drawn)
    speculation = {"method": "lookup", "num_speculative_tokens": 2, "forced": True} if with_drafts else "off"
    if not with_drafts:
        monkeypatch.setattr("pipeline.kernels.triton.linear.dispatch.crossover_of", lambda _: Crossover(4, 4, 4))
        kernels = triton_kernels(torch.float32, DEVICE, scratch=Scratch(torch.float32, DEVICE))
        monkeypatch.setattr("pipeline.engine.startup.loaded.select_kernels", lambda *_: kernels)
    engine = engine_of(folder, "triton", speculation=speculation, kv_cache_dtype=kv_cache_dtype)
    runner: Any = engine.runner
    runner.capture_steps(replayed, max_num_seqs=3, max_queries=3, most_tokens=6, say=lambda done, total: None)
    assert runner._graphs._sizes.tolist() == [1, 2, 4, 6]
    runner.is_asynchronous = not with_drafts
    engine.runner = runner  # with the loop for its kind
    run, ran = runner._graphs.run, []

    def run_and_watch(step: StepInput, *rest: Any) -> torch.Tensor:
        keys_CBKD = runner.kv.layers[0].k_CBKD
        before = keys_CBKD.clone()
        hidden_RH = run(step, *rest)
        written = (keys_CBKD != before).flatten(2).any(-1)[:-1].flatten().nonzero().flatten()
        assert set(written.tolist()) <= set(step.slot_mapping_T.tolist()), "padding wrote where sequences are"
        ran.append(len(step.token_id_T))
        return hidden_RH

    runner._graphs.run = run_and_watch
    tokens, num_steps = tokens_of(engine, is_drawn)
    assert tokens == expected
    assert len(ran) > num_steps / 2, "most steps are replayed"
    assert set(ran) - {1, 2, 4, 6}, "some are padded"


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_drafts_checked_in_captured_steps_give_the_reference_tokens(folder: Path, deterministic: bool) -> None:
    """The draft model is the target with some tokens changed, so all, some and none of a row's drafts are accepted."""
    prompts = [[7, 9, 11, 4], [200, 3]]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    with engine_of(folder, "reference") as engine:
        expected = [completion.token_ids for completion in engine.generate(prompts, params)]
    speculation = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2, "forced": True}
    engine = engine_of(folder, "triton", speculation=speculation, deterministic=deterministic)
    assert engine.drafting is not None
    proposer: Any = engine.drafting.proposer
    for runner, queries in ((engine.runner, 3), (proposer.runner, 2)):
        size: Any = {"max_num_seqs": 3, "max_queries": queries, "most_tokens": 6}
        runner.capture_steps(replayed, **size, say=lambda done, total: None)  # type: ignore[attr-defined]
        runner.is_asynchronous = True
    engine.runner = engine.runner  # with the loop for its kind
    execute, passes = proposer.runner.execute, []

    def execute_but_for_some(step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        logits_RV = execute(step, future)
        passes.append(len(passes) % 5 in (1, 4))
        return logits_RV.roll(1, dims=1) if passes[-1] else logits_RV

    proposer.runner.execute = execute_but_for_some
    with engine:
        assert [completion.token_ids for completion in engine.generate(prompts, params)] == expected
    assert 0 < sum(engine.stats.accepted_by_place) < sum(engine.stats.drafted_by_place)


def test_sizes_of_captured_steps() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    sizes = graph_sizes(512)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 512
    assert all(high <= low * 1.125 for low, high in pairwise(sizes) if low >= 64)
    larger = graph_sizes(1024)
    assert all(high <= low * 1.0625 for low, high in pairwise(larger) if low >= 256)
    assert len(larger) < 72
    assert len(graph_sizes(8192)) < 128
    assert graph_sizes(3584)[-1] == 3584


def test_steps_with_drafts_are_captured_up_to_the_largest_batch(folder: Path) -> None:
    """Or up to the largest mixed step that is captured, if that is larger, but no further than drafts are checked."""
    config = EngineConfig(str(folder), device="cpu", max_num_seqs=512, max_num_batched_tokens=8192)
    resolved = resolve(config, read_config(folder))
    assert resolved.most_checked_tokens == MAX_CHECKED_TOKENS == 1024
    for most_mixed, captured in ((300, 512), (700, 700), (2048, 1024), (0, 1024)):
        assert captured_shapes(resolved, most_mixed) == [(7, captured, most_mixed), (2, 1024, 0)]
    small = resolve(replace(config, max_num_seqs=8), read_config(folder))
    assert captured_shapes(small, 300)[0] == (7, 56, 300)
    plain = resolve(replace(config, speculation="off"), read_config(folder))
    assert captured_shapes(plain, 0)[0] == (1, 512, 0)


def test_graphs_go_as_far_as_the_kernels_take_queries(folder: Path) -> None:
    with engine_of(folder, "triton") as engine:
        runner: Any = engine.runner
        runner.capture_steps(
            lambda function: function, max_num_seqs=3, max_queries=33, most_tokens=99, say=lambda *_: None
        )
        assert runner._graphs._attention.max_queries == 8


@pytest.mark.parametrize("kind", ["kernel by kernel", "captured, drafts, fp8 cache"])
def test_rows_behind_a_long_prefix_give_the_reference_tokens(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they share is read once for all of them, in captured steps too."""
    monkeypatch.setattr(cascade_metadata, "LEAST_SAVED_BYTES", 0)
    decide, plans = CascadeShape.decide, []

    def decide_and_watch(*arguments: Any) -> Decided:
        decided = decide(*arguments)
        plans.append(decided.plan)
        return decided

    numbers, served = DecodeMetadata.numbers, []

    def numbers_and_watch(
        work: DecodeMetadata,
        where: AttentionInput,
        sequences: np.ndarray | None = None,
        shared: Sequence[np.ndarray] = (),
    ) -> list[np.ndarray]:
        served.append(len(shared) > 0 and bool(shared[-1].any()))
        return numbers(work, where, sequences, shared)

    monkeypatch.setattr(CascadeShape, "decide", decide_and_watch)
    monkeypatch.setattr(DecodeMetadata, "numbers", numbers_and_watch)
    rng = np.random.default_rng(7)
    stem = rng.integers(0, 255, 133).tolist()
    prompts = [stem + rng.integers(0, 255, length).tolist() for length in (3, 12, 20)]
    params = [SamplingParams(max_tokens=4 + n, ignore_eos=True) for n in range(3)]
    options: dict[str, Any] = {"max_model_len": 176, "max_num_batched_tokens": 64}
    if "captured" in kind:
        options |= {"kv_cache_dtype": "fp8"}
    with engine_of(folder, "reference", **options) as reference:
        expected = [completion.token_ids for completion in reference.generate(prompts, params)]
    assert not plans
    if "captured" in kind:
        options |= {"speculation": {"method": "lookup", "num_speculative_tokens": 2, "forced": True}}
    with engine_of(folder, "triton", **options) as engine:
        if "captured" in kind:
            runner: Any = engine.runner
            runner.capture_steps(replayed, max_num_seqs=3, max_queries=3, most_tokens=6, say=lambda done, total: None)
        assert [completion.token_ids for completion in engine.generate(prompts, params)] == expected
    found = [plan for plan in plans if plan is not None]
    assert sum(served) >= 3, "steps with several rows are served"
    assert {tuple(plan.tokens_G) for plan in found} == {(128,)}
    assert max(len(plan.groups.sequence_I) for plan in found) == 3


def test_known_texts_read_beside_captured_steps_have_the_reference_numbers(folder: Path) -> None:
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 255, length).tolist() for length in (30, 7)]
    prompt, greedy = rng.integers(0, 255, 5).tolist(), SamplingParams(max_tokens=5, ignore_eos=True)
    tasks = [Score(3, top=1), Embed("mean")]

    def told(engine: Engine, is_asynchronous: bool) -> list[Any]:
        runner: Any = engine.runner
        if is_asynchronous:
            runner.capture_steps(replayed, max_num_seqs=3, max_queries=1, most_tokens=3, say=lambda done, total: None)
            runner.is_asynchronous = True
            engine.runner = runner
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

    tokens, score, vector = told(engine_of(folder, "reference"), False)
    ours = told(engine_of(folder, "triton"), True)
    assert ours[0] == tokens
    assert [token.logprob for token in ours[1].tokens] == pytest.approx([t.logprob for t in score.tokens], abs=1e-3)
    np.testing.assert_allclose(ours[2].values, vector.values, atol=1e-3)
