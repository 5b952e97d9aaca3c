"""Speculative decoding's part of a step: who drafts, how much of it is computed, and what the model made of it.

StepPlan -> policy: look at all? -> proposers: offers -> policy: how many of whose -> room -> proposers: drafts
-> one step computes known tokens and drafts -> `verify` -> rounds of tokens, as plain steps would give them
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.engine.accounting import record_drafts
from pipeline.engine.draft_room import DraftRoom
from pipeline.engine.params import EngineStats
from pipeline.engine.propose.offer import Offer
from pipeline.engine.propose.policy import Chosen, DraftPolicy, Proposed, StepFacts, StepOutcome
from pipeline.engine.propose.proposer import Drafts, Proposer
from pipeline.engine.rejection import DraftLaw
from pipeline.engine.sampler import SamplingBatch, Verified, verify
from pipeline.engine.scheduler import Scheduler
from pipeline.engine.step import StepPlan, runs


@dataclass(frozen=True)
class _Pending:
    """What is known of a step before it is computed. S: its sequences that get a token."""

    facts: StepFacts
    drafted_S: np.ndarray
    drafts: tuple[Drafts | None, ...] = ()  # of each proposer
    proposer_S: np.ndarray | None = None
    token_id_SK: np.ndarray | None = None
    offer_us: tuple[int, ...] = ()
    draft_us: tuple[int, ...] = ()

    @property
    def propose_us(self) -> int:
        return sum(self.offer_us) + sum(self.draft_us)


class Drafting:
    """Proposers and a policy at work in one engine. Holds what was proposed until the step is done."""

    def __init__(self, proposers: Sequence[Proposer], policy: DraftPolicy, scheduler: Scheduler) -> None:
        assert proposers, "somebody has to draft"
        assert not len(scheduler.running), "sequences that run already are unknown to the proposers"
        self.proposers, self.policy, self._scheduler = tuple(proposers), policy, scheduler
        self._room = DraftRoom(scheduler)
        self._pending: _Pending | None = None
        scheduler.watcher = self

    def admitted(self, slot: int) -> None:
        for proposer in self.proposers:
            proposer.admitted(slot)

    def left(self, slot: int, finished: bool) -> None:
        for proposer in self.proposers:
            proposer.left(slot, finished)

    def extend(self, plan: StepPlan) -> StepPlan:
        """`plan` with drafts, or as it is."""
        sampling = np.flatnonzero(plan.samples_S)
        facts = self._facts(plan, plan.slot_S[sampling])
        self._pending = _Pending(facts, np.zeros(len(sampling), dtype=np.int64))
        if not len(sampling) or not self.policy.wants_offers(facts):
            return plan
        offers, offer_us = self._offers(facts.slot_S)
        begun_ns = time.perf_counter_ns()
        chosen = self.policy.choose(facts, offers)
        offered_PS = np.stack([offer.count_S for offer in offers])
        offered_S = offered_PS[chosen.proposer_S, np.arange(len(sampling))]
        count_S = np.clip(chosen.length_S, 0, offered_S)
        if count_S.any():
            count_S = self._room.grant(plan, facts.slot_S, count_S)
        offer_us[0] += _since_us(begun_ns)  # choosing belongs to looking for drafts; the first one bears it
        if not count_S.any():
            self._pending = replace(self._pending, offer_us=tuple(offer_us), draft_us=(0,) * len(offers))
            return plan
        drafts, token_id_SK, draft_us = self._drafts(offers, chosen, count_S)
        self._pending = _Pending(
            facts, count_S, drafts, chosen.proposer_S, token_id_SK, tuple(offer_us), tuple(draft_us)
        )
        return self._room.place(plan, sampling, token_id_SK, count_S)

    def verify(self, logits_RV: torch.Tensor, batch: SamplingBatch | None) -> Verified:
        """What the model says to the drafts of the last `extend`. `batch`: see `sampler.verify`."""
        step = self._pending
        assert step is not None
        assert step.token_id_SK is not None
        drafted_S = step.drafted_S
        draft_R = np.full(len(logits_RV), -1, dtype=np.int64)
        row_D = runs(np.cumsum(drafted_S + 1) - drafted_S - 1, drafted_S)
        sequence_D = np.repeat(np.arange(len(drafted_S)), drafted_S)
        column_D = runs(np.zeros_like(drafted_S), drafted_S)
        draft_R[row_D] = step.token_id_SK[sequence_D, column_D]
        return verify(logits_RV, batch, draft_R, _law(step, row_D, sequence_D, column_D))

    def done(self, stats: EngineStats, verified: Verified | None, num_generated: int, step_us: int) -> None:
        """The step of the last `extend` has been computed, in step_us with proposing: count it and tell the policy."""
        assert self._pending is not None
        step, self._pending = self._pending, None
        accepted_S = np.zeros_like(step.drafted_S)
        if verified is not None:
            accepted_S = verified.num_accepted_S
            record_drafts(stats, step.drafted_S, accepted_S)
            assert step.proposer_S is not None
            for number, proposer in enumerate(self.proposers):
                own = np.flatnonzero((step.proposer_S == number) & (step.drafted_S > 0))
                if len(own):
                    proposer.settled(step.facts.slot_S[own], accepted_S[own])
        proposed = tuple(Proposed(*both) for both in zip(step.offer_us, step.draft_us))
        alone_us = max(step_us - step.propose_us, 0)
        self.policy.observe(StepOutcome(step.facts, num_generated, alone_us, proposed, step.drafted_S, accepted_S))

    def _facts(self, plan: StepPlan, slot_S: np.ndarray) -> StepFacts:
        scheduler, num_tokens = self._scheduler, plan.num_tokens
        table, running = scheduler.table, scheduler.running
        room = scheduler.step_tokens - num_tokens
        num_queued = int((table.num_known[running] - table.num_computed[running]).sum()) - num_tokens
        if room <= 0 and scheduler.waiting:
            num_queued += len(scheduler.waiting[0].token_ids)
        known_S = table.num_known[slot_S]
        return StepFacts(slot_S, known_S, num_tokens, num_tokens - len(slot_S), num_queued, max(room, 0))

    def _offers(self, slot_S: np.ndarray) -> tuple[list[Offer], list[int]]:
        """What each proposer has, no more than is of use, and its microseconds."""
        most_S = self._room.most(slot_S)
        offers, offer_us = [], []
        for proposer in self.proposers:
            begun_ns = time.perf_counter_ns()
            offer = proposer.offer(slot_S)
            offers.append(replace(offer, count_S=np.minimum(offer.count_S, most_S)))
            offer_us.append(_since_us(begun_ns))
        return offers, offer_us

    def _drafts(
        self, offers: list[Offer], chosen: Chosen, count_S: np.ndarray
    ) -> tuple[tuple[Drafts | None, ...], np.ndarray, list[int]]:
        """The drafts of each proposer, all their tokens together, and each one's microseconds."""
        drafts: list[Drafts | None] = []
        draft_us = []
        token_id_SK = np.zeros((len(count_S), int(count_S.max())), dtype=np.int64)
        for number, (proposer, offer) in enumerate(zip(self.proposers, offers)):
            own_S = np.where(chosen.proposer_S == number, count_S, 0)
            begun_ns = time.perf_counter_ns()
            drafts.append(proposer.draft(offer, own_S) if own_S.any() else None)
            draft_us.append(_since_us(begun_ns))
            if drafts[-1] is not None:
                columns = min(token_id_SK.shape[1], drafts[-1].token_id_SK.shape[1])
                rows = np.flatnonzero(own_S)
                token_id_SK[rows, :columns] = drafts[-1].token_id_SK[rows, :columns]
        return tuple(drafts), token_id_SK, draft_us


def _law(step: _Pending, row_D: np.ndarray, sequence_D: np.ndarray, column_D: np.ndarray) -> DraftLaw | None:
    """Of those drafts whose law is known."""
    assert step.proposer_S is not None
    assert step.token_id_SK is not None
    places: list[np.ndarray] = []
    laws: list[torch.Tensor] = []
    for number, drafts in enumerate(step.drafts):
        if drafts is not None and drafts.q_SKV is not None:
            own = np.flatnonzero(step.proposer_S[sequence_D] == number)
            device = drafts.q_SKV.device
            at = (torch.from_numpy(index[own]).to(device) for index in (sequence_D, column_D))
            places.append(own)
            laws.append(drafts.q_SKV[tuple(at)])
    if not places:
        return None
    own, q_DV = np.concatenate(places), torch.cat(laws)
    if len(places) > 1:
        order = np.argsort(own)
        own, q_DV = own[order], q_DV[torch.from_numpy(order).to(q_DV.device)]
    return DraftLaw(row_D[own], step.token_id_SK[sequence_D[own], column_D[own]], q_DV)


def _since_us(begun_ns: int) -> int:
    return (time.perf_counter_ns() - begun_ns) // 1000
