"""The engine's policy where steps overlap: it is told of a step when the next one has been decided on."""

import numpy as np
import pytest

from pipeline.engine.params import SamplingParams
from pipeline.engine.propose.ngram import NgramProposer
from pipeline.engine.propose.offer import Offer
from pipeline.engine.propose.policy import StepFacts, StepOutcome
from pipeline.engine.propose.shadow import Foretold
from pipeline.engine.speculation.controlled import ControlledDrafts
from pipeline.engine.speculation.messages import Outcome
from pipeline.engine.speculation.persistence import BLOCKS, STEPS
from pipeline.engine.speculation.proposing import ProposingCost
from tests.engine.hash_runner import hash_engine
from tests.engine.speculation.test_controller import MEMORY_BOUND, K, controller_of


def test_outcomes_that_come_one_step_late_are_of_their_own_step() -> None:
    """Batches of two sizes in turn, of which only the larger ones are asked about and draft: whoever mixes them up has
    drafts that nobody chose."""
    policy, before, drafted_steps = ControlledDrafts(controller_of(MEMORY_BOUND)), None, 0
    for n in range(80):
        num = 3 + n % 2
        facts = StepFacts(np.arange(num), np.full(num, 100), num, 0, 0, 1000 * (n % 2), 0)
        drafted_S = np.zeros(num, dtype=np.int64)
        if policy.proposer(facts) is not None:
            offer = Offer(facts.slot_S, np.full(num, K), np.full(num, 7), np.zeros((num, 0), dtype=np.int64))
            drafted_S = policy.choose(facts, offer)
        drafted_steps += bool(drafted_S.any())
        if before is not None:
            policy.observe(before)
        before = StepOutcome(facts, num + int(drafted_S.sum()), 10_000, 0, 0, drafted_S, drafted_S)
    assert drafted_steps > 20
    counts = policy.controller.counts
    assert abs(int(counts.drafted_steps.sum()) - drafted_steps) <= 1
    assert int(counts.accepted_tokens.sum()) == int(counts.draft_tokens.sum()) > 0


def test_what_was_foretold_comes_to_the_controller_and_what_it_took_with_the_next_outcome() -> None:
    policy, told = ControlledDrafts(controller_of(MEMORY_BOUND)), []
    before, counts = policy.controller.beliefs.lately[0].share_CK, np.full(3, K)
    policy.foretold(Foretold(counts, np.full(3, 7), counts, counts, offer_us=5000, is_rest=True))
    assert policy.controller.beliefs.lately[0].share_CK is before
    assert policy.controller.beliefs.acceptance.probability()[3, 0] > 0.78
    policy.foretold(Foretold(counts, np.full(3, 2), counts, counts, offer_us=5000, is_rest=False))
    assert policy.controller.beliefs.lately[0].share_CK[0, 0] > 0.9
    policy.controller.observe = lambda batch, outcome, decided: told.append(outcome)  # type: ignore[method-assign]
    facts, none = StepFacts(np.arange(3), np.full(3, 100), 3, 0, 0, 1000, 0), np.zeros(3, dtype=np.int64)
    for _ in range(2):
        policy.observe(StepOutcome(facts, 3, 10_000, 0, 0, none, none))
    assert 0.01 < told[0].host_s < 0.02
    assert told[1].host_s < 0.005


def test_what_telling_takes_is_put_to_the_next_proposing(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, told, now_ns = ControlledDrafts(controller_of(MEMORY_BOUND)), [], 0
    monkeypatch.setattr("time.perf_counter_ns", lambda: now_ns)
    facts, none = StepFacts(np.arange(3), np.full(3, 100), 3, 0, 0, 1000, 0), np.zeros(3, dtype=np.int64)

    def takes_a_while(batch: object, outcome: Outcome, decided: object) -> None:
        nonlocal now_ns
        told.append(outcome)
        now_ns += 70_000

    policy.controller.observe = takes_a_while  # type: ignore[assignment]
    for offer_us, draft_us in ((0, 0), (30, 500), (0, 0)):
        policy.observe(StepOutcome(facts, 3, 10_000, offer_us, draft_us, none, none))
    assert [round(outcome.lookup_s * 1e6) for outcome in told] == [0, 100, 0]
    assert [round(outcome.propose_s * 1e6) for outcome in told] == [0, 600, 0]


def test_a_sequence_in_a_slot_that_was_another_s_has_no_history() -> None:
    """Short prompts get a token in the step that admits them, and the slots that were left last are given first: so a
    slot is in each step, with another sequence."""
    engine = hash_engine(60, 4, memory=2, max_num_seqs=3)
    policy = ControlledDrafts(controller_of(MEMORY_BOUND, proposing=(ProposingCost(),)))
    policy.controller.passes = lambda num_sequences: False  # type: ignore[method-assign]
    policy.controller.wants_candidates = lambda batch: 0  # type: ignore[method-assign]
    engine.speculate([NgramProposer(engine.table, K)], policy)
    persistence, orders, reused = policy.controller.gains.persistence, dict[int, int](), 0
    add = persistence.add

    def add_and_look(slot_S: np.ndarray, expected_S: np.ndarray) -> None:
        nonlocal reused
        add(slot_S, expected_S)
        for slot, order in zip(slot_S.tolist(), engine.table.order[slot_S].tolist()):
            if orders.get(slot) not in (None, order):
                reused += 1
                assert persistence._sums_7S[STEPS, slot] <= 1
                assert persistence._sums_7S[BLOCKS, slot] <= 0
            orders[slot] = order

    persistence.add = add_and_look  # type: ignore[method-assign]
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 30, 40)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    done = engine.generate([[row, 5] for row in range(40)], params)
    assert [len(completion.token_ids) for completion in done] == lengths
    assert reused > 20
