"""Several calls on one engine: each gets the completions of its own requests, and frees all that it held."""

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.engine.completion import Completion
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens, StepInFlight
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.errors import ConfigError
from tests.engine.drafts.proposers import looking_up
from tests.engine.hash_runner import VOCAB, before_each_step, check_tokens, hash_engine
from tests.engine.schedule.test_scheduler import run
from tests.engine.step.test_in_flight_drafts import drafting_engine

MEMORY = 2  # tokens that the next one depends on, so that texts repeat themselves


def row(row_id: object, first: int, num_tokens: int) -> Request:
    return Request(row_id, [first, 5, 6], SamplingParams(max_tokens=num_tokens, ignore_eos=True))


def rows(first: int, count: int, num_tokens: int) -> list[Request]:
    return [row(n, first + n, num_tokens) for n in range(count)]


def check(completions: list[Completion], requests: list[Request], memory: int | None = None) -> None:
    assert sorted(c.row_id for c in completions) == sorted(r.row_id for r in requests)  # type: ignore[type-var]
    check_tokens({c.row_id: c for c in completions}, requests, memory=memory)


def check_empty(engine: Engine) -> None:
    assert not engine.has_unfinished
    assert engine.pool.num_held == 0
    assert engine.table.num_free_slots == engine.table.num_slots
    engine.pool.check()


def generated(engine: Engine, requests: list[Request]) -> list[Completion]:
    return engine.generate([r.prompt_token_ids for r in requests], [r.params for r in requests])


@pytest.mark.parametrize("num_seqs", [2, 4, 16])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_an_abandoned_stream_is_aborted_and_no_other_call_gets_its_completions(
    num_seqs: int, is_asynchronous: bool
) -> None:
    engine = hash_engine(200, 4, max_num_seqs=num_seqs, is_asynchronous=is_asynchronous)
    stream = engine.stream([row(0, 1, 2), *rows(10, 20, 40)[1:]])
    assert next(stream).row_id == 0
    stream.close()
    check_empty(engine)
    assert engine.step() == []
    ours = rows(50, 3, 6)
    check(generated(engine, ours), ours)
    check(list(engine.stream(ours[:1])), ours[:1])
    check_empty(engine)


def test_a_stream_ends_when_its_last_reference_is_dropped() -> None:
    engine = hash_engine(200, 4)
    next(engine.stream([row(0, 1, 2), *rows(10, 20, 40)[1:]]))
    check_empty(engine)
    with hash_engine(200, 4) as closed:
        stream = closed.stream([*rows(10, 3, 40)[1:], row(0, 1, 2)])
        next(stream)
    with pytest.raises(ConfigError, match="closed"):
        next(stream)


def test_a_stream_that_the_garbage_collector_ends_in_the_middle_of_a_step_is_aborted_after_it() -> None:
    engine = hash_engine(200, 4)
    ours = rows(60, 5, 6)
    held: list[object] = [engine.stream([row(0, 1, 2), *rows(10, 20, 40)[1:]])]
    held.append(held)  # only the collector can free it
    next(held[0])  # type: ignore[call-overload]
    del held

    def collect(step: StepInput, future: FutureTokens | None) -> None:
        assert engine.scheduler.running.size, "the step has running sequences"
        gc.collect()

    before_each_step(engine, collect)
    check(generated(engine, ours), ours)
    check_empty(engine)


def test_requests_that_end_while_an_abandoned_stream_is_closed_are_dropped_with_it() -> None:
    """These are a rejected one and, with a step in flight, one whose last token has been read already."""
    engine = hash_engine(200, 4, is_asynchronous=True)
    source = iter([row("first", 1, 1), row("next", 2, 2), row("empty", 3, 2)])
    stream = engine.stream(source)
    assert next(stream).row_id == "first"
    engine.add(row("added", 4, 3))
    stream.close()
    check(list(run(engine, []).values()), [row("added", 4, 3)])
    stream = engine.stream([row("first", 1, 1), *rows(10, 12, 4), Request("empty", [], SamplingParams())])
    next(stream)
    stream.close()
    check_empty(engine)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_streams_and_added_requests_with_equal_ids_get_their_own(is_asynchronous: bool) -> None:
    engine = hash_engine(200, 4, is_asynchronous=is_asynchronous)
    added, first, second = rows(1, 5, 9), rows(20, 30, 7), rows(60, 20, 5)
    for each in added:
        engine.add(each)
    streams = {"first": engine.stream(first), "second": engine.stream(second)}
    done: dict[str, list[Completion]] = {"first": [], "second": []}
    while streams:
        for name in list(streams):
            completion = next(streams[name], None)
            if completion is None:
                del streams[name]
            else:
                done[name].append(completion)
    check(done["first"], first)
    check(done["second"], second)
    requests = rows(80, 3, 4)
    check(generated(engine, requests), requests)
    assert engine.num_unfinished == len(added), "they are still to be returned"
    check(list(run(engine, []).values()), added)
    check_empty(engine)


def test_steps_of_other_calls_lose_no_completion_of_a_waiting_stream() -> None:
    engine = hash_engine(200, 4)
    ours = rows(20, 8, 7)
    stream = engine.stream(ours)
    done = [next(stream)]
    while engine.has_unfinished:
        assert engine.step() == []
    other = rows(40, 2, 30)
    check(generated(engine, other), other)
    num_steps = engine.stats.num_steps
    check([*done, *stream], ours)
    assert engine.stats.num_steps == num_steps, "all were complete"


def test_unfetched_completions_beyond_the_streams_lookahead_do_not_stop_it() -> None:
    engine = hash_engine(200, 4, max_num_seqs=2)
    added, ours = rows(1, 20, 2), rows(30, 10, 3)
    for each in added:
        engine.add(each)
    check(list(engine.stream(ours)), ours)
    while engine.num_unfinished > len(engine.step()):
        pass
    check(list(engine.stream(ours)), ours)


def test_an_added_request_is_aborted_by_its_id_and_one_of_a_stream_too() -> None:
    engine = hash_engine(200, 4)
    stream = engine.stream(rows(20, 8, 7))
    engine.add(row("added", 1, 20))
    done = [next(stream)]
    aborted = next(n for n in range(8) if n != done[0].row_id and n in {c.request.row_id for c in _running(engine)})
    assert engine.abort("added")
    assert engine.abort(aborted)
    check([*done, *stream], [each for each in rows(20, 8, 7) if each.row_id != aborted])
    check_empty(engine)


def _running(engine: Engine):
    return [engine.table.at(slot) for slot in engine.scheduler.running.tolist()]


def test_a_rejected_request_has_ended_and_is_not_aborted() -> None:
    engine = hash_engine(200, 4)
    engine.add(Request("empty", [], SamplingParams()))
    assert not engine.abort("empty")
    assert engine.num_unfinished == 1
    assert [completion.error for completion in engine.step()] == ["empty_prompt"]
    check_empty(engine)


def test_a_failing_source_frees_all_sequences() -> None:
    engine = hash_engine(200, 4)

    def source():
        yield from rows(1, 14, 9)
        raise OSError("the file is missing")

    with pytest.raises(OSError, match="is missing"):
        list(engine.stream(source()))
    check_empty(engine)


class _Interrupt:
    """Wrapper of a function that raises KeyboardInterrupt in one of its calls, before or after its work."""

    def __init__(self, function: Callable, at: int, before: bool) -> None:
        self._function, self._at, self._before = function, at, before
        self.has_raised = False

    def __call__(self, *arguments, **named):
        self._at -= 1
        if self._at == 0 and self._before:
            self.has_raised = True
            raise KeyboardInterrupt
        result = self._function(*arguments, **named)
        if self._at == 0:
            self.has_raised = True
            raise KeyboardInterrupt
        return result


def looking_up_engine(is_asynchronous: bool = False) -> Engine:
    return looking_up(hash_engine(120, 4, memory=MEMORY, is_asynchronous=is_asynchronous, max_num_batched_tokens=64))


ENGINES: dict[str, tuple[Callable[[], Engine], int | None]] = {
    "plain": (lambda: hash_engine(120, 4), None),
    "ahead": (lambda: hash_engine(120, 4, is_asynchronous=True), None),
    "looking up": (looking_up_engine, MEMORY),
    "looking up, ahead": (lambda: looking_up_engine(True), MEMORY),
    "draft model, ahead": (lambda: drafting_engine(4, 0.3)[0], None),
}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("before", [False, True])
def test_after_an_interrupted_call_the_next_one_and_added_requests_are_correct(kind: str, before: bool) -> None:
    """A Ctrl-C in a notebook may interrupt a model's step, or the wait for a device."""
    make, memory = ENGINES[kind]
    interrupted = 0
    for at in range(1, 12):
        for function in ("execute", "output"):
            engine = make()
            added, requests, ours = rows(1, 3, 12), rows(40, 9, 30), rows(60, 3, 6)
            for each in added:
                engine.add(each)
            engine.add(Request("empty", [], SamplingParams()))
            with pytest.MonkeyPatch.context() as patch:
                if function == "execute":
                    interrupt = _Interrupt(engine.runner.execute, at, before)
                    patch.setattr(engine.runner, "execute", interrupt)
                else:
                    interrupt = _Interrupt(StepInFlight.output, at, before)
                    patch.setattr(StepInFlight, "output", lambda flight, interrupt=interrupt: interrupt(flight))
                try:
                    generated(engine, requests)
                except KeyboardInterrupt:
                    assert engine.num_unfinished == len(added) + 1
            interrupted += interrupt.has_raised
            check(generated(engine, ours), ours, memory)
            done = run(engine, [])
            assert done.pop("empty").error == "empty_prompt"  # type: ignore[call-overload]
            check(list(done.values()), added, memory)
            check_empty(engine)
    assert interrupted >= 11


def test_a_warm_up_while_requests_run_is_refused_and_loses_none() -> None:
    engine = hash_engine(200, 4)
    added = rows(1, 3, 4)
    for each in added:
        engine.add(each)
    with pytest.raises(ConfigError, match="warm_up: 3 sequences"):
        engine.warm_up()
    check(list(run(engine, []).values()), added)
    engine.warm_up()
    check_empty(engine)


def test_an_interrupted_warm_up_leaves_the_engine_as_it_was() -> None:
    engine = looking_up_engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "execute", _Interrupt(engine.runner.execute, 2, False))
        with pytest.raises(KeyboardInterrupt):
            engine.warm_up()
    check_empty(engine)
    assert engine.spec_decoder is not None
    assert engine.stats.num_steps == 0


def drawing_engine() -> Engine:
    """Build an engine with equal logits, so that a row's tokens depend on its seed only."""
    engine = hash_engine(200, 4)
    engine.runner.execute = lambda step, future=None: torch.zeros(len(step.logit_row_R), VOCAB)  # type: ignore[method-assign]
    return engine


def test_without_a_seed_the_position_in_the_call_decides() -> None:
    """The position of requests added one by one is their number so far; a refused one does not count."""
    engine, params = drawing_engine(), SamplingParams(max_tokens=9, temperature=1.0, ignore_eos=True)
    prompts, added = [[1, 2]] * 4, [Request(row, [1, 2], params) for row in range(2)]
    seeded = [replace(params, seed=n) for n in range(4)]
    expected = [completion.token_ids for completion in drawing_engine().generate(prompts, seeded)]
    assert len(set(map(tuple, expected))) == 4
    for _ in range(2):
        assert [c.token_ids for c in engine.generate(prompts, params)] == expected
        done = {c.row_id: c.token_ids for c in engine.stream(Request(row, [1, 2], params) for row in range(4))}
        assert [done[row] for row in range(4)] == expected
    engine.warm_up()
    for first in (0, 2):
        for nothing in ([1.5], [None]):
            with pytest.raises(ConfigError, match="ids of its tokens"):
                engine.add(Request("no ids", nothing, params))  # type: ignore[arg-type]
        done = run(engine, added)
        assert [done[row].token_ids for row in range(2)] == expected[first : first + 2]
    check_empty(engine)


def test_token_ids_of_any_size_and_kind() -> None:
    engine = hash_engine(200, 4, max_num_seqs=4)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    plain = engine.generate([[1, 5, 6]], params)[0]
    given = (np.array([1, 5, 6]), torch.tensor([1, 5, 6]), np.array([1, 5, 6], dtype=np.uint8), (1, 5, 6))
    for ids in given:
        assert [c.token_ids for c in engine.generate([ids, ids], params)] == [plain.token_ids] * 2  # type: ignore[list-item]
    assert engine.generate(np.array([1, 5, 6]), params)[0].token_ids == plain.token_ids  # type: ignore[arg-type]
    for wrong in (2**31, 2**40, 2**80, -1, -(2**80)):
        (completion,) = engine.generate([[1, wrong, 6]], params)
        assert completion.error == "token_out_of_vocabulary"
        assert f"contains token id {wrong}," in completion.error_message
    for nothing in ([1.5], [None], ["a"], [[1]], 7):
        with pytest.raises(ConfigError, match="ids of its tokens"):
            engine.generate([[1, 5], nothing], params)  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="ids of its tokens"):
            engine.add(Request("no ids", nothing, params))  # type: ignore[arg-type]
    check_empty(engine)


def test_prompts_and_params_come_from_any_iterable() -> None:
    engine = hash_engine(60, 4)
    prompts, each = [[1, 5, 6], [7, 8]], [row(0, 1, 3).params, row(1, 1, 5).params]
    expected = [c.token_ids for c in engine.generate(prompts, each)]
    assert [c.token_ids for c in engine.generate(iter(prompts), iter(each))] == expected
    assert [c.token_ids for c in engine.generate(dict(enumerate(prompts)).values(), each)] == expected
    assert engine.generate(iter([])) == []
    assert [c.result for c in engine.score(iter(prompts))] == [c.result for c in engine.score(prompts)]


def test_threads_take_turns_and_each_gets_its_own_completions() -> None:
    engine, wrong = hash_engine(60, 4, max_num_seqs=4), []

    def generate_rows(thread: int) -> None:
        try:
            for turn in range(4):
                ours = rows(24 * thread + 6 * turn, 6, 12)
                check(generated(engine, ours), ours)
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds: switched in the middle of nearly every step
    try:
        threads = [threading.Thread(target=generate_rows, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    check_empty(engine)
