"""Speculative decoding's part of a step: who drafts, how much of it is computed, and what the model made of it.

StepPlan -> policy: look at all? -> proposer: offer -> policy: how many -> proposer: draft -> StepPlan with drafts
-> one step computes known tokens and drafts -> `verify` -> rounds of tokens, as plain steps would give them
"""

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.engine.accounting import record_drafts
from pipeline.engine.params import EngineStats
from pipeline.engine.propose.policy import DraftPolicy, StepFacts, StepOutcome
from pipeline.engine.propose.proposer import Drafts, Proposer
from pipeline.engine.rejection import DraftLaw
from pipeline.engine.sampler import SamplingBatch, Verified, verify
from pipeline.engine.scheduler import Scheduler
from pipeline.engine.step import StepPlan, runs


@dataclass(frozen=True)
class _Pending:
    """What is known of a step before it is computed. S: its sequences that get a token."""

    facts: StepFacts
    propose_us: int
    match_len_S: np.ndarray
    drafts: Drafts | None
    drafted_S: np.ndarray  # after cuts


class Drafting:
    """A proposer and a policy at work in one engine. Holds what it proposed until the step is done."""

    def __init__(self, proposer: Proposer, policy: DraftPolicy, scheduler: Scheduler) -> None:
        assert not len(scheduler.running), "sequences that run already are unknown to the proposer"
        self.proposer, self.policy, self._scheduler = proposer, policy, scheduler
        self._pending: _Pending | None = None
        scheduler.watcher = proposer

    def extend(self, plan: StepPlan) -> StepPlan:
        """`plan` with drafts, or as it is."""
        start_ns = time.perf_counter_ns()
        sampling = np.flatnonzero(plan.samples_S)
        facts = self._facts(plan, plan.slot_S[sampling])
        match_len_S = drafted_S = np.zeros(len(sampling), dtype=np.int64)
        drafts = None
        if len(sampling) and self.policy.wants_offers(facts):
            offer = self.proposer.offer(facts.slot_S)
            room_S = self._scheduler.room_for_drafts(facts.slot_S)
            offer = replace(offer, count_S=np.minimum(offer.count_S, room_S))
            match_len_S = offer.match_len_S
            count_S = np.clip(self.policy.choose(facts, offer), 0, offer.count_S)
            if count_S.any():
                drafts = self.proposer.draft(offer, count_S)
                plan = self._with_drafts(plan, sampling, drafts)
                if plan.draft_S is not None:
                    drafted_S = plan.draft_S[sampling]
        propose_us = (time.perf_counter_ns() - start_ns) // 1000
        self._pending = _Pending(facts, propose_us, match_len_S, drafts, drafted_S)
        return plan

    def _facts(self, plan: StepPlan, slot_S: np.ndarray) -> StepFacts:
        scheduler, num_tokens = self._scheduler, plan.num_tokens
        table, running = scheduler.table, scheduler.running
        room = scheduler.step_tokens - num_tokens
        num_queued = int((table.num_known[running] - table.num_computed[running]).sum()) - num_tokens
        if room <= 0 and scheduler.waiting:
            num_queued += len(scheduler.waiting[0].token_ids)
        known_S = table.num_known[slot_S]
        return StepFacts(slot_S, known_S, num_tokens, num_tokens - len(slot_S), num_queued, max(room, 0))

    def verify(self, logits_RV: torch.Tensor, plan: StepPlan, batch: SamplingBatch | None) -> Verified:
        """What the model says to the drafts of `plan`, the plan of the last `extend`. `batch`: see `verify`."""
        assert self._pending is not None
        assert self._pending.drafts is not None
        drafted_S, drafts = self._pending.drafted_S, self._pending.drafts
        draft_R = np.full(len(logits_RV), -1, dtype=np.int64)
        rows = runs(np.cumsum(drafted_S + 1) - drafted_S - 1, drafted_S)
        sequence_D, column_D = (
            np.repeat(np.arange(len(drafted_S)), drafted_S),
            runs(np.zeros_like(drafted_S), drafted_S),
        )
        draft_R[rows] = drafts.token_id_SK[sequence_D, column_D]
        law = None
        if drafts.q_SKV is not None:
            device = drafts.q_SKV.device
            q_DV = drafts.q_SKV[torch.from_numpy(sequence_D).to(device), torch.from_numpy(column_D).to(device)]
            law = DraftLaw(rows, draft_R[rows], q_DV)
        return verify(logits_RV, batch, draft_R, law)

    def done(self, stats: EngineStats, verified: Verified | None, num_generated: int, step_us: int) -> None:
        """The step of the last `extend` has been computed: count it and tell the policy."""
        assert self._pending is not None
        step, self._pending = self._pending, None
        accepted_S = np.zeros_like(step.drafted_S)
        if verified is not None:
            accepted_S = verified.num_accepted_S
            record_drafts(stats, step.drafted_S, accepted_S)
        self.policy.observe(
            StepOutcome(
                step.facts, num_generated, step_us, step.propose_us, step.match_len_S, step.drafted_S, accepted_S
            )
        )

    def _with_drafts(self, plan: StepPlan, sampling: np.ndarray, drafts: Drafts) -> StepPlan:
        """Drafts are of the sequences that sample; the scheduler counts all that are in the step."""
        count_S = np.zeros(len(plan.slot_S), dtype=np.int64)
        count_S[sampling] = drafts.count_S
        token_id_SK = np.zeros((len(plan.slot_S), drafts.token_id_SK.shape[1]), dtype=np.int64)
        token_id_SK[sampling] = drafts.token_id_SK
        return self._scheduler.add_drafts(plan, token_id_SK, count_S)
