"""Offers that nobody drafts from, compared with the tokens that come: right for every sequence, waited for by none."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.engine.engine import Engine
from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.propose.ngram import NgramProposer
from pipeline.engine.propose.offer import Offer
from pipeline.engine.propose.policy import FixedDrafts, StepFacts
from pipeline.engine.propose.replay import Foretold
from pipeline.engine.propose.shadow import ShadowOffers
from pipeline.engine.schedule.sequence import SlotTable
from tests.engine.hash_runner import expected_tokens, hash_engine
from tests.engine.proposers import Recorded
from tests.engine.schedule.test_scheduler import run
from tests.engine.test_ngram import admit, append, leave
from tests.engine.test_speculation import odd_requests, roomy_engine, same, tight_engine


class Shadowing(FixedDrafts):
    """Drafts in a share of the steps, for some of the sequences, and wants to know what became of every offer."""

    def __init__(self, rng: np.random.Generator, share: float) -> None:
        super().__init__(5)
        self.rng, self.share = rng, share
        self.told: list[Foretold] = []

    def proposer(self, facts: StepFacts) -> int | None:
        return 0 if self.rng.random() < self.share else None

    def choose(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        return np.where(self.rng.random(len(offer.count_S)) < 0.5, offer.count_S, 0)

    def shadows_rest(self) -> bool:
        return bool(self.rng.random() < 0.7)

    def foretold(self, foretold: Foretold) -> None:
        self.told.append(foretold)


class Kept:
    """Of an engine's shadow offers: whose they were and where, and what left before its end meanwhile."""

    def __init__(self, engine: Engine) -> None:
        drafting = engine.drafting
        assert drafting is not None
        shadows, self.table = drafting._shadows, engine.table
        self.offers: list[tuple[Offer, list[int], list[int], set[int]]] = []
        keep, left = shadows.keep, shadows.left

        def keep_and_note(offer: Offer) -> None:
            sequences = [self.table.at(slot) for slot in offer.slot_S.tolist()]
            at = [int(self.table.num_known[sequence.slot]) - sequence.num_prompt for sequence in sequences]
            rows = [sequence.request.row_id for sequence in sequences]
            assert (offer.count_S < self.table.limit[offer.slot_S] - self.table.num_known[offer.slot_S]).all()
            copy = replace(offer, token_id_SK=offer.token_id_SK.copy())
            self.offers.append((copy, rows, at, set()))  # type: ignore[arg-type]
            keep(offer)

        def left_and_note(slot: int, finished: bool) -> None:
            if not finished and self.offers:
                self.offers[-1][3].add(self.table.at(slot).request.row_id)  # type: ignore[arg-type]
            left(slot, finished)

        shadows.keep, shadows.left = keep_and_note, left_and_note  # type: ignore[method-assign]


def check(told: list[Foretold], kept: Kept, outputs: dict[int, list[int]]) -> tuple[int, int, int]:
    """Each against the whole output of its row; how many sequences were decided on, cut short, and lost."""
    num_decided = num_cut = num_lost = 0
    assert len(kept.offers) - len(told) in (0, 1)
    for foretold, (offer, rows, at, preempted) in zip(told, kept.offers):
        assert foretold.count_O.tolist() == offer.count_S.tolist()
        assert foretold.match_len_O.tolist() == offer.match_len_S.tolist()
        assert foretold.is_rest
        for s, row in enumerate(rows):
            drafts, rest = offer.token_id_SK[s, : offer.count_S[s]].tolist(), outputs[row][at[s] :]
            decided, agreed = int(foretold.decided_O[s]), int(foretold.agreed_O[s])
            if row in preempted and decided == 0:  # or it had come to its end before, in another slot
                num_lost += len(drafts) > 0
                continue
            assert decided == min(len(drafts), len(rest))
            alike = [a == b for a, b in zip(drafts, rest)]
            assert agreed == (alike.index(False) if False in alike else len(alike))
            num_decided += decided > 0
            num_cut += 0 < decided < len(drafts)
    return num_decided, num_cut, num_lost


@pytest.mark.parametrize("seed", range(5))
def test_what_is_foretold_is_compared_with_what_comes(seed: int) -> None:
    """Greedy rows and drawn ones, stop strings, prompts in between, preemption, ends, slots that are taken again."""
    rng = np.random.default_rng(seed)
    requests = odd_requests(rng, 120, 64)
    plain = run(roomy_engine(64, None), requests, check=False)
    engine = tight_engine(rng, 64, None)
    engine.scheduler.expectation.output = 1
    outputs = {row: completion.token_ids for row, completion in plain.items()}
    policy = Shadowing(rng, 0.6)
    engine.speculate([Recorded(engine.table, outputs, rng)], policy)
    kept = Kept(engine)
    assert same(run(engine, requests, arrivals=rng), plain)
    num_decided, num_cut, _ = check(policy.told, kept, outputs)
    assert num_decided > 50
    assert num_cut > 0
    assert max(len(foretold.count_O) for foretold in policy.told) <= 8


def test_some_rows_are_enough_and_those_that_draft_are_left_out() -> None:
    rng = np.random.default_rng(1)
    requests = odd_requests(rng, 60, 64)
    outputs = {row: c.token_ids for row, c in run(roomy_engine(64, None), requests, check=False).items()}
    engine = roomy_engine(64, None)
    policy = Shadowing(rng, 0.6)
    engine.speculate([Recorded(engine.table, outputs, rng)], policy)
    chosen, chose = {}, policy.choose

    def choose_and_note(facts: StepFacts, offer: Offer) -> np.ndarray:
        count_S = chose(facts, offer)
        chosen.update(zip(facts.slot_S.tolist(), count_S.tolist()))
        return count_S

    policy.choose = choose_and_note  # type: ignore[method-assign]
    keep = engine.drafting._shadows.keep  # type: ignore[union-attr]

    def keep_and_check(offer: Offer) -> None:
        assert len(offer.slot_S) <= 8
        assert not any(chosen[slot] for slot in offer.slot_S.tolist())
        keep(offer)

    engine.drafting._shadows.keep = keep_and_check  # type: ignore[method-assign, union-attr]
    run(engine, requests, arrivals=rng)
    sizes = [len(foretold.count_O) for foretold in policy.told]
    assert max(sizes) == 8


def test_nothing_is_decided_of_rows_that_are_preempted() -> None:
    rng, num_lost = np.random.default_rng(3), 0
    for _ in range(4):
        engine = hash_engine(24, 4, max_num_seqs=6, max_num_batched_tokens=30, enable_prefix_caching=False)
        engine.scheduler.expectation.output = 1
        requests = [Request(r, [r, 5, 6], SamplingParams(max_tokens=30, ignore_eos=True)) for r in range(12)]
        outputs = {r: expected_tokens([r, 5, 6], 30, 64, False) for r in range(12)}
        policy = Shadowing(rng, 0.7)
        engine.speculate([Recorded(engine.table, outputs, rng)], policy)
        kept = Kept(engine)
        run(engine, requests)
        assert engine.stats.num_preemptions > 0
        num_lost += check(policy.told, kept, outputs)[2]
    assert num_lost > 5


def test_an_offer_is_kept_until_its_tokens_have_come_or_its_rows_have_left() -> None:
    table = SlotTable(4, 40, 4)
    proposer, shadows = NgramProposer(table, 3), ShadowOffers(table)
    slots = [admit(table, proposer, order, [10 + order, 2, 3]) for order in range(4)]
    for slot in slots:
        append(table, slot, [4])
    offered = np.array([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
    assert shadows.foretold() is None
    shadows.keep(Offer(np.array(slots), np.array([3, 2, 3, 3]), np.array([8, 4, 2, 3]), offered))
    assert not shadows.is_empty
    assert shadows.foretold() is None
    append(table, slots[0], [5, 6])  # one is missing
    append(table, slots[1], [5, 9, 7])  # the second is wrong, the third was not offered
    append(table, slots[2], [5])
    shadows.left(slots[2], finished=True)  # ends with the first
    leave(table, proposer, slots[2], finished=True)
    append(table, slots[3], [5, 6])
    shadows.left(slots[3], finished=False)  # comes back later
    leave(table, proposer, slots[3], finished=False)
    other = admit(table, proposer, 9, [1, 1, 1, 1, 5, 6, 7])
    assert other in slots[2:]
    assert shadows.foretold() is None
    append(table, slots[0], [8])
    foretold = shadows.foretold()
    assert foretold is not None
    assert foretold.decided_O.tolist() == [3, 2, 1, 0]
    assert foretold.agreed_O.tolist() == [2, 1, 1, 0]
    assert foretold.match_len_O.tolist() == [8, 4, 2, 3]
    assert shadows.is_empty
    assert shadows.foretold() is None
