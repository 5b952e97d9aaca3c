"""Drafts change how fast tokens come and nothing else: see hash_runner for the model that gives away every mistake."""

import numpy as np
import pytest

from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import FixedDrafts, Offer, StepFacts, StepOutcome
from pipeline.engine.engine import Engine
from pipeline.engine.params import Completion, Request, SamplingParams
from pipeline.engine.schedule.block_pool import ROOT, chain_hashes
from pipeline.engine.schedule.sequence import SlotTable
from tests.engine.drafts.proposers import Certain, Recorded
from tests.engine.drafts.random_rows import odd_requests, roomy_engine, same, tight_engine
from tests.engine.hash_runner import VOCAB, expected_tokens, hash_engine
from tests.engine.schedule.test_scheduler import random_requests, run
from tests.engine.step.test_out_of_memory import fail_where


class Watched(FixedDrafts):
    """A fixed policy that keeps what it is told, and skips looking now and then."""

    def __init__(self, most: int, rng: np.random.Generator, table: SlotTable) -> None:
        self.most, self.rng, self.table = most, rng, table
        self.outcomes: list[StepOutcome] = []
        self.wanted = False

    def select(self, facts: StepFacts) -> bool:
        self.wanted = bool(self.rng.random() < 0.9)
        return self.wanted

    def lengths(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        assert self.wanted
        assert len(offer.slot_S) == facts.num_sequences
        assert facts.room >= 0 <= facts.num_prefill
        assert (offer.count_S < self.table.limit[offer.slot_S] - self.table.num_known[offer.slot_S]).all()
        return np.full_like(offer.count_S, self.most)

    def observe(self, outcome: StepOutcome) -> None:
        if outcome.verdict is not None:
            assert (outcome.verdict.accepted_D <= outcome.verdict.drafted_D).all()
            assert (outcome.verdict.drafted_D > 0).all()
        self.outcomes.append(outcome)

    def total(self, name: str) -> int:
        return sum(int(getattr(o.verdict, name).sum()) for o in self.outcomes if o.verdict is not None)


def check_blocks(engine: Engine, texts: list[list[int]]) -> None:
    """Every block that can be found holds what its hash stands for, and that is part of a text that is known for sure;
    every block of a sequence holds its confirmed tokens."""
    size, cache = engine.pool.block_size, engine.runner.cache  # type: ignore[attr-defined]
    sound = {}
    for text in texts:
        whole = np.array(text[: len(text) // size * size], dtype=np.int32)
        sound |= dict(zip(chain_hashes(ROOT, whole, size), whole.reshape(-1, size).tolist()))
    for key, block in engine.pool._block_of.items():
        assert cache[block].tolist() == sound[key]
    for sequence in filter(None, engine.table.sequences):
        computed = int(engine.table.num_computed[sequence.slot])
        held = cache[engine.table.blocks_of(sequence.slot)].reshape(-1)[:computed]
        assert held.tolist() == engine.table.token_ids[sequence.slot, :computed].tolist()


@pytest.mark.parametrize("seed", range(6))
def test_the_tokens_of_any_mix_are_those_of_plain_steps(seed: int) -> None:
    """Sharing, chunks, preemption, tiny caches, all options, drafts that are right, wrong and both."""
    rng = np.random.default_rng(seed)
    max_len = int(rng.choice([40, 64]))
    requests = odd_requests(rng, 40, max_len)
    plain = run(roomy_engine(max_len, None), requests, check=False)
    engine = tight_engine(rng, max_len, None)
    outputs = {row: completion.token_ids for row, completion in plain.items()}
    proposer = Recorded(engine.table, outputs, rng, error_rate=float(rng.choice([0.0, 0.1, 0.5])))
    policy = Watched(int(rng.integers(1, 6)), rng, engine.table)
    engine.draft_as(Drafting(proposer, policy, engine.scheduler))
    step, texts = engine.step, [r.prompt_token_ids + outputs[r.row_id] for r in requests]

    def step_and_check() -> list[Completion]:
        completions = step()
        check_blocks(engine, texts)
        return completions

    engine.step = step_and_check  # type: ignore[method-assign]
    assert same(run(engine, requests, arrivals=rng), plain)
    stats = engine.stats
    assert sum(stats.drafted_by_place) == policy.total("drafted_D") > 0
    assert sum(stats.accepted_by_place) == policy.total("accepted_D") > 0
    assert stats.num_draft_steps == sum(o.verdict is not None for o in policy.outcomes)
    assert stats.num_steps == len(policy.outcomes)
    assert stats.generated_tokens == sum(o.num_generated for o in policy.outcomes)
    assert stats.generated_tokens == sum(len(c.token_ids) for c in plain.values())
    assert stats.prompt_tokens == sum(len(r.prompt_token_ids) for r in requests)
    assert max(engine.runner.tokens_per_step) <= engine.scheduler.max_num_batched_tokens  # type: ignore[attr-defined]
    assert not proposer.order_of
    assert proposer.num_finished == len(requests)


@pytest.mark.parametrize("seed", range(13))
def test_greedy_tokens_with_the_ngram_proposer_are_those_of_plain_steps(seed: int) -> None:
    """40 prompts each; the model's memory is short, so that the proposer finds something."""
    rng = np.random.default_rng(100 + seed)
    max_len = int(rng.choice([40, 64]))
    memory = int(rng.choice([1, 2]))
    engine = tight_engine(rng, max_len, memory)
    engine.draft_as(
        Drafting(NgramProposer(engine.table, int(rng.integers(1, 7)), 4096, 256), FixedDrafts(), engine.scheduler)
    )
    requests = random_requests(rng, 40, max_len)
    done = run(engine, requests, arrivals=rng)
    for request in requests:
        eos = not request.params.ignore_eos
        expected = expected_tokens(request.prompt_token_ids, request.params.max_tokens, max_len, eos, memory)
        assert done[request.row_id].token_ids == expected
    assert sum(engine.stats.accepted_by_place) > 0


def test_accepted_drafts_save_steps_and_are_counted_by_place() -> None:
    prompts = [[row, 5, 6] for row in range(4)]
    outputs = {row: expected_tokens(prompt, 30, 64, False) for row, prompt in enumerate(prompts)}
    engine = hash_engine(100, 4, max_num_seqs=4, max_num_batched_tokens=64)
    engine.draft_as(
        Drafting(Certain(engine.table, outputs, np.random.default_rng(0), 3), FixedDrafts(), engine.scheduler)
    )
    done = run(engine, [Request(r, p, SamplingParams(max_tokens=30, ignore_eos=True)) for r, p in enumerate(prompts)])
    assert {row: c.token_ids for row, c in done.items()} == outputs
    stats = engine.stats
    # Four tokens a step, seven times, the first time with the prompt; then two are left, of which one can be drafted.
    assert (stats.num_steps, stats.num_draft_steps) == (8, 8)
    assert stats.drafted_by_place == stats.accepted_by_place == [32, 28, 28, 0, 0, 0, 0, 0]
    assert sum(engine.runner.tokens_per_step) == 4 * 3 + 4 * 7 + 32 + 28 + 28  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(2))
def test_tokens_survive_steps_with_drafts_that_run_out_of_memory(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = odd_requests(rng, 30, 64)
    plain = run(roomy_engine(64, None), requests, check=False)
    engine = tight_engine(rng, 64, None)
    proposer = Recorded(engine.table, {row: c.token_ids for row, c in plain.items()}, rng)
    policy = Watched(5, rng, engine.table)
    engine.draft_as(Drafting(proposer, policy, engine.scheduler))
    observe = policy.observe

    def observe_and_check(outcome: StepOutcome) -> None:
        assert outcome.verdict is None or engine.scheduler.step_tokens == engine.scheduler.max_num_batched_tokens
        observe(outcome)

    policy.observe = observe_and_check  # type: ignore[method-assign]
    most = int(rng.integers(1, 12))
    failed = fail_where(engine, lambda step: len(step.token_id_T) > (1 if rng.random() < 0.1 else most))
    assert same(run(engine, requests, arrivals=rng), plain)
    assert len(failed) > 3
    assert engine.stats.num_out_of_memory == len(failed)


def test_nobody_is_preempted_or_kept_waiting_for_drafts() -> None:
    """Wrong drafts in a cache that is too small anyway: the same steps as without."""
    wrong = {row: [(t + 1) % VOCAB for t in expected_tokens([row, 5, 6], 30, 64, False)] for row in range(12)}

    def run_with(most: int) -> Engine:
        engine = hash_engine(
            24, 4, max_num_seqs=6, max_num_batched_tokens=30, max_model_len=64, enable_prefix_caching=False
        )
        engine.scheduler.admission.expected_output = 1
        if most:
            engine.draft_as(
                Drafting(Certain(engine.table, wrong, np.random.default_rng(1), most), FixedDrafts(), engine.scheduler)
            )
        requests = [Request(r, [r, 5, 6], SamplingParams(max_tokens=30, ignore_eos=True)) for r in range(12)]
        done = run(engine, requests)
        assert all(done[r].token_ids == expected_tokens([r, 5, 6], 30, 64, False) for r in range(12))
        return engine

    plain = run_with(0).stats
    assert plain.num_preemptions > 0
    for most in (1, 5):
        stats = run_with(most).stats
        assert stats.accepted_by_place == [0] * 8
        assert stats.drafted_by_place[0] > 100
        assert (stats.num_steps, stats.num_preemptions) == (plain.num_steps, plain.num_preemptions)
        assert (stats.recomputed_tokens, stats.batch_sum) == (plain.recomputed_tokens, plain.batch_sum)


def test_the_policy_gets_what_the_step_is_made_of() -> None:
    engine = hash_engine(64, 4, max_num_batched_tokens=16)
    policy = Watched(3, np.random.default_rng(0), engine.table)
    engine.draft_as(
        Drafting(Recorded(engine.table, {0: [], 1: []}, np.random.default_rng(0)), policy, engine.scheduler)
    )
    for row in range(2):
        engine.add(Request(row, [row] * 20, SamplingParams(max_tokens=9, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    # The first prompt has 4 tokens left, of which the last is its own; then the other's; the third step has the rest.
    told = [outcome.facts for outcome in policy.outcomes]
    assert [(f.num_sequences, f.num_prefill, f.room) for f in told] == [(0, 16, 0), (1, 15, 0), (2, 7, 7), (2, 0, 14)]
    assert [o.num_generated for o in policy.outcomes][:2] == [0, 1]


def test_aborting_in_the_middle_leaves_nothing_behind() -> None:
    engine = hash_engine(64, 4, memory=1)
    engine.draft_as(Drafting(NgramProposer(engine.table, 4), FixedDrafts(), engine.scheduler))
    for row in range(6):
        engine.add(Request(row, [row, 5, 6], SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    assert engine.abort(2)
    done = run(engine, [])
    assert sorted(done) == [0, 1, 3, 4, 5]
    assert all(done[r].token_ids == expected_tokens([r, 5, 6], 40, 64, False, 1) for r in done)


def test_a_proposer_comes_before_the_first_request() -> None:
    engine = hash_engine(64, 4)
    engine.add(Request(0, [1, 2], SamplingParams()))
    engine.step()
    with pytest.raises(AssertionError, match="do not know sequences"):
        engine.draft_as(Drafting(NgramProposer(engine.table, 4), FixedDrafts(), engine.scheduler))
