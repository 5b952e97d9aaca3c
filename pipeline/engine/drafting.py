"""Speculative decoding's part of a step: who drafts, how much of it is computed, and what the model made of it.

StepPlan -> policy: who? -> proposer: offer -> policy: how many -> room -> proposer: drafts -> StepPlan with drafts
-> one step computes known tokens and drafts -> `verify` -> rounds of tokens, as plain steps would give them
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.engine.accounting import record_drafts
from pipeline.engine.draft_room import DraftRoom
from pipeline.engine.drawn import Chooser
from pipeline.engine.params import EngineStats
from pipeline.engine.propose.policy import DraftPolicy, StepFacts, StepOutcome
from pipeline.engine.propose.proposer import Drafts, Proposer
from pipeline.engine.rejection import DraftLaw
from pipeline.engine.sampling_batch import SamplingBatch
from pipeline.engine.scheduler import Scheduler
from pipeline.engine.step import StepPlan
from pipeline.engine.verify import Verified, verify


@dataclass(frozen=True)
class _Pending:
    """What is known of a step before it is computed. S: its sequences that get a token."""

    facts: StepFacts
    drafted_S: np.ndarray
    proposer: Proposer | None = None
    drafts: Drafts | None = None
    offer_us: int = 0
    draft_us: int = 0


class Drafting:
    """Proposers and a policy at work in one engine. Holds what was proposed until the step is done."""

    def __init__(self, proposers: Sequence[Proposer], policy: DraftPolicy, scheduler: Scheduler) -> None:
        assert proposers, "somebody has to draft"
        self.proposers, self.policy, self._scheduler = tuple(proposers), policy, scheduler
        self._room = DraftRoom(scheduler)
        self._pending: _Pending | None = None

    def admitted(self, slot: int) -> None:
        for proposer in self.proposers:
            proposer.admitted(slot)

    def left(self, slot: int, finished: bool) -> None:
        for proposer in self.proposers:
            proposer.left(slot, finished)

    def extend(self, plan: StepPlan) -> StepPlan:
        """`plan` with drafts, or as it is."""
        sampling = np.flatnonzero(plan.samples_S)
        if self.policy.passes(len(sampling)):
            self._pending = None
            return plan
        facts = self._facts(plan, plan.slot_S[sampling])
        self._pending = _Pending(facts, np.zeros(len(sampling), dtype=np.int64))
        number = self.policy.proposer(facts) if len(sampling) else None
        if number is None:
            return plan
        proposer, begun_ns = self.proposers[number], time.perf_counter_ns()
        offer = proposer.offer(facts.slot_S)
        offer = replace(offer, count_S=np.minimum(offer.count_S, self._room.most(facts.slot_S)))
        count_S = np.maximum(np.minimum(self.policy.choose(facts, offer), offer.count_S), 0)
        if count_S.any():
            count_S = self._room.grant(plan, facts.slot_S, count_S)
        offer_us, begun_ns = _since_us(begun_ns), time.perf_counter_ns()
        drafts = None
        if count_S.any():
            drafts = proposer.draft(offer, count_S)
            plan = self._room.place(plan, sampling, drafts.token_id_SK, count_S)
        self._pending = _Pending(facts, count_S, proposer, drafts, offer_us, _since_us(begun_ns))
        return plan

    def verify(self, logits_RV: torch.Tensor, batch: SamplingBatch | None, chooser: Chooser | None) -> Verified:
        """What the model says to the drafts of the last `extend`. `batch` and `chooser`: see `verify.verify`."""
        step = self._pending
        assert step is not None
        assert step.drafts is not None
        drafted_S, drafts = step.drafted_S, step.drafts
        place_K1 = np.arange(int(drafted_S.max()) + 1)
        is_draft_SK1 = place_K1 < drafted_S[:, None]
        token_id_SK1 = np.full(is_draft_SK1.shape, -1, dtype=np.int64)
        token_id_SK1[:, :-1] = drafts.token_id_SK[:, : len(place_K1) - 1]
        draft_R = np.where(is_draft_SK1, token_id_SK1, -1)[place_K1 <= drafted_S[:, None]]
        law = None
        if drafts.q_SKV is not None:
            row_D, device = np.flatnonzero(draft_R >= 0), drafts.q_SKV.device
            sequence_D, column_D = (torch.from_numpy(at_D).to(device) for at_D in np.nonzero(is_draft_SK1))
            law = DraftLaw(row_D, draft_R[row_D], drafts.q_SKV[sequence_D, column_D])
        return verify(logits_RV, batch, draft_R, law, chooser)

    def done(self, stats: EngineStats, verified: Verified | None, num_generated: int, step_us: int) -> None:
        """The step of the last `extend` has been computed, in step_us with proposing: count it and tell the policy."""
        step, self._pending = self._pending, None
        if step is None:
            return
        accepted_S = np.zeros_like(step.drafted_S)
        if verified is not None:
            assert step.proposer is not None
            accepted_S = verified.num_accepted_S
            record_drafts(stats, step.drafted_S, accepted_S)
            drafted = np.flatnonzero(step.drafted_S)
            step.proposer.settled(step.facts.slot_S[drafted], accepted_S[drafted])
        alone_us = max(step_us - step.offer_us - step.draft_us, 0)
        self.policy.observe(
            StepOutcome(step.facts, num_generated, alone_us, step.offer_us, step.draft_us, step.drafted_S, accepted_S)
        )

    def _facts(self, plan: StepPlan, slot_S: np.ndarray) -> StepFacts:
        scheduler, num_tokens = self._scheduler, plan.num_tokens
        table, running = scheduler.table, scheduler.running
        room = scheduler.step_tokens - num_tokens
        num_queued = int((table.num_known[running] - table.num_computed[running]).sum()) - num_tokens
        if room <= 0 and scheduler.waiting:
            num_queued += len(scheduler.waiting[0].token_ids)
        known_S = table.num_known[slot_S]
        num_prefill, num_waiting = num_tokens - len(slot_S), len(scheduler.waiting)
        return StepFacts(slot_S, known_S, num_tokens, num_prefill, num_queued, max(room, 0), num_waiting)


def _since_us(begun_ns: int) -> int:
    return (time.perf_counter_ns() - begun_ns) // 1000
