"""Drafts change the speed of generation only: the model of hash_runner exposes every mistake."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.engine.completion import Completion
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.engine import Engine
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.block_pool import ROOT, chain_hashes
from pipeline.engine.stats import EngineStats
from tests.engine.drafts.proposers import Certain, Recorded, draft_with
from tests.engine.drafts.random_rows import odd_requests, roomy_engine, same
from tests.engine.drafts.test_draft_model import Fitful
from tests.engine.hash_runner import VOCAB, check_tokens, expected_tokens, hash_engine, tight_engine
from tests.engine.schedule.test_scheduler import random_requests, run


def check_blocks(engine: Engine, texts: list[list[int]]) -> None:
    """Assert that findable blocks hold the tokens of their hash, which are part of a known text, and that blocks of a
    sequence hold its confirmed tokens."""
    size, cache = engine.pool.block_size, engine.runner.cache  # type: ignore[attr-defined]
    sound = {}
    for text in texts:
        whole = np.array(text[: len(text) // size * size], dtype=np.int32)
        sound |= dict(zip(chain_hashes(ROOT, whole, size), whole.reshape(-1, size).tolist()))
    for key, block in engine.pool._block_of.items():
        assert cache[block].tolist() == sound[key]
    for sequence in filter(None, engine.table.sequences):
        computed = int(engine.table.num_computed[sequence.slot])
        held = cache[engine.table.pages_of(sequence.slot)].reshape(-1)[:computed]
        assert held.tolist() == engine.table.token_ids[sequence.slot, :computed].tolist()


@pytest.mark.parametrize("layers", ["alike", "states"])
@pytest.mark.parametrize("seed", range(6))
def test_the_tokens_of_any_mix_are_those_of_plain_steps(seed: int, layers: str) -> None:
    """Rows share blocks, are cut and preempted in tiny caches, with all options; drafts are right, wrong or mixed."""
    rng = np.random.default_rng(seed)
    max_len = int(rng.choice([40, 64]))
    requests = odd_requests(rng, 40, max_len)
    plain = run(roomy_engine(max_len, None), requests, check=False)
    engine = tight_engine(rng, max_len, layers)
    outputs = {row: completion.token_ids for row, completion in plain.items()}
    proposer = Recorded(engine.table, outputs, rng, error_rate=float(rng.choice([0.0, 0.1, 0.5])))
    draft_with(engine, proposer, Fitful(int(rng.integers(1, 6)), rng))
    step, texts = engine.step, [r.prompt_token_ids + outputs[r.row_id] for r in requests]

    def step_and_check() -> list[Completion]:
        completions = step()
        check_blocks(engine, texts)
        return completions

    engine.step = step_and_check  # type: ignore[method-assign]
    assert same(run(engine, requests, arrivals=rng), plain)
    stats = engine.stats
    assert 0 < sum(stats.accepted_by_position) <= sum(stats.drafted_by_position)
    assert 0 < stats.num_draft_steps < stats.num_steps
    assert stats.generated_tokens == sum(len(c.token_ids) for c in plain.values())
    assert stats.prompt_tokens == sum(len(r.prompt_token_ids) for r in requests)
    assert max(engine.runner.tokens_per_step) <= engine.scheduler.max_num_batched_tokens  # type: ignore[attr-defined]
    assert not proposer.order_of
    assert proposer.num_finished == len(requests)


@pytest.mark.parametrize("seed", range(13))
def test_greedy_tokens_with_the_ngram_proposer_are_those_of_plain_steps(seed: int) -> None:
    """The model's memory is short, so that the proposer finds matches."""
    rng = np.random.default_rng(100 + seed)
    max_len = int(rng.choice([40, 64]))
    memory = int(rng.choice([1, 2]))
    engine = tight_engine(rng, max_len, memory=memory)
    draft_with(engine, NgramProposer(engine.table, int(rng.integers(1, 7)), 4096, 256))
    requests = random_requests(rng, 40, max_len)
    check_tokens(run(engine, requests, arrivals=rng), requests, max_len, memory)
    assert sum(engine.stats.accepted_by_position) > 0


def test_accepted_drafts_save_steps_and_are_counted_by_position() -> None:
    prompts = [[row, 5, 6] for row in range(4)]
    outputs = {row: expected_tokens(prompt, 30, 64, False) for row, prompt in enumerate(prompts)}
    engine = hash_engine(100, 4, max_num_seqs=4, max_num_batched_tokens=64)
    draft_with(engine, Certain(engine.table, outputs, np.random.default_rng(0), 3))
    done = run(engine, [Request(r, p, SamplingParams(max_tokens=30, ignore_eos=True)) for r, p in enumerate(prompts)])
    assert {row: c.token_ids for row, c in done.items()} == outputs
    stats = engine.stats
    # Four tokens a step, seven times, the first time with the prompt; then two are left, of which one can be drafted.
    assert (stats.num_steps, stats.num_draft_steps) == (8, 8)
    assert stats.drafted_by_position == stats.accepted_by_position == [32, 28, 28, 0, 0, 0, 0, 0]
    assert sum(engine.runner.tokens_per_step) == 4 * 3 + 4 * 7 + 32 + 28 + 28  # type: ignore[attr-defined]


def test_drafts_neither_preempt_nor_delay_a_row() -> None:
    """Wrong drafts in a cache that is too small cause the same steps as no drafts."""
    wrong = {row: [(t + 1) % VOCAB for t in expected_tokens([row, 5, 6], 30, 64, False)] for row in range(12)}

    def run_with(max_drafts: int) -> Engine:
        engine = hash_engine(
            24, 4, max_num_seqs=6, max_num_batched_tokens=30, max_model_len=64, enable_prefix_caching=False
        )
        engine.scheduler.admission.expected_output = 1
        if max_drafts:
            draft_with(engine, Certain(engine.table, wrong, np.random.default_rng(1), max_drafts))
        requests = [Request(r, [r, 5, 6], SamplingParams(max_tokens=30, ignore_eos=True)) for r in range(12)]
        done = run(engine, requests)
        assert all(done[r].token_ids == expected_tokens([r, 5, 6], 30, 64, False) for r in range(12))
        return engine

    plain = run_with(0).stats
    assert plain.num_preemptions > 0
    for max_drafts in (1, 5):
        stats = run_with(max_drafts).stats
        assert stats.accepted_by_position == [0] * 8
        assert stats.drafted_by_position[0] > 100
        assert (stats.num_steps, stats.num_preemptions) == (plain.num_steps, plain.num_preemptions)
        assert (stats.recomputed_tokens, stats.batch_sum) == (plain.recomputed_tokens, plain.batch_sum)


# -- drafts that are known beforehand


def certain_run(drafts: list[int], params: SamplingParams, max_drafts: int, bad_token: int | None = None):
    """Return the completion of the prompt [3, 1, 4], and its engine."""
    engine = hash_engine(64, 4, bad_token=bad_token, max_num_batched_tokens=64)
    draft_with(engine, Certain(engine.table, {0: drafts}, np.random.default_rng(0), max_drafts))
    return run(engine, [Request(0, [3, 1, 4], params)])[0], engine


FREE = expected_tokens([3, 1, 4], 40, 64, False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stop": (f" {FREE[5]} {FREE[6]} ",)}, "stop"),
        ({"stop_token_ids": (FREE[8],)}, "stop"),
        ({"max_tokens": 7}, "length"),
        ({"ignore_eos": False}, "stop"),
    ],
)
def test_a_sequence_ends_where_plain_steps_would_end_it(options: dict, reason: str) -> None:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | options)
    plain = run(hash_engine(64, 4), [Request(0, [3, 1, 4], params)])[0]
    length = len(plain.token_ids)
    assert 6 <= length <= 21
    for max_drafts in range(1, 12):
        done, engine = certain_run(FREE, params, max_drafts)
        assert (done.token_ids, done.finish_reason, done.text) == (FREE[:length], reason, plain.text)
        assert engine.stats.generated_tokens == length
        assert engine.stats.num_steps == -(-length // (max_drafts + 1))
        again = run(engine, [Request(0, [3, 1, 4, *FREE[:20]], SamplingParams(max_tokens=1))])[0]
        assert again.num_cached_tokens == 0, "neither generated tokens nor drafts after the end are findable"


@pytest.mark.parametrize("max_drafts", [1, 2, 3, 5, 9])
def test_non_finite_logits_end_a_row_only_where_plain_steps_would_compute_them(max_drafts: int) -> None:
    """Broken logits after a wrong draft, or after the end of a sequence, end no row."""
    plain = SamplingParams(max_tokens=20, ignore_eos=True)
    absent = next(token for token in range(VOCAB) if token not in FREE[:20])
    misled, engine = certain_run(
        [absent if i % 5 == 4 else token for i, token in enumerate(FREE)], plain, max_drafts, absent
    )
    assert (misled.error, misled.token_ids) == (None, FREE[:20])
    assert sum(engine.stats.accepted_by_position) < sum(engine.stats.drafted_by_position)
    first = FREE.index(FREE[6])
    broken, engine = certain_run(FREE, plain, max_drafts, FREE[6])
    assert (broken.error, broken.token_ids) == ("non_finite_logits", [])
    assert f"after {first + 1} generated tokens" in (broken.error_message or "")
    engine.pool.check()
    stopped, _ = certain_run(FREE, replace(plain, stop_token_ids=(FREE[6],)), max_drafts, FREE[6])
    assert (stopped.error, stopped.token_ids) == (None, FREE[: first + 1])


def test_totals_by_position_are_restored_from_flat_names() -> None:
    """Positions from the eighth on are counted together."""
    _, engine = certain_run(FREE, SamplingParams(max_tokens=11, ignore_eos=True), 10)
    assert engine.stats.drafted_by_position == engine.stats.accepted_by_position == [1, 1, 1, 1, 1, 1, 1, 3]
    before = replace(engine.stats)
    assert EngineStats.from_flat(engine.stats.flat() | {"other": 1}) == engine.stats
    run(engine, [Request(0, [3, 1, 4], SamplingParams(max_tokens=3, ignore_eos=True))])
    assert engine.stats.since(before).drafted_by_position == [1, 1, 0, 0, 0, 0, 0, 0], "a copy does not change"
