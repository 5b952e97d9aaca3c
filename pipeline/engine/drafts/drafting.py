"""Speculative decoding's part of a step: who drafts, how much of it is computed, and what the model made of it.

    StepPlan -> policy: who? -> proposer: offer -> policy: how many? -> room -> proposer: drafts -> StepPlan with drafts
    -> one step computes known tokens and drafts -> `verify` -> rounds of tokens, as plain steps would give them
    -> policy and proposer are told

Where a device works beside the host, nothing of this waits for it: drafts that a draft model makes there stay there
(`DraftsOnDevice`), and so does what the model made of them (`verify.PendingVerified`), until the step is landed
(step/overlapped.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pipeline.engine.drafts.policy import DraftPolicy, Offer, StepFacts, StepOutcome, Verdict
from pipeline.engine.drafts.proposer import Drafts, Proposer
from pipeline.engine.forward.in_flight import FutureTokens, StepInFlight
from pipeline.engine.sampling.batch import SamplerOutput, SamplingBatch
from pipeline.engine.sampling.on_device import SamplingKernels
from pipeline.engine.sampling.penalties import FutureIds
from pipeline.engine.sampling.rejection import ProposalDistribution
from pipeline.engine.sampling.verify import (
    PendingVerified,
    Verified,
    verify,
    verify_on_device,
)
from pipeline.engine.schedule.scheduler import Scheduler, allot
from pipeline.engine.schedule.sequence import ranges
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.engine.schedule.thinking import end_of_drafts
from pipeline.engine.stats import DRAFT_PLACES, EngineStats
from pipeline.kernels.memory import on_device

_NONE_S = np.zeros(0, dtype=np.int64)


class DraftedStep(NamedTuple):
    """What is known of a step before it is computed. S: its sequences that get a token, where somebody drafted; else
    there are only the facts."""

    facts: StepFacts
    slot_S: np.ndarray = _NONE_S
    drafted_S: np.ndarray = _NONE_S
    proposer: Proposer | None = None
    drafts: Drafts | None = None


class DraftRoom:
    """Room for drafts in a planned step: tokens, places in the context, and KV blocks. `grant`, then the drafts are
    made, then `place`, before anything else is planned.

    Drafts come after everything else: into the tokens that a step leaves and into free blocks. Nobody is preempted for
    them.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def most(self, slot_S: np.ndarray) -> np.ndarray:
        """How many drafts of each can be of use: with all of them accepted, one more token is generated."""
        table = self._scheduler.table
        end_S = table.limit[slot_S]
        if table.thinking[slot_S].any():
            end_S = np.minimum(end_S, end_of_drafts(table, slot_S))
        return end_S - table.num_known[slot_S] - 1

    def grant(self, plan: StepPlan, slot_S: np.ndarray, count_S: np.ndarray) -> np.ndarray:
        """How many drafts each of these sequences, all of which sample in the plan, may have of the count_S it wants:
        at most `most`, older ones first. Their blocks are allocated."""
        scheduler = self._scheduler
        table, pool = scheduler.table, scheduler.pool
        room = scheduler.step_tokens - plan.num_tokens
        if int(count_S.sum()) > room:
            count_S = allot(count_S, room)
        size, held_S, known_S = pool.block_size, table.num_blocks[slot_S], table.num_known[slot_S]
        missing_S = (known_S + count_S + (size - 1)) // size - held_S  # never of known tokens, which have their blocks
        if missing_S.max(initial=0) > 0:
            missing_S = np.maximum(missing_S, 0)
            if int(missing_S.sum()) > pool.num_free:
                missing_S = allot(missing_S, pool.num_free)
                count_S = np.minimum(count_S, (held_S + missing_S) * size - known_S)
            grown = np.flatnonzero(missing_S)
            if len(grown):
                table.append_blocks(slot_S[grown], missing_S[grown], pool.allocate(int(missing_S.sum())))
        return count_S

    def place(self, plan: StepPlan, sampling: np.ndarray, token_id_SK: np.ndarray, count_S: np.ndarray) -> StepPlan:
        """The plan with the first count_S[s] tokens of token_id_SK[s], which were granted, as drafts of the sequence at
        place sampling[s] of the plan."""
        table, slot_S = self._scheduler.table, plan.slot_S[sampling]
        place_D = ranges(table.num_known[slot_S], count_S)
        is_draft_SK = np.arange(token_id_SK.shape[1]) < count_S[:, None]
        table.token_ids[np.repeat(slot_S, count_S), place_D] = token_id_SK[is_draft_SK]
        draft_S = np.zeros_like(plan.count_S)
        draft_S[sampling] = count_S
        return StepPlan(plan.slot_S, plan.start_S, plan.count_S + draft_S, plan.samples_S, draft_S)


class Drafting:
    """Proposers and a policy at work in one engine. Holds what was proposed for the step that is being launched."""

    def __init__(self, proposers: Sequence[Proposer], policy: DraftPolicy, scheduler: Scheduler) -> None:
        assert proposers, "somebody has to draft"
        self.proposers, self.policy, self._scheduler = tuple(proposers), policy, scheduler
        self._room = DraftRoom(scheduler)
        self._step: DraftedStep | None = None

    def admitted(self, slot: int) -> None:
        self.policy.admitted(slot)
        for proposer in self.proposers:
            proposer.admitted(slot)

    def left(self, slot: int, finished: bool) -> None:
        for proposer in self.proposers:
            proposer.left(slot, finished)

    def undone(self, plan: StepPlan) -> None:
        for proposer in self.proposers:
            proposer.undone(plan.slot_S)

    def select(self, plan: StepPlan) -> Proposer | None:
        """Who is to be asked for drafts in this step."""
        num_sequences, num_tokens = int(np.count_nonzero(plan.samples_S)), plan.num_tokens
        room = max(self._scheduler.step_tokens - num_tokens, 0)
        self._step = DraftedStep(
            StepFacts(num_sequences, num_tokens - num_sequences, room, len(self._scheduler.waiting))
        )
        number = self.policy.select(self._step.facts)
        return None if number is None else self.proposers[number]

    def follows(self, proposer: Proposer, flight: StepInFlight, in_flight: DraftedStep | None) -> bool:
        """Whether the proposer that `select` gave can draft before the tokens in flight are known. in_flight: what
        `take_step` gave of their step."""
        if flight.has_drafts and (in_flight is None or in_flight.proposer is not proposer):
            return False  # it knows nothing of another's drafts before they are known tokens
        return proposer.follows(flight)

    def extend(
        self,
        plan: StepPlan,
        proposer: Proposer | None,
        flight: StepInFlight | None = None,
        most_queries: int | None = None,
    ) -> StepPlan:
        """`plan` with drafts of the proposer that `select` gave, or as it is. flight: what the proposer `follows`;
        None: all tokens are known. most_queries: tokens that a sequence may compute; None: as many as there is room
        for.

        Nobody drafts while steps are limited because one did not fit the memory: a draft model takes some too. A step
        of one token has no room for drafts, so it asks nobody either.
        """
        assert self._step is not None
        facts, sampling = self._step.facts, np.flatnonzero(plan.samples_S)
        step_tokens = self._scheduler.step_tokens
        is_limited = step_tokens == 1 or step_tokens < self._scheduler.max_num_batched_tokens
        if proposer is None or is_limited or not len(sampling):
            return plan
        slot_S = plan.slot_S[sampling]
        offer = proposer.offer(slot_S, flight)
        most_S = np.maximum(self._room.most(slot_S), 0)
        if most_queries is not None:
            most_S = np.minimum(most_S, most_queries - plan.count_S[sampling])
        offer = Offer(slot_S, np.minimum(offer.count_S, most_S), offer.match_len_S, offer.token_id_SK)
        count_S = np.maximum(np.minimum(self.policy.depths(facts, offer), offer.count_S), 0)
        if count_S.any():
            count_S = self._room.grant(plan, slot_S, count_S)
        if count_S.any():
            drafts = proposer.draft(offer, count_S, flight)
            plan = self._room.place(plan, sampling, drafts.token_id_SK, count_S)
            self._step = DraftedStep(facts, slot_S, count_S, proposer, drafts)
        return plan

    def with_future_drafts(self, plan: StepPlan, future: FutureTokens | None) -> FutureTokens | None:
        """The future tokens of a plan that `extend` gave: `future` and the drafts that only the device knows."""
        device_drafts = None if self._step is None or self._step.drafts is None else self._step.drafts.device_drafts
        if device_drafts is None or plan.draft_S is None:
            return future
        end_S = np.cumsum(plan.count_S)
        place_D = ranges(end_S - plan.draft_S, plan.draft_S)
        is_draft_SK = np.arange(device_drafts.row_SK.shape[1]) < plan.draft_S[plan.samples_S][:, None]
        row_D = device_drafts.row_SK[is_draft_SK]
        if future is None:
            return FutureTokens(place_D, row_D, device_drafts.token_ids_N)
        return future.with_drafts(place_D, row_D, device_drafts.token_ids_N)

    def verify(self, logits_RV: torch.Tensor, batch: SamplingBatch | None) -> Verified:
        """What the model says to the drafts of the last `extend`. `batch`: see `verify.verify`."""
        draft_R, proposal = self._drafts_of_rows(logits_RV.device)
        assert isinstance(draft_R, np.ndarray)
        return verify(logits_RV, batch, draft_R, proposal)

    def verify_on_device(
        self, kernels: SamplingKernels, logits_RV: torch.Tensor, batch: SamplingBatch | None, future: FutureIds | None
    ) -> PendingVerified:
        """Begin the same on the device."""
        draft_R, proposal = self._drafts_of_rows(logits_RV.device)
        assert self._step is not None
        if isinstance(draft_R, np.ndarray):
            draft_R = on_device(draft_R, logits_RV.device)
        return verify_on_device(kernels, logits_RV, batch, self._step.drafted_S, draft_R, proposal, future)

    def _drafts_of_rows(self, device: torch.device) -> tuple[np.ndarray | torch.Tensor, ProposalDistribution | None]:
        """What was drafted for the place of each row, where it is known, and its distribution."""
        assert self._step is not None
        assert self._step.drafts is not None
        drafted_S, drafts = self._step.drafted_S, self._step.drafts
        most = int(drafted_S.max())
        of_SK1 = np.empty((len(drafted_S), most + 1), dtype=np.int64)
        of_SK = drafts.token_id_SK if drafts.device_drafts is None else drafts.device_drafts.row_SK
        of_SK1[:, :most] = of_SK[:, :most]
        of_SK1[np.arange(len(drafted_S)), drafted_S] = -1
        is_row_SK1 = np.arange(most + 1) <= drafted_S[:, None]
        row_R = of_SK1[is_row_SK1]
        draft_R: np.ndarray | torch.Tensor = row_R
        if drafts.device_drafts is not None:
            draft_R = torch.nn.functional.pad(drafts.device_drafts.token_ids_N, (0, 1), value=-1)[
                on_device(row_R, device)
            ]
        if drafts.q_SKV is None:
            return draft_R, None
        row_D = np.flatnonzero(row_R >= 0)
        is_draft_SK = np.arange(most) < drafted_S[:, None]
        sequence_D, column_D = (on_device(at_D, device) for at_D in np.nonzero(is_draft_SK))
        draft_D = draft_R[row_D] if isinstance(draft_R, np.ndarray) else draft_R[on_device(row_D, device)]
        return draft_R, ProposalDistribution(row_D, draft_D, drafts.q_SKV[sequence_D, column_D])

    def draft_ids(self, sampling: np.ndarray) -> list[list[int]]:
        """The drafts of the last `extend` of some sequences, by their places among those that sample. Where only the
        device knows them, it is waited for."""
        assert self._step is not None
        assert self._step.drafts is not None
        drafts, count_S = self._step.drafts, self._step.drafted_S
        token_id_SK = drafts.token_id_SK[sampling]
        if drafts.device_drafts is not None:
            row_SK = drafts.device_drafts.row_SK[sampling]
            token_id_SK = drafts.device_drafts.token_ids_N.cpu().numpy()[np.maximum(row_SK, 0)]
        return [ids[:count] for ids, count in zip(token_id_SK.tolist(), count_S[sampling].tolist())]

    def take_step(self) -> DraftedStep | None:
        """What `done` needs of the step that has been launched."""
        step, self._step = self._step, None
        return step

    def done(
        self,
        stats: EngineStats,
        step: DraftedStep | None,
        output: SamplerOutput | Verified,
        here_S: np.ndarray,
        num_generated: int,
    ) -> None:
        """A step has been computed, and its tokens are in the table: count it and tell the policy. here_S: which
        sequences were still there when it had been launched; what was drafted for others counts nothing."""
        assert step is not None
        verdict = None
        if step.proposer is not None:
            assert isinstance(output, Verified)
            accepted_S = np.zeros_like(step.drafted_S)
            accepted_S[here_S] = output.num_accepted_S
            (here,) = np.nonzero(step.drafted_S * here_S)
            verdict = Verdict(step.slot_S[here], step.drafted_S[here], accepted_S[here])
            if len(here):
                record_drafts(stats, verdict.drafted_D, verdict.accepted_D)
                step.proposer.settled(verdict.slot_D, verdict.drafted_D, verdict.accepted_D)
        self.policy.observe(StepOutcome(step.facts, num_generated, verdict))


_DRAFTED, _ACCEPTED = ([f"{what}_{place}" for place in range(1, DRAFT_PLACES + 1)] for what in ("drafted", "accepted"))


def record_drafts(stats: EngineStats, drafted_S: np.ndarray, accepted_S: np.ndarray) -> None:
    """Add a step with drafts to `stats`: how many of each sequence's were computed, and how many of them accepted."""
    stats.num_draft_steps += 1
    stats.rejected_drafts += int(drafted_S.sum() - accepted_S.sum())
    counts = vars(stats)
    for names, count_S in ((_DRAFTED, drafted_S), (_ACCEPTED, accepted_S)):
        for name, count in zip(names, _by_place(count_S)):
            counts[name] += count


def _by_place(count_S: np.ndarray) -> list[int]:
    """How many drafts are in each place; the last place stands for all from there on."""
    deep = np.bincount(count_S)[::-1].cumsum()[::-1][1:].tolist()
    return [*deep[: DRAFT_PLACES - 1], sum(deep[DRAFT_PLACES - 1 :])][: len(deep)]
