"""Rows with adapters in an engine: tokens of merged weights in any batch, blocks that no other adapter shares, drafts,
preemption, tasks, and the base model's steps as without adapters."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from pipeline import Choice, Embed, Engine, EngineConfig, Request, SamplingParams, Score
from pipeline.demo import demo_model
from pipeline.engine.quality.reference_config import reference_config
from pipeline.engine.quality.watch import QualityWatch, open_reference
from pipeline.engine.request import QualitySample
from pipeline.engine.tasks import ChoiceResult, ScoreResult, VectorResult
from pipeline.errors import ConfigError
from pipeline.kernels.cpu.layer_loop import CompiledLayerLoop
from tests.adapters import merge, write_adapter
from tests.model_folders import Family, load_reference, make_family
from tests.parity.harness import Agreement, compare_greedy, float32_engine, greedy, greedy_reference, reference_logits
from tools.demo.measure import load

ALL = ".*_proj"
NAMES = (None, "a", "b", "c")


class Case(NamedTuple):
    folder: Path
    adapters: dict[str, str]
    models: dict[str | None, Any]  # transformers models with merged weights, by adapter


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    top = tmp_path_factory.mktemp("adapters")
    folder = make_family(top / "model", Family("llama3", "llama"), seed=8)
    return case_of(folder, top, lambda: load_reference(folder))


@pytest.fixture(scope="module")
def demo_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = demo_model("target-awq")
    return case_of(folder, tmp_path_factory.mktemp("demo"), lambda: load(folder)[0])


def case_of(folder: Path, top: Path, load_base: Any) -> Case:
    base, targets = load_base(), {"a": "q_proj|v_proj", "b": ALL, "c": "o_proj|down_proj"}
    adapters = {
        name: str(write_adapter(top / name, base, seed=i, targets=ends))
        for i, (name, ends) in enumerate(targets.items())
    }
    models = {name: merge(load_base(), Path(path)) for name, path in adapters.items()}
    return Case(folder, adapters, {None: base} | models)


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 250, int(rng.integers(4, 60))).tolist() for _ in range(count)]


def check(case: Case, engine: Engine, prompts: list[list[int]], num_tokens: int = 20) -> list[int]:
    """Assert that rows with each adapter in turn get the tokens of its merged model; return their cached tokens."""
    adapters = [NAMES[i % len(NAMES)] for i in range(len(prompts))]
    done, seen = engine.generate(prompts, greedy(num_tokens), adapters), Agreement()
    for prompt, name, completion in zip(prompts, adapters, done, strict=True):
        expected = greedy_reference(case.models[name], prompt, num_tokens, completion.token_ids)
        compare_greedy(case.models[name], prompt, completion.token_ids, expected, seen)
    assert seen.near_ties <= 1
    return [completion.num_cached_tokens for completion in done]


def test_each_row_gets_the_tokens_of_its_adapter(case: Case) -> None:
    with float32_engine(case.folder, adapters=case.adapters) as engine:
        check(case, engine, prompts_of(16))


def test_over_4_bit_weights(demo_case: Case) -> None:
    with float32_engine(demo_case.folder, adapters=demo_case.adapters) as engine:
        check(demo_case, engine, prompts_of(8))


def test_prompts_in_chunks_and_preempted_rows(case: Case) -> None:
    tight = {"max_num_batched_tokens": 24, "kv_cache_memory_bytes": 1 << 17, "max_model_len": 96}
    with float32_engine(case.folder, adapters=case.adapters, **tight) as engine:
        engine.scheduler.admission.expected_output = 1
        check(case, engine, prompts_of(24, seed=2), num_tokens=30)
        assert engine.stats.num_preemptions > 0


def test_adapters_share_blocks_only_among_their_own_rows(case: Case) -> None:
    (prompt,) = [list(range(3, 60))]
    with float32_engine(case.folder, adapters=case.adapters) as engine:
        assert check(case, engine, [prompt] * 4) == [0, 0, 0, 0]
        assert check(case, engine, [prompt] * 4) == [56, 56, 56, 56]


@pytest.mark.parametrize("method", ["lookup", "draft_model"])
def test_drafts_are_verified_with_the_adapter(case: Case, method: str) -> None:
    model = str(case.folder) if method == "draft_model" else None  # it proposes what the base model would write
    speculation = {"method": method, "model": model, "num_speculative_tokens": 3, "forced": True}
    prompts = [(prompt * 4)[:70] for prompt in prompts_of(12, seed=3)]
    with float32_engine(case.folder, adapters=case.adapters, speculation=speculation) as engine:
        check(case, engine, prompts)
        assert 0 < sum(engine.stats.accepted_by_position) < sum(engine.stats.drafted_by_position)


def test_tasks_read_with_the_adapter(case: Case) -> None:
    """A score, a vector and a choice of each adapter, next to rows that generate."""
    text, params = list(range(40, 75)), greedy(4)
    tasks = {"score": Score(5), "embed": Embed("mean", normalize=False), "choice": Choice(((7, 8), (9,)))}
    with float32_engine(case.folder, adapters=case.adapters) as engine:
        requests = [
            Request((name, kind), text, params, task=task, adapter=name)
            for name in NAMES
            for kind, task in (*tasks.items(), ("text", None))
        ]
        found = {done.row_id: done for done in engine.stream(requests)}
    for name in NAMES:
        model = case.models[name]
        logprobs = reference_logits(model, text).log_softmax(-1)
        score, vector, choice = (found[name, kind].result for kind in tasks)
        assert isinstance(score, ScoreResult)
        assert isinstance(vector, VectorResult)
        assert isinstance(choice, ChoiceResult)
        expected = float(logprobs[range(4, 34), text[5:]].sum())
        assert score.logprob == pytest.approx(expected, abs=1e-3)
        with torch.inference_mode():
            hidden_TH = model.model(torch.tensor([text])).last_hidden_state[0]
        np.testing.assert_allclose(vector.values, hidden_TH.mean(0).numpy(), atol=1e-3)
        second = reference_logits(model, [*text, 7])[-1].log_softmax(-1)
        labels = [float(logprobs[-1, 7] + second[8]), float(logprobs[-1, 9])]
        assert choice.logprobs == pytest.approx(labels, abs=1e-3)


def test_rows_without_an_adapter_run_through_all_layers_at_once(
    demo_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their results are those of an engine without adapters, bit for bit."""
    fused: list[int] = []
    run = CompiledLayerLoop.run
    monkeypatch.setattr(CompiledLayerLoop, "run", lambda self, x, *rest: (fused.append(len(x)), run(self, x, *rest))[1])
    prompt, params = prompts_of(1)[0], SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    with float32_engine(demo_case.folder, speculation="off") as engine:
        plain = engine.generate([prompt], params)
    num_fused, fused[:] = len(fused), []
    assert num_fused == 11
    with float32_engine(demo_case.folder, speculation="off", adapters=demo_case.adapters) as engine:
        assert replace(engine.generate([prompt], params)[0], **TIMES) == replace(plain[0], **TIMES)
        assert len(fused) == num_fused
        engine.generate([prompt], params, "a")
        assert len(fused) == num_fused, "a step with an adapter ran without it"


TIMES: dict[str, Any] = {"queued_us": 0, "first_token_us": 0, "last_token_us": 0}


def test_samples_of_one_prompt_have_its_adapter(case: Case) -> None:
    params = SamplingParams(max_tokens=10, n=3, temperature=0.9, seed=4, ignore_eos=True)
    with float32_engine(case.folder, adapters=case.adapters) as engine:
        samples = engine.generate([[5, 6, 7] * 9], params, "b")[0].samples
        alone = [
            engine.generate([[5, 6, 7] * 9], replace(params, n=1, seed=seed), "b")[0].token_ids
            for seed in seeds_of(params)
        ]
        other = engine.generate([[5, 6, 7] * 9], params, "a")[0].samples
    assert [sample.token_ids for sample in samples] == alone
    assert [sample.token_ids for sample in other] != alone


def seeds_of(params: SamplingParams) -> list[int]:
    from pipeline.engine.samples import sample_seed

    assert params.seed is not None
    return [sample_seed(params.seed, index) for index in range(params.n)]


def test_a_reference_model_reads_rows_with_their_adapter(case: Case) -> None:
    """Without the adapter it would disagree with most tokens."""
    served = EngineConfig(
        str(case.folder), device="cpu", dtype="float32", max_model_len=96, quantization="int8", adapters=case.adapters
    )
    reference = open_reference(reference_config(served, str(case.folder), False), Engine, lambda text: None)
    with Engine(served) as engine, reference:
        watch = QualityWatch(engine, reference)
        request = Request(0, list(range(30)), greedy(24), QualitySample(), adapter="b")
        engine.add(request)
        watch.expect(request)
        done: list[Any] = []
        while not done:
            done = watch.add_finished(engine.step() if engine.has_unfinished else []) + watch.advance()
    assert done[0].quality.tokens == 24
    assert done[0].quality.agreed >= 20


def test_bfloat16_is_close_to_float32(case: Case) -> None:
    text = list(range(50))
    with Engine(EngineConfig(str(case.folder), device="cpu", dtype="bfloat16", adapters=case.adapters)) as engine:
        requests = (Request(name, text, greedy(1), task=Score(5), adapter=name) for name in NAMES)
        scores = {done.row_id: done.result.logprob for done in engine.stream(requests)}  # type: ignore[union-attr]
    for name in NAMES:
        logprobs = reference_logits(case.models[name], text).log_softmax(-1)
        assert scores[name] == pytest.approx(float(logprobs[range(4, 49), text[5:]].sum()), rel=0.02)


def test_an_unknown_adapter_fails_its_row_alone(case: Case) -> None:
    with float32_engine(case.folder, adapters=case.adapters) as engine:
        good, bad = engine.generate([[1, 2, 3]] * 2, greedy(3), ["a", "d"])
        assert good.error is None
        assert (bad.error, bad.error_message) == ("unknown_adapter", "adapter 'd': this engine has a, b, c")
        with pytest.raises(ConfigError, match="2 prompts with 1 adapters"):
            engine.generate([[1], [2]], greedy(1), ["a"])
        assert "adapters of " in str(engine.resolved["weights"])
    with float32_engine(case.folder) as engine:
        assert engine.generate([[1, 2, 3]], greedy(3), "a")[0].error == "unknown_adapter"


def test_engines_refuse_what_adapters_do_not_support(case: Case) -> None:
    with pytest.raises(ConfigError, match=r"engine.deterministic: cannot be combined with adapters"):
        float32_engine(case.folder, adapters=case.adapters, deterministic=True)
    with pytest.raises(ConfigError, match=r"engine.adapters = \{'a': 3\}: expected a mapping of names to folders"):
        EngineConfig(str(case.folder), adapters={"a": 3})  # type: ignore[dict-item]
