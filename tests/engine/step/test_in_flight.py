"""A step is planned while the tokens of the previous one are still drawn: same tokens, and no needless wait."""

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.completion import Completion
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from tests.engine.drafts.random_rows import odd_requests, roomy_engine, same
from tests.engine.hash_runner import EOS, before_each_step, check_tokens, expected_tokens, hash_engine, watched
from tests.engine.schedule.test_scheduler import run


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.5}], ids=["greedy", "drawn"]
)
def test_every_step_is_launched_before_the_last_ones_tokens_are_read(options: dict) -> None:
    engine = hash_engine(100, 4, is_asynchronous=True, max_num_batched_tokens=64)
    seen = watched(engine)
    params = SamplingParams(max_tokens=10, ignore_eos=True, **options)
    run(engine, [Request(row, [row, 5, 6], params) for row in range(6)])
    assert seen == [(18, 0)] + [(6, 6)] * 9, "ten steps for ten tokens, none for rows that end by length"


def test_a_sequence_that_ends_with_eos_is_computed_once_too_often_and_that_row_is_dropped() -> None:
    engine = hash_engine(100, 4, is_asynchronous=True)
    seen = watched(engine)
    prompt = next(p for p in ([a, b] for a in range(90) for b in range(90)) if EOS in expected_tokens(p, 9, 64, True))
    expected = expected_tokens(prompt, 30, 64, True)
    done = run(engine, [Request(0, prompt, SamplingParams(max_tokens=30))])[0]
    assert (done.token_ids, done.finish_reason) == (expected, "stop")
    assert len(seen) == len(expected) + 1
    assert engine.stats.generated_tokens == len(expected)


def test_a_request_can_be_aborted_while_its_token_is_drawn() -> None:
    engine = hash_engine(100, 4, is_asynchronous=True)
    for row in range(3):
        engine.add(Request(row, [row, 5], SamplingParams(max_tokens=3, ignore_eos=True)))
    for _ in range(3):
        assert engine.step() == []
    assert engine.num_unfinished == 3
    assert not engine.abort(1), "its last token has been read already"
    assert engine.has_unfinished, "completions that were read early are still to be returned"
    assert sorted(c.row_id for c in engine.step()) == [0, 1, 2]  # type: ignore[type-var]
    engine.add(Request("long", [1, 2], SamplingParams(max_tokens=30, ignore_eos=True)))
    engine.step()
    engine.step()
    assert engine.abort("long")
    assert not engine.has_unfinished
    assert engine.step() == []
    assert engine.pool.num_held == 0


def test_a_sequence_in_flight_that_no_longer_fits_is_an_error_row() -> None:
    engine = hash_engine(100, 4, is_asynchronous=True)

    def fail_late(step: StepInput, future: FutureTokens | None) -> None:
        if int(step.context_len_S.max()) > 8:  # it needs a new block
            raise MemoryError

    before_each_step(engine, fail_late)
    done = run(engine, [Request(0, [1, 2, 3, 4, 5], SamplingParams(max_tokens=9, ignore_eos=True))])
    assert (done[0].error, done[0].token_ids) == ("out_of_memory", [])
    first, second, third, fourth = expected_tokens([1, 2, 3, 4, 5], 4, 64, False)
    assert fourth not in (first, second, third)
    stops = SamplingParams(max_tokens=9, stop_token_ids=(fourth,), ignore_eos=True)
    done = run(engine, [Request(0, [1, 2, 3, 4, 5], stops)])
    assert done[0].token_ids == [first, second, third, fourth], "it had ended before the step that did not fit"


def test_a_step_that_is_interrupted_leaves_no_placeholder() -> None:
    engine, at = hash_engine(100, 4, is_asynchronous=True), iter(range(100))
    request = Request(0, [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.add(request)

    def interrupt(step: StepInput, future: FutureTokens | None) -> None:
        if next(at) == 3:
            raise KeyboardInterrupt

    before_each_step(engine, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(engine, [])
    check_tokens(run(engine, []), [request])


# -- rows that are drawn, penalised or masked


def requests_of(seed: int) -> list[Request]:
    return odd_requests(np.random.default_rng(seed), 40, 64)


def engine_of(is_asynchronous: bool, num_blocks: int = 120, **options: Any) -> Engine:
    return hash_engine(num_blocks, 4, is_asynchronous=is_asynchronous, **({"max_num_batched_tokens": 24} | options))


def waiting(seed: int) -> dict[int, Completion]:
    """Return the completions of an engine that waits for each step and has room for all."""
    return run(roomy_engine(64, None), requests_of(seed), check=False)


@pytest.mark.parametrize("seed", range(4))
def test_every_kind_of_row_overlaps(seed: int) -> None:
    engine = engine_of(True, max_num_seqs=10)
    seen = watched(engine)
    assert same(run(engine, requests_of(seed), arrivals=np.random.default_rng(seed)), waiting(seed))
    assert sum(late > 0 for _, late in seen) > 0.9 * len(seen)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_preempted_draw_the_same_when_they_resume(seed: int) -> None:
    engine = engine_of(True, num_blocks=20, max_num_seqs=8)
    # Admit more rows than fit in the end.
    engine.scheduler.admission.expected_output, engine.scheduler.admission.min_history = 1, 1000
    seen = watched(engine)
    assert same(run(engine, requests_of(seed)), waiting(seed))
    assert engine.stats.num_preemptions > 2
    assert sum(late > 0 for _, late in seen) > len(seen) / 2


@pytest.mark.parametrize("seed", range(3))
def test_04_steps_that_do_not_fit_are_repeated_and_draw_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine = engine_of(True)
    sample, failed = engine.runner.sample, []

    def fail_sometimes(step: StepInput, future: FutureTokens | None) -> None:
        if len(step.token_id_T) > 2 and rng.random() < 0.15:
            failed.append("execute")
            raise MemoryError

    def sample_or_fail(logits_RV: torch.Tensor, sampling_params_5R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(logits_RV) > 1 and rng.random() < 0.3:
            failed.append("sample")
            raise MemoryError
        return sample(logits_RV, sampling_params_5R)

    before_each_step(engine, fail_sometimes)
    engine.runner.sample = sample_or_fail  # type: ignore[method-assign]
    assert same(run(engine, requests_of(seed), arrivals=rng), waiting(seed))
    assert min(failed.count("execute"), failed.count("sample")) > 2
    assert engine.stats.num_out_of_memory == len(failed)


@pytest.mark.parametrize("seed", range(3))
def test_nan_logits_end_their_row_only(seed: int) -> None:
    ahead, whole = engine_of(True, bad_token=13), waiting(seed)
    broken = run(engine_of(False, bad_token=13), requests_of(seed), arrivals=np.random.default_rng(seed))
    assert same(run(ahead, requests_of(seed), arrivals=np.random.default_rng(seed)), broken)
    errors = {row for row, completion in broken.items() if completion.error == "non_finite_logits"}
    assert len(errors) > 2
    sound = {row: completion for row, completion in broken.items() if row not in errors}
    assert same(sound, {row: whole[row] for row in sound})
