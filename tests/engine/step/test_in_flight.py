"""A step is planned while the one before it is still being drawn: same tokens, and nothing is waited for in vain."""

import numpy as np
import pytest

from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from tests.engine.hash_runner import EOS, VOCAB, before_each_step, check_tokens, expected_tokens, hash_engine
from tests.engine.schedule.test_scheduler import random_requests, run


def watched(engine) -> list[tuple[int, int]]:
    """(tokens, future tokens among them) of each step, as they come."""
    seen: list[tuple[int, int]] = []
    before_each_step(
        engine, lambda step, future: seen.append((len(step.token_id_T), 0 if future is None else len(future.place_F)))
    )
    return seen


def test_while_all_rows_are_plain_every_step_is_launched_before_the_last_ones_tokens_are_read() -> None:
    engine = hash_engine(100, 4, is_asynchronous=True, max_num_batched_tokens=64)
    seen = watched(engine)
    requests = [Request(row, [row, 5, 6], SamplingParams(max_tokens=10, ignore_eos=True)) for row in range(6)]
    done = run(engine, requests)
    assert seen == [(18, 0)] + [(6, 6)] * 9, "ten steps for ten tokens, none for what ends by its length"
    assert all(done[row].token_ids == expected_tokens([row, 5, 6], 10, 64, False) for row in range(6))


def test_a_sequence_that_ends_itself_is_computed_once_too_often_and_its_row_is_dropped() -> None:
    engine = hash_engine(100, 4, is_asynchronous=True)
    seen = watched(engine)
    prompt = next(p for p in ([a, b] for a in range(90) for b in range(90)) if EOS in expected_tokens(p, 9, 64, True))
    expected = expected_tokens(prompt, 30, 64, True)
    done = run(engine, [Request(0, prompt, SamplingParams(max_tokens=30))])[0]
    assert (done.token_ids, done.finish_reason) == (expected, "stop")
    assert len(seen) == len(expected) + 1
    assert engine.stats.generated_tokens == len(expected)


def test_options_that_look_at_the_output_see_all_of_it() -> None:
    rng = np.random.default_rng(1)
    params = [
        SamplingParams(max_tokens=12, temperature=1.0, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=12, repetition_penalty=3.0, ignore_eos=True),
        SamplingParams(max_tokens=12, frequency_penalty=2.0, ignore_eos=True),
        SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=12, stop_token_ids=tuple(range(40))),
        SamplingParams(max_tokens=12, min_tokens=5),
        SamplingParams(max_tokens=30, ignore_eos=True),
    ]
    prompts = [rng.integers(0, VOCAB - 1, int(rng.integers(1, 20))).tolist() for _ in range(42)]
    both = []
    for is_asynchronous in (False, True):
        engine = hash_engine(60, 4, is_asynchronous=is_asynchronous, max_num_batched_tokens=24)
        seen = watched(engine)
        requests = [Request(row, prompt, params[row % len(params)]) for row, prompt in enumerate(prompts)]
        done = run(engine, requests, arrivals=np.random.default_rng(3))
        both.append([(done[row].token_ids, done[row].finish_reason, done[row].logprobs) for row in range(42)])
        assert any(late for _, late in seen) == is_asynchronous
    assert both[0] == both[1]


def test_fault_49_nan_logits_in_flight_end_their_row_only() -> None:
    rng = np.random.default_rng(7)
    bad, ended = 13, 0
    for seed in range(6):
        engine = hash_engine(40, 4, bad_token=bad, is_asynchronous=True)
        requests = random_requests(np.random.default_rng(seed), 30, 64)
        done = run(engine, requests, arrivals=rng)
        for request in requests:
            expected = expected_tokens(
                request.prompt_token_ids, request.params.max_tokens, 64, not request.params.ignore_eos
            )
            known = [*request.prompt_token_ids, *expected]
            if bad in known[:-1]:
                ended += 1
                assert done[request.row_id].error == "non_finite_logits"
            else:
                assert done[request.row_id].token_ids == expected
    assert ended > 5


def test_a_request_can_be_aborted_while_its_token_is_drawn() -> None:
    engine = hash_engine(100, 4, is_asynchronous=True)
    for row in range(3):
        engine.add(Request(row, [row, 5], SamplingParams(max_tokens=3, ignore_eos=True)))
    for _ in range(3):
        assert engine.step() == []
    assert engine.num_unfinished == 3
    assert not engine.abort(1), "its last token is there already"
    assert engine.has_unfinished, "what was read early is still to be handed over"
    assert sorted(c.row_id for c in engine.step()) == [0, 1, 2]  # type: ignore[type-var]
    engine.add(Request("long", [1, 2], SamplingParams(max_tokens=30, ignore_eos=True)))
    engine.step()
    engine.step()
    assert engine.abort("long")
    assert not engine.has_unfinished
    assert engine.step() == []
    assert engine.pool.num_held == 0


def test_sequences_are_given_up_only_when_all_their_tokens_are_known() -> None:
    engine = hash_engine(17, 4, max_num_seqs=8, enable_prefix_caching=False, is_asynchronous=True)
    engine.scheduler.admission.expected_output = 1  # expects far too little, so that it admits far too much
    seen = watched(engine)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    done = run(engine, [Request(row, [row, 5, 6, 7, 8, 9], params) for row in range(8)])
    assert all(done[row].token_ids == expected_tokens([row, 5, 6, 7, 8, 9], 40, 64, False) for row in range(8))
    assert engine.stats.num_preemptions > 3
    assert sum(late > 0 for _, late in seen) > len(seen) / 2


def test_fault_04_a_sequence_in_flight_that_fits_no_more_is_an_error_row() -> None:
    engine = hash_engine(100, 4, is_asynchronous=True)

    def fail_late(step: StepInput, future: FutureTokens | None) -> None:
        if int(step.context_len_S.max()) > 8:  # it was to begin a block
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
