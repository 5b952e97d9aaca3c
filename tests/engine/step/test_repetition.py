"""Rows that repeat themselves end at the same token, whatever else the steps compute."""

import numpy as np
import pytest

from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import RepetitionDetectionParams, SamplingParams
from tests.engine.drafts.proposers import Recorded, draft_with
from tests.engine.drafts.test_draft_model import Fitful
from tests.engine.hash_runner import EOS, expected_tokens, hash_engine
from tests.engine.schedule.test_scheduler import run


def next_in_cycle(context: list[int], memory: int | None = None) -> int:
    """Return the next token of cycles of one to ten tokens; the longest contains EOS."""
    tens, at = divmod(context[-1], 10)
    return min(10 * tens + (0 if at in (tens, 9) else at + 1), EOS)


@pytest.fixture
def cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.hash_runner.next_token", next_in_cycle)


def is_loop(generated: list[int], wanted: RepetitionDetectionParams) -> bool:
    """Return whether the text ends in a loop, by comparing tokens."""
    for size in range(wanted.min_pattern_size, wanted.max_pattern_size + 1):
        if size * wanted.min_count <= len(generated):
            tail = generated[len(generated) - size * wanted.min_count :]
            if tail == tail[:size] * wanted.min_count:
                return True
    return False


def until_loop(generated: list[int], params: SamplingParams) -> tuple[list[int], bool]:
    assert params.repetition_detection is not None
    for end in range(max(params.min_tokens, 1), len(generated) + 1):
        if is_loop(generated[:end], params.repetition_detection):
            return generated[:end], True
    return generated, False


def guarded_requests(rng: np.random.Generator, count: int) -> list[Request]:
    requests = []
    for row in range(count):
        low = int(rng.integers(1, 4))
        loop = RepetitionDetectionParams(low + int(rng.integers(0, 12)), int(rng.integers(2, 4)), low)
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 45)),
            min_tokens=0 if row % 3 else 1,
            ignore_eos=bool(row % 2),
            logprobs=0 if row % 7 == 0 else None,
            repetition_detection=loop if row % 5 else None,
        )
        requests.append(Request(row, rng.integers(0, EOS, int(rng.integers(1, 30))).tolist(), params))
    return requests


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drafts", ["none", "ngram", "recorded"])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_row_ends_at_the_same_token_with_drafts_preemption_and_any_chunks(
    cycles: None, seed: int, drafts: str, is_asynchronous: bool
) -> None:
    rng = np.random.default_rng(seed)
    requests = guarded_requests(rng, 40)
    free = {r.row_id: expected_tokens(r.prompt_token_ids, 60, 64, not r.params.ignore_eos) for r in requests}
    size = int(rng.choice([1, 4, 8]))
    engine = hash_engine(
        -(-64 // size) + int(rng.integers(0, 16 // size)),
        size,
        is_asynchronous=is_asynchronous,
        max_num_batched_tokens=int(rng.integers(9, 60)),
    )
    # Admit more rows than fit in the end.
    engine.scheduler.admission.expected_output, engine.scheduler.admission.min_history = 1, 10**9
    if drafts != "none":
        proposer = NgramProposer(engine.table, 5) if drafts == "ngram" else Recorded(engine.table, free, rng)
        draft_with(engine, proposer, Fitful(5, rng))
    done, num_loops = run(engine, requests, arrivals=rng), 0
    for request in requests:
        params, prompt = request.params, request.prompt_token_ids
        expected = expected_tokens(prompt, params.max_tokens, 64, not params.ignore_eos)
        loops = False
        if params.repetition_detection is not None:
            expected, loops = until_loop(expected, params)
        stops = not params.ignore_eos and expected[-1] == EOS
        got = done[request.row_id]  # type: ignore[index]
        assert got.token_ids == expected, request.row_id
        assert got.finish_reason == ("stop" if stops else "length_loop" if loops else "length")
        assert got.logprobs is None or [t.token_id for t in got.logprobs] == expected
        assert got.text == " ".join(map(str, expected[:-1] if stops else expected))
        num_loops += loops and not stops
    assert num_loops > 8
    assert engine.stats.generated_tokens == sum(len(d.token_ids) for d in done.values())
    assert drafts == "none" or sum(engine.stats.accepted_by_position) > 0
    assert engine.stats.num_preemptions > 0


def test_nothing_loops_before_min_tokens_and_a_loop_at_the_limit_is_reported_as_one(cycles: None) -> None:
    engine = hash_engine(100, 4)
    loop = RepetitionDetectionParams(12, 2)
    free = expected_tokens([3, 5], 60, 64, False)
    end = len(until_loop(free, SamplingParams(repetition_detection=loop))[0])

    def ended(max_tokens: int, min_tokens: int = 0) -> tuple[int, str]:
        params = SamplingParams(max_tokens, min_tokens, ignore_eos=True, repetition_detection=loop)
        got = engine.generate([[3, 5]], params)[0]
        return len(got.token_ids), got.finish_reason

    assert ended(50) == (end, "length_loop")
    assert ended(50, end + 7) == (end + 7, "length_loop")
    assert ended(end) == (end, "length_loop")
    assert ended(end - 1) == (end - 1, "length")
