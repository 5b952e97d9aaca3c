"""Drafts that are known beforehand: what is counted, where rows end, and that nothing behind their end is used."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.drafts.policy import FixedDrafts
from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.stats import EngineStats
from tests.engine.drafts.proposers import Certain, Recorded
from tests.engine.hash_runner import EOS, VOCAB, expected_tokens, hash_engine
from tests.engine.schedule.test_scheduler import run


def certain_run(drafts: list[int], params: SamplingParams, most: int, bad_token: int | None = None):
    """The completion of the prompt [3, 1, 4], and its engine."""
    engine = hash_engine(64, 4, bad_token=bad_token, max_num_batched_tokens=64)
    proposer = Certain(engine.table, {0: drafts}, np.random.default_rng(0), most)
    engine.draft_as(Drafting(proposer, FixedDrafts(), engine.scheduler))
    return run(engine, [Request(0, [3, 1, 4], params)])[0], engine


FREE = expected_tokens([3, 1, 4], 40, 64, False)


def test_places_from_the_eighth_on_are_counted_together() -> None:
    _, engine = certain_run(FREE, SamplingParams(max_tokens=11, ignore_eos=True), 10)
    assert engine.stats.drafted_by_place == engine.stats.accepted_by_place == [1, 1, 1, 1, 1, 1, 1, 3]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stop": (f" {FREE[5]} {FREE[6]} ",)}, "stop"),
        ({"stop_token_ids": (FREE[8],)}, "stop"),
        ({"max_tokens": 7}, "length"),
    ],
)
def test_a_sequence_ends_where_plain_steps_would_end_it(options: dict, reason: str) -> None:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | options)
    plain = run(hash_engine(64, 4), [Request(0, [3, 1, 4], params)])[0]
    length = len(plain.token_ids)
    assert 6 <= length < 12
    for most in range(1, 12):
        done, engine = certain_run(FREE, params, most)
        assert (done.token_ids, done.finish_reason, done.text) == (FREE[:length], reason, plain.text)
        assert engine.stats.generated_tokens == length
        assert engine.stats.num_steps == -(-length // (most + 1))
        again = run(engine, [Request(0, [3, 1, 4, *FREE[:20]], SamplingParams(max_tokens=1))])[0]
        assert again.num_cached_tokens == 0, "neither what it generated nor what lies behind its end is findable"


def test_eos_among_accepted_drafts_ends_the_sequence() -> None:
    params = SamplingParams(max_tokens=40)
    for row in range(3000):
        plain = expected_tokens([row // 90, row % 90], 40, 64, True)
        if EOS in plain[3:]:
            break
    engine = hash_engine(64, 4, max_num_batched_tokens=64)
    beyond = {0: expected_tokens([row // 90, row % 90], 40, 64, False)}
    engine.draft_as(
        Drafting(Certain(engine.table, beyond, np.random.default_rng(0), 30), FixedDrafts(), engine.scheduler)
    )
    done = run(engine, [Request(0, [row // 90, row % 90], params)])[0]
    assert (done.token_ids, done.finish_reason) == (plain, "stop")
    assert engine.stats.num_steps < len(plain)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 9])
def test_non_finite_logits_end_a_row_only_where_it_would_have_come_to_them(most: int) -> None:
    """Behind a wrong draft, and behind the end of a sequence, broken logits are nobody's."""
    plain = SamplingParams(max_tokens=20, ignore_eos=True)
    absent = next(token for token in range(VOCAB) if token not in FREE[:20])
    misled, engine = certain_run([absent if i % 5 == 4 else token for i, token in enumerate(FREE)], plain, most, absent)
    assert (misled.error, misled.token_ids) == (None, FREE[:20])
    assert sum(engine.stats.accepted_by_place) < sum(engine.stats.drafted_by_place)
    first = FREE.index(FREE[6])
    broken, engine = certain_run(FREE, plain, most, FREE[6])
    assert (broken.error, broken.token_ids) == ("non_finite_logits", [])
    assert f"after {first + 1} generated tokens" in (broken.error_message or "")
    engine.pool.check()
    stopped, _ = certain_run(FREE, replace(plain, stop_token_ids=(FREE[6],)), most, FREE[6])
    assert (stopped.error, stopped.token_ids) == (None, FREE[: first + 1])


def test_poisoned_blocks_of_a_broken_row_are_cleaned_and_not_shared() -> None:
    engine = hash_engine(64, 4, bad_token=77)
    outputs = {row: expected_tokens([row, 5, 6, 7, 8], 6, 64, False) for row in range(3)} | {"bad": [1] * 9}
    engine.draft_as(
        Drafting(Recorded(engine.table, outputs, np.random.default_rng(3)), FixedDrafts(), engine.scheduler)
    )
    good = [Request(row, [row, 5, 6, 7, 8], SamplingParams(max_tokens=6, ignore_eos=True)) for row in range(3)]
    done = run(engine, [*good, Request("bad", [1, 2, 77, 4, 5, 6], SamplingParams(max_tokens=6, ignore_eos=True))])
    assert done["bad"].error == "non_finite_logits"
    assert [done[row].token_ids for row in range(3)] == [outputs[row] for row in range(3)]
    assert run(engine, [Request("bad", [1, 2, 77, 4, 5, 6], SamplingParams())])["bad"].num_cached_tokens == 0


def test_totals_travel_by_name_and_come_back() -> None:
    _, engine = certain_run(FREE, SamplingParams(max_tokens=11, ignore_eos=True), 10)
    before = replace(engine.stats)
    assert engine.stats.flat()["accepted_by_place.7"] == 3
    assert EngineStats.from_flat(engine.stats.flat() | {"other": 1}) == engine.stats
    run(engine, [Request(0, [3, 1, 4], SamplingParams(max_tokens=3, ignore_eos=True))])
    assert engine.stats.since(before).drafted_by_place == [1, 1, 0, 0, 0, 0, 0, 0], "a copy does not change"
