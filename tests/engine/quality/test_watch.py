"""Rows that are compared with a reference model: every figure equals that of transformers, and no row changes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline import Engine, EngineConfig, Request, SamplingParams
from pipeline.engine.completion import Completion, RowQuality
from pipeline.engine.quality.reference_config import approximates, reference_config
from pipeline.engine.quality.watch import QualityWatch, open_reference
from pipeline.engine.request import QualitySample
from pipeline.engine.speculation.config import SpeculationConfig
from tests.engine.hash_runner import expected_tokens, hash_engine
from tests.model_folders import FAMILIES, load_reference, small_config, write_checkpoint
from tests.parity.harness import reference_logits

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
MAX_LEN = 96
Folders = tuple[Path, Path]
Pair = Callable[..., tuple[Engine, Engine]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a small model, and the same with noise on its weights."""
    base, noisy = (tmp_path_factory.mktemp(name) / "model" for name in ("base", "noisy"))
    config = small_config(64, 96, 2, 4, 2, initializer_range=0.08)
    for folder in (base, noisy):
        write_checkpoint(folder, FAMILIES[0], config, seed=3)
    torch.manual_seed(4)
    for shard in noisy.glob("*.safetensors"):
        tensors = load_file(shard)
        save_file({n: t + 0.02 * torch.randn_like(t) for n, t in tensors.items()}, shard, metadata={"format": "pt"})
    return base, noisy


def options(folder: Path, **more: Any) -> EngineConfig:
    given = {"dtype": "float32", "kernels": "reference", "max_model_len": MAX_LEN, "max_num_seqs": 4, "block_size": 8}
    return EngineConfig(str(folder), **(given | more))  # type: ignore[arg-type]


@pytest.fixture
def pair(folders: Folders) -> Iterator[Pair]:
    """Open the noisy model as the served one, and the base one (or another) as its reference."""
    opened: list[Engine] = []

    def open_both(reference: Path = folders[0], generates: bool = True, **more: Any) -> tuple[Engine, Engine]:
        served = options(folders[1], **more)
        config = reference_config(served, str(reference), generates)
        opened.append(open_reference(config, Engine, lambda text: None))
        opened.append(Engine(served))
        return opened[-1], opened[-2]

    yield open_both
    for engine in opened:
        engine.close()


def requests_of(count: int, params: SamplingParams = GREEDY, expected: str | None = None) -> list[Request]:
    """Build requests of which every second one is compared."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 250, int(rng.integers(1, 40))).tolist() for _ in range(count)]
    samples = [QualitySample(expected) if i % 2 else None for i in range(count)]
    return [Request(i, ids, replace(params, seed=i), sample) for i, (ids, sample) in enumerate(zip(prompts, samples))]


def served_with(
    watch: QualityWatch, engine: Engine, requests: list[Request], is_waiting: bool = False
) -> dict[Any, Completion]:
    """Run requests like an engine's process (`job/process/main.py`). is_waiting: the first ends while others wait."""
    for request in requests:
        engine.add(request)
        watch.expect(request)
    done: dict[Any, Completion] = {}
    while engine.has_unfinished or watch.has_work:
        completions = watch.add_finished(engine.step() if engine.has_unfinished else []) + watch.advance()
        assert done or not completions or not is_waiting or engine.scheduler.waiting
        for completion in completions:
            assert completion.row_id not in done
            done[completion.row_id] = completion
    return done


def plain(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.error


def test_the_figures_are_those_of_transformers_logits(
    folders: Folders, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine.quality.watch.MAX_PIECE_TOKENS", 9)
    served, reference = pair()
    requests = requests_of(8)
    done = served_with(QualityWatch(served, reference), served, requests)
    base, noisy = (load_reference(folder) for folder in folders)
    apart = 0
    for request in requests:
        found = done[request.row_id].quality
        if request.quality is None:
            assert found is None
            continue
        prompt, generated = request.prompt_token_ids, done[request.row_id].token_ids
        ours, theirs = (
            torch.log_softmax(reference_logits(model, prompt + generated)[len(prompt) - 1 : -1].double(), -1)
            for model in (noisy, base)
        )
        agreed = int((theirs.argmax(-1) == torch.tensor(generated)).sum())
        kl = float((theirs.exp() * (theirs - ours)).sum())
        assert found is not None
        assert (found.tokens, found.agreed, found.reason) == (12, agreed, "")
        assert found.kl_nanonats / 1e9 == pytest.approx(kl, rel=1e-3)
        assert found.same_text == (agreed == 12)
        assert (found.served_right, found.reference_right) == (None, None)
        apart += 12 - agreed
    assert apart > 0, "the noise is too small to distinguish the models"
    assert reference.stats.generated_tokens == 0, "its own text follows from what it reads"
    counted = sum(len(r.prompt_token_ids) for r in requests)
    assert (served.stats.prompt_tokens, served.stats.generated_tokens) == (counted, 8 * 12), "only the job's rows"
    assert served.stats.quality_us > 0


def test_no_row_changes_by_being_compared_and_no_room_is_lost(pair: Pair) -> None:
    requests = requests_of(14, replace(GREEDY, max_tokens=40, logprobs=0))
    served, reference = pair(kv_cache_memory_bytes=26 * 8 * 2 * 2 * 2 * 16 * 4)  # 26 blocks: rows are preempted
    alone = [plain(c) for c in served.generate([r.prompt_token_ids for r in requests], [r.params for r in requests])]
    # Admit more rows than fit in the end.
    served.scheduler.admission.expected_output, served.scheduler.admission.min_history = 1, 10**9
    done = served_with(QualityWatch(served, reference), served, requests)
    assert served.stats.num_preemptions > 0
    assert [plain(done[i]) for i in range(14)] == alone
    assert sum(c.quality is not None for c in done.values()) == 7
    assert served.pool.num_held == 0
    served.pool.check()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_answers_and_sampled_rows_use_a_completion_of_the_reference(
    pair: Pair, folders: Folders, temperature: float
) -> None:
    params = replace(GREEDY, temperature=temperature)
    served, reference = pair()
    own = {r.row_id: c for r, c in zip(requests_of(10), reference.generate(
        [r.prompt_token_ids for r in requests_of(10)], [replace(params, seed=i) for i in range(10)]
    ))}  # fmt: skip
    requests = [
        replace(r, quality=r.quality and QualitySample(f" {own[r.row_id].text}\n" if i % 3 else None))
        for i, r in enumerate(requests_of(10, params))
    ]
    done = served_with(QualityWatch(served, reference), served, requests)
    kinds = set()
    for request in requests:
        found = done[request.row_id].quality
        if request.quality is None or found is None:
            continue
        assert found.reason == ""
        same = own[request.row_id].text == done[request.row_id].text
        assert found.same_text == same
        if request.quality.expected is not None:
            assert (found.served_right, found.reference_right) == (same, True)
        else:
            assert (found.served_right, found.reference_right) == (None, None)
        kinds.add((request.quality.expected is None, same))
    assert len(kinds) >= 2
    assert not reference.has_unfinished


HELD = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_p": 0.9},
    "penalised": {"repetition_penalty": 1.3},
    "a grammar": {"structured_outputs": {"regex": "[a-f]{12}x"}},
    "a budget of reasoning": {"reasoning": {"start": "a", "end": "b"}, "thinking_token_budget": 3},
}


@pytest.mark.parametrize("name", HELD)
def test_a_model_agrees_with_itself(pair: Pair, folders: Folders, name: str) -> None:
    """They agree too if the likeliest tokens are not allowed."""
    served, reference = pair(folders[1])
    (start,) = served.tokenizer.encode("a")
    requests = [
        replace(request, prompt_token_ids=[*request.prompt_token_ids, start])
        for request in requests_of(4, replace(GREEDY, **HELD[name]))
    ]
    done = served_with(QualityWatch(served, reference), served, requests)
    for row in (1, 3):
        found = done[row].quality
        assert found is not None
        assert (found.agreed, found.same_text, found.reason) == (found.tokens, True, "")
        if name in ("greedy", "drawn", "penalised"):
            assert (found.tokens, abs(found.kl_nanonats) < 1000) == (12, True)


def test_what_cannot_be_compared_is_delivered_with_the_reason(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    served, reference = pair(generates=False)
    watch, requests = QualityWatch(served, reference), requests_of(6)
    alone = [plain(c) for c in served.generate([r.prompt_token_ids for r in requests], GREEDY)]

    def reasons() -> list[str]:
        done = served_with(watch, served, requests)
        assert [plain(done[i]) for i in range(6)] == alone
        return [q.reason for q in (done[i].quality for i in (1, 3, 5)) if q is not None]

    lengths = sorted(len(r.prompt_token_ids) + 12 for r in requests[1::2])
    assert lengths[0] < lengths[1]
    watch._max_tokens = lengths[0]
    assert sorted(reasons()) == ["", "too_long", "too_long"]
    watch._max_tokens = lengths[-1]
    logits = reference.runner.logits

    def fail_once(error: Exception) -> Callable[..., Any]:
        """Return a `logits` that fails for the second piece of a row."""
        left = [None, error]

        def failing(hidden_RH: torch.Tensor) -> torch.Tensor:
            if left and (now := left.pop(0)) is not None:
                raise now
            return logits(hidden_RH)

        return failing

    watch._piece_tokens = 5
    monkeypatch.setattr(reference.runner, "logits", fail_once(MemoryError()))
    assert sorted(reasons()) == ["", "", "out_of_memory"]
    monkeypatch.setattr(reference.runner, "logits", fail_once(ValueError("broken")))
    assert reasons() == ["reference_failed"] * 3, "a reference that failed is not called again"
    assert "ValueError: broken" in capsys.readouterr().err
    assert not served.has_unfinished
    assert not reference.has_unfinished


def test_logits_that_are_no_numbers_and_rows_that_fail_are_not_compared() -> None:
    row, error = Request(0, [1, 2], GREEDY, QualitySample()), Completion(0, [], "", "error", 2, error="x")
    engine = hash_engine(20, bad_token=7)
    watch = QualityWatch(engine, hash_engine(20))
    watch.expect(row)
    assert watch.add_finished([error]) == [error]
    watch.expect(row)
    found = watch.add_finished([Completion(0, [3, 7, 9], "", "length", 2)])
    while watch.has_work:
        found += watch.add_finished(engine.step()) + watch.advance()
    assert [c.quality for c in found] == [RowQuality(reason="not_finite")]


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_rows_are_read_before_those_that_wait_and_change_none(is_asynchronous: bool) -> None:
    """The same holds if the next step is launched before its tokens are known."""
    options = {"is_asynchronous": is_asynchronous, "max_num_seqs": 3}
    served, reference = hash_engine(30, 4, **options), hash_engine(30, 4)  # type: ignore[arg-type]
    rng = np.random.default_rng(3)
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    requests = [Request(i, rng.integers(0, 90, 9).tolist(), params, QualitySample()) for i in range(12)]
    done = served_with(QualityWatch(served, reference), served, requests, is_waiting=True)
    for request in requests:
        completion = done[request.row_id]
        assert completion.token_ids == expected_tokens(request.prompt_token_ids, 25, 64, False)
        assert completion.quality == RowQuality(25, 25, 0, True)
    assert served.stats.prompt_tokens == sum(len(request.prompt_token_ids) for request in requests)
    assert served.pool.num_held == reference.pool.num_held == 0


def test_which_engines_differ_from_their_reference() -> None:
    draft, plain = SpeculationConfig("draft_model", "y"), {"num_threads": 2, "dtype": "bfloat16"}
    given = EngineConfig("x", speculation=draft, quantization="int8", kv_cache_dtype="fp8", **plain)  # type: ignore[arg-type]
    given = replace(given, state_dtype="bfloat16")
    reference = reference_config(given, "z", generates=True).engine
    assert (reference.model, reference.speculation) == ("z", SpeculationConfig("off"))
    assert (reference.dtype, reference.num_threads) == ("bfloat16", 2)
    assert not approximates(reference)
    assert approximates(given)
    assert approximates(EngineConfig("x", activation_dtype="int8"))
    assert all(
        approximates(replace(reference, **{key: getattr(given, key)})) for key in ("quantization", "state_dtype")
    )
