"""Speculative decoding in a step: whether and how much to draft, and verification.

StepPlan -> policy: draft? -> proposer: proposal -> policy: lengths -> room -> proposer: drafts
-> one step computes known tokens and drafts -> `verify` -> tokens, the same as from plain steps
-> proposer and policy record the accepted drafts
"""

from typing import NamedTuple

import numpy as np

from pipeline.engine.drafts.policy import AcceptanceCounts, DraftPolicy, Proposal, StepFacts, StepOutcome
from pipeline.engine.drafts.proposer import Drafts, Proposer
from pipeline.engine.sampling.batch import SamplerOutput
from pipeline.engine.sampling.rejection import ProposalDistribution
from pipeline.engine.sampling.verify import Verified, verify
from pipeline.engine.schedule.scheduler import Scheduler, allot
from pipeline.engine.schedule.slot_table import ranges
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.engine.schedule.thinking import end_of_drafts
from pipeline.engine.stats import EngineStats
from pipeline.kernels.delta_shape import MAX_LAG
from pipeline.kernels.memory import on_device

MAX_CHECKED_TOKENS = 1024  # next tokens plus drafts of a step, each with its own logits; at least all next tokens

_NONE_S = np.zeros(0, dtype=np.int64)


class DraftedStep(NamedTuple):
    """Facts of a step before it is computed. S: its sequences that sample, if it has drafts; otherwise only `facts` is
    set."""

    facts: StepFacts
    slot_S: np.ndarray = _NONE_S
    drafted_S: np.ndarray = _NONE_S
    drafts: Drafts | None = None


class DraftBudget:
    """Room for drafts in a planned step: tokens, context positions, and KV blocks. Call `grant`, then make the drafts,
    then call `write`, before anything else is planned.

    Drafts have the lowest priority: they use the token budget that a step leaves, and free blocks. No sequence is
    preempted for them.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def tokens(self, plan: StepPlan) -> int:
        """Return the maximum number of drafts of the step."""
        num_sequences = int(np.count_nonzero(plan.samples_S))
        checked = max(MAX_CHECKED_TOKENS - num_sequences, 0)
        return min(max(self._scheduler.step_tokens - plan.num_tokens, 0), checked)

    def max_useful(self, slot_S: np.ndarray) -> np.ndarray:
        """Return how many drafts of each sequence can be useful: if all are accepted, one more token is generated."""
        table = self._scheduler.table
        end_S = table.limit[slot_S]
        if table.thinking[slot_S].any():
            end_S = np.minimum(end_S, end_of_drafts(table, slot_S))
        return end_S - table.num_known[slot_S] - 1

    def allocate(self, plan: StepPlan, slot_S: np.ndarray, count_S: np.ndarray) -> np.ndarray:
        """Allocate blocks for drafts of these sequences, all of which sample in the plan. Return how many of the
        requested count_S (at most `max_useful`) each may have; older sequences come first."""
        scheduler = self._scheduler
        table, pool = scheduler.table, scheduler.pool
        room = self.tokens(plan)
        if int(count_S.sum()) > room:
            count_S = allot(count_S, room)
        end_S = table.num_known[slot_S] + count_S
        missing_S, window_missing_S = table.missing_pages(slot_S, end_S)
        if missing_S.any() or window_missing_S.any():
            # known tokens have their pages already
            is_granted_S = np.cumsum(missing_S + window_missing_S) <= pool.num_free
            count_S = np.where(is_granted_S, count_S, np.minimum(count_S, table.room(slot_S)))
            scheduler.grow(slot_S, missing_S * is_granted_S, window_missing_S * is_granted_S)
        return count_S

    def write(self, plan: StepPlan, sampling: np.ndarray, token_id_SK: np.ndarray, count_S: np.ndarray) -> StepPlan:
        """Return the plan with the first count_S[s] tokens of token_id_SK[s], which were granted, as drafts of the
        sequence with index sampling[s] in the plan."""
        table, slot_S = self._scheduler.table, plan.slot_S[sampling]
        position_D = ranges(table.num_known[slot_S], count_S)
        is_draft_SK = np.arange(token_id_SK.shape[1]) < count_S[:, None]
        table.token_ids[np.repeat(slot_S, count_S), position_D] = token_id_SK[is_draft_SK]
        draft_S = np.zeros_like(plan.count_S)
        draft_S[sampling] = count_S
        return StepPlan(plan.slot_S, plan.start_S, plan.count_S + draft_S, plan.samples_S, draft_S)


class SpecDecoder:
    """Proposer and policy of one engine. Holds the drafts of the step that is being launched."""

    def __init__(self, proposer: Proposer, policy: DraftPolicy, scheduler: Scheduler) -> None:
        self.proposer, self.policy, self._scheduler = proposer, policy, scheduler
        self._room = DraftBudget(scheduler)
        self._step: DraftedStep | None = None

    def admitted(self, slot: int) -> None:
        self.policy.admitted(slot)
        self.proposer.admitted(slot)

    def on_evicted(self, slot: int, finished: bool) -> None:
        self.proposer.on_evicted(slot, finished)

    def on_rollback(self, plan: StepPlan) -> None:
        self.proposer.on_rollback(plan.slot_S)

    def select(self, plan: StepPlan) -> bool:
        """Return whether this step should have drafts.

        False while steps are limited after an out-of-memory, because a draft model needs memory too. A step of one
        token has no room for drafts.
        """
        num_sequences, scheduler = int(np.count_nonzero(plan.samples_S)), self._scheduler
        facts = StepFacts(num_sequences, plan.num_tokens - num_sequences, self._room.tokens(plan))
        self._step = DraftedStep(facts)
        is_limited = scheduler.step_tokens == 1 or scheduler.step_tokens < scheduler.max_num_batched_tokens
        return self.policy.select(facts) and num_sequences > 0 and not is_limited

    def extend(self, plan: StepPlan) -> StepPlan:
        """Return `plan`, for which `select` returned True, with the available drafts."""
        assert self._step is not None
        facts, sampling = self._step.facts, np.flatnonzero(plan.samples_S)
        slot_S = plan.slot_S[sampling]
        proposal = self.proposer.propose(slot_S)
        max_S = np.maximum(self._room.max_useful(slot_S), 0)
        if self._scheduler.table.has_states:  # those of longer steps do not lag, and cannot be taken back
            max_S = np.maximum(np.minimum(max_S, MAX_LAG - plan.count_S[sampling]), 0)
        proposal = Proposal(slot_S, np.minimum(proposal.count_S, max_S), proposal.match_len_S, proposal.token_id_SK)
        count_S = np.maximum(np.minimum(self.policy.lengths(facts, proposal), proposal.count_S), 0)
        if count_S.any():
            count_S = self._room.allocate(plan, slot_S, count_S)
        if count_S.any():
            drafts = self.proposer.draft(proposal, count_S)
            plan = self._room.write(plan, sampling, drafts.token_id_SK, count_S)
            self._step = DraftedStep(facts, slot_S, count_S, drafts)
        return plan

    def proposal(self) -> ProposalDistribution | None:
        """Return the distributions that the drafts of the last `extend` were sampled from, or None if unknown."""
        drafted_S, drafts = self._drafted()
        if drafts.q_SKV is None:
            return None
        draft_R = self._draft_of_rows()
        is_draft_SK = np.arange(drafts.q_SKV.shape[1]) < drafted_S[:, None]
        sequence_D, column_D = (on_device(index_D, drafts.q_SKV.device) for index_D in np.nonzero(is_draft_SK))
        row_D = np.flatnonzero(draft_R >= 0)
        return ProposalDistribution(row_D, draft_R[row_D], drafts.q_SKV[sequence_D, column_D])

    def verify(self, output: SamplerOutput) -> Verified:
        """Verify the drafts of the last `extend`. output: the tokens of its rows."""
        return verify(output, self._draft_of_rows())

    def draft_ids(self, sampling: np.ndarray) -> list[list[int]]:
        """Return the drafts of the last `extend` for sequences given by their index among those that sample."""
        drafted_S, drafts = self._drafted()
        rows = zip(drafts.token_id_SK[sampling].tolist(), drafted_S[sampling].tolist())
        return [ids[:count] for ids, count in rows]

    def _draft_of_rows(self) -> np.ndarray:
        """Return the token drafted for the position of each row of logits; -1 for the last row of each sequence."""
        drafted_S, drafts = self._drafted()
        max_drafts = int(drafted_S.max())
        draft_SK1 = np.empty((len(drafted_S), max_drafts + 1), dtype=np.int64)
        draft_SK1[:, :max_drafts] = drafts.token_id_SK[:, :max_drafts]
        draft_SK1[np.arange(len(drafted_S)), drafted_S] = -1
        return draft_SK1[np.arange(max_drafts + 1) <= drafted_S[:, None]]

    def _drafted(self) -> tuple[np.ndarray, Drafts]:
        assert self._step is not None
        assert self._step.drafts is not None
        return self._step.drafted_S, self._step.drafts

    def pop_step(self) -> DraftedStep:
        """Return and clear what `done` needs of the launched step."""
        step, self._step = self._step, None
        assert step is not None
        return step

    def done(self, stats: EngineStats, step: DraftedStep, output: SamplerOutput | Verified, num_generated: int) -> None:
        """Record a step that has been computed and whose tokens are in the table, and pass it to the policy."""
        acceptance = None
        if step.drafts is not None:
            assert isinstance(output, Verified)
            (drafted,) = np.nonzero(step.drafted_S)
            acceptance = AcceptanceCounts(step.slot_S[drafted], step.drafted_S[drafted], output.num_accepted_S[drafted])
            stats.add_drafts(acceptance.drafted_D, acceptance.accepted_D)
            self.proposer.on_verified(*acceptance)
        is_last = not len(self._scheduler.running) and not len(self._scheduler.waiting)
        self.policy.observe(StepOutcome(step.facts, num_generated, acceptance, is_last))
