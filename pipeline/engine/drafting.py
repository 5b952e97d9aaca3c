"""Speculative decoding's part of a step: who drafts, how much of it is computed, and what the model made of it.

StepPlan -> policy: who? -> proposer: offer -> policy: how many -> room -> proposer: drafts -> StepPlan with drafts
-> one step computes known tokens and drafts -> `verify` -> rounds of tokens, as plain steps would give them

Where a device works beside the host, nothing of this waits for it: drafts that a draft model makes there stay there
(`DrawnDrafts`), and so does what the model made of them (`verify.Checked`), until the step is landed
(step/in_flight.py).

Where the policy wants to know what drafts would be worth, those of some sequences are replayed over the tokens that
came, when a step has landed (propose/replay.py), or what was offered is compared with those that come
(propose/shadow.py).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.draft_room import DraftRoom
from pipeline.engine.params import EngineStats
from pipeline.engine.propose.offer import Offer
from pipeline.engine.propose.policy import DraftPolicy, StepFacts, StepOutcome
from pipeline.engine.propose.proposer import Drafts, Proposer
from pipeline.engine.propose.replay import LooksUp, replay
from pipeline.engine.propose.shadow import ShadowOffers
from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.on_device import Chooser
from pipeline.engine.sampling.penalties import LateIds
from pipeline.engine.sampling.rejection import DraftLaw
from pipeline.engine.sampling.verify import Checked, Verified, check_on_device, verify
from pipeline.engine.schedule.accounting import record_drafts
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.step_plan import StepPlan, runs
from pipeline.engine.step.in_flight import Flight, LateTokens
from pipeline.kernels.transfer import on_device

MOST_SHADOWED = 8  # sequences whose offers are looked at: looking up takes some microseconds for each


@dataclass(frozen=True)
class Noted:
    """What is known of a step before it is computed. S: its sequences that get a token. who_us: what it took to decide
    who drafts."""

    facts: StepFacts
    drafted_S: np.ndarray
    who_us: int
    proposer: Proposer | None = None
    drafts: Drafts | None = None
    moments: tuple["_Moment", ...] = ()  # before the offer, behind it, behind the drafts

    @property
    def proposing_us(self) -> tuple[int, int]:
        """Of the offer, with deciding who makes it, and of the drafts, once the step has been computed."""
        if not self.moments:
            return 0, 0
        begun, offered, drafted = self.moments
        return self.who_us + begun.us_until(offered), offered.us_until(drafted)


class _Moment:
    """In the work of a device that the host does not wait for, or else on the host."""

    def __init__(self, on_device: bool) -> None:
        self._ns = time.perf_counter_ns()
        self._event: torch.cuda.Event | None = None
        if on_device and torch.cuda.is_initialized():
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def us_until(self, later: "_Moment") -> int:
        if self._event is not None and later._event is not None:
            return round(1000 * self._event.elapsed_time(later._event))
        return (later._ns - self._ns) // 1000


class Drafting:
    """Proposers and a policy at work in one engine. Holds what was proposed for the step that is being launched."""

    def __init__(self, proposers: Sequence[Proposer], policy: DraftPolicy, scheduler: Scheduler) -> None:
        assert proposers, "somebody has to draft"
        self.proposers, self.policy, self._scheduler = tuple(proposers), policy, scheduler
        self._room, self._shadows = DraftRoom(scheduler), ShadowOffers(scheduler.table)
        self._noted: Noted | None = None

    def admitted(self, slot: int) -> None:
        for proposer in self.proposers:
            proposer.admitted(slot)

    def left(self, slot: int, finished: bool) -> None:
        self._shadows.left(slot, finished)
        self.policy.left(slot)
        for proposer in self.proposers:
            proposer.left(slot, finished)

    def undone(self, plan: StepPlan) -> None:
        for proposer in self.proposers:
            proposer.undone(plan.slot_S)

    def who(self, plan: StepPlan) -> Proposer | None:
        """Who is to be asked for drafts in this step."""
        if self.policy.passes(int(np.count_nonzero(plan.samples_S)), plan.num_tokens):
            self._noted = None
            return None
        sampling = np.flatnonzero(plan.samples_S)
        begun_ns = time.perf_counter_ns()
        facts = self._facts(plan, plan.slot_S[sampling])
        number = self.policy.proposer(facts) if len(sampling) else None
        who_us = (time.perf_counter_ns() - begun_ns) // 1000
        self._noted = Noted(facts, np.zeros(len(sampling), dtype=np.int64), who_us)
        return None if number is None else self.proposers[number]

    def follows(self, proposer: Proposer, flight: Flight, noted: Noted | None) -> bool:
        """Whether the proposer that `who` gave can draft before the tokens in flight are known, whose step `noted` is
        of."""
        if flight.has_drafts and (noted is None or noted.proposer is not proposer):
            return False  # it knows nothing of another's drafts before they are known tokens
        return proposer.follows(flight)

    def landed(self, plan: StepPlan) -> None:
        """The tokens in flight became known after `who` was asked, and the plan was followed up."""
        if self._noted is not None:
            slot_S = plan.slot_S[plan.samples_S]
            facts, nothing_S = self._facts(plan, slot_S), np.zeros(len(slot_S), dtype=np.int64)
            self._noted = Noted(facts, nothing_S, self._noted.who_us)

    def extend(self, plan: StepPlan, proposer: Proposer, flight: Flight | None, most_queries: int | None) -> StepPlan:
        """`plan` with drafts of the proposer that `who` gave, or as it is. flight: what the proposer `follows`; None:
        all tokens are known. most_queries: tokens that a sequence may compute; None: as many as there is room for."""
        assert self._noted is not None
        is_ahead = proposer.follows(flight)
        facts, sampling = self._noted.facts, np.flatnonzero(plan.samples_S)
        if not len(sampling):
            return plan
        begun = _Moment(is_ahead)
        offer = proposer.offer(facts.slot_S)
        most_S = np.maximum(self._room.most(facts.slot_S), 0)
        if most_queries is not None:
            most_S = np.minimum(most_S, most_queries - plan.count_S[sampling])
        offer = Offer(offer.slot_S, np.minimum(offer.count_S, most_S), offer.match_len_S, offer.token_id_SK)
        count_S = np.maximum(np.minimum(self.policy.choose(facts, offer), offer.count_S), 0)
        if count_S.any():
            count_S = self._room.grant(plan, facts.slot_S, count_S)
        if self._shadows.is_empty and self.policy.shadows_rest():
            self._shadow_rest(offer, count_S)
        offered, drafts = _Moment(is_ahead), None
        if count_S.any():
            drafts = proposer.draft(offer, count_S)
            plan = self._room.place(plan, sampling, drafts.token_id_SK, count_S)
        self._noted = Noted(facts, count_S, self._noted.who_us, proposer, drafts, (begun, offered, _Moment(is_ahead)))
        return plan

    def late(self, plan: StepPlan, late: LateTokens | None) -> LateTokens | None:
        """The late tokens of a plan that `extend` gave, `late` and the drafts that only the device knows."""
        drawn = None if self._noted is None or self._noted.drafts is None else self._noted.drafts.drawn
        if drawn is None or plan.draft_S is None:
            return late
        end_S = np.cumsum(plan.count_S)
        place_D = runs(end_S - plan.draft_S, plan.draft_S)
        is_draft_SK = np.arange(drawn.row_SK.shape[1]) < plan.draft_S[plan.samples_S][:, None]
        row_D = drawn.row_SK[is_draft_SK]
        if late is None:
            return LateTokens(place_D, row_D, drawn.token_ids_N)
        return late.with_drafts(place_D, row_D, drawn.token_ids_N)

    def verify(self, logits_RV: torch.Tensor, batch: SamplingBatch | None) -> Verified:
        """What the model says to the drafts of the last `extend`. `batch`: see `verify.verify`."""
        draft_R, law = self._drafts_of_rows(logits_RV.device)
        assert isinstance(draft_R, np.ndarray)
        return verify(logits_RV, batch, draft_R, law)

    def check(
        self, chooser: Chooser, logits_RV: torch.Tensor, batch: SamplingBatch | None, late: LateIds | None
    ) -> Checked:
        """Begin the same on the device."""
        draft_R, law = self._drafts_of_rows(logits_RV.device)
        assert self._noted is not None
        if isinstance(draft_R, np.ndarray):
            draft_R = on_device(draft_R, logits_RV.device)
        return check_on_device(chooser, logits_RV, batch, self._noted.drafted_S, draft_R, law, late)

    def _drafts_of_rows(self, device: torch.device) -> tuple[np.ndarray | torch.Tensor, DraftLaw | None]:
        """What was drafted for the place of each row, where it is known, and its law."""
        assert self._noted is not None
        assert self._noted.drafts is not None
        drafted_S, drafts = self._noted.drafted_S, self._noted.drafts
        most = int(drafted_S.max())
        of_SK1 = np.empty((len(drafted_S), most + 1), dtype=np.int64)
        of_SK = drafts.token_id_SK if drafts.drawn is None else drafts.drawn.row_SK
        of_SK1[:, :most] = of_SK[:, :most]
        of_SK1[np.arange(len(drafted_S)), drafted_S] = -1
        is_row_SK1 = np.arange(most + 1) <= drafted_S[:, None]
        row_R = of_SK1[is_row_SK1]
        draft_R: np.ndarray | torch.Tensor = row_R
        if drafts.drawn is not None:
            draft_R = torch.nn.functional.pad(drafts.drawn.token_ids_N, (0, 1), value=-1)[on_device(row_R, device)]
        if drafts.q_SKV is None:
            return draft_R, None
        row_D = np.flatnonzero(row_R >= 0)
        is_draft_SK = np.arange(most) < drafted_S[:, None]
        sequence_D, column_D = (on_device(at_D, device) for at_D in np.nonzero(is_draft_SK))
        draft_D = draft_R[row_D] if isinstance(draft_R, np.ndarray) else draft_R[on_device(row_D, device)]
        return draft_R, DraftLaw(row_D, draft_D, drafts.q_SKV[sequence_D, column_D])

    def noted(self) -> Noted | None:
        """What `done` needs of the step that has been launched."""
        noted, self._noted = self._noted, None
        return noted

    def done(
        self,
        stats: EngineStats,
        noted: Noted,
        accepted_S: np.ndarray,
        here_S: np.ndarray,
        num_generated: int,
        step_us: int,
    ) -> None:
        """A step has been computed, in step_us with proposing: count it and tell the policy. here_S: which sequences
        were still there when it had been launched; what was drafted for others counts nothing."""
        drafted_S = noted.drafted_S
        if not here_S.all():
            drafted_S, accepted_S = np.where(here_S, drafted_S, 0), np.where(here_S, accepted_S, 0)
        drafted = np.flatnonzero(drafted_S)
        if len(drafted):
            assert noted.proposer is not None
            record_drafts(stats, drafted_S, accepted_S)
            noted.proposer.settled(noted.facts.slot_S[drafted], accepted_S[drafted], drafted_S[drafted])
        offer_us, draft_us = noted.proposing_us
        alone_us = max(step_us - draft_us - (offer_us or noted.who_us), 0)
        self.policy.observe(
            StepOutcome(noted.facts, num_generated, alone_us, offer_us, draft_us, drafted_S, accepted_S)
        )
        self._shadow(noted.facts)

    def _shadow_rest(self, offer: Offer, count_S: np.ndarray) -> None:
        """Keep what was offered to sequences that draft nothing."""
        rest = np.flatnonzero((count_S == 0) & (offer.count_S > 0))[:MOST_SHADOWED]
        if len(rest):
            parts = offer.slot_S, offer.count_S, offer.match_len_S, offer.token_id_SK
            self._shadows.keep(Offer(*(part[rest] for part in parts)))

    def _shadow(self, facts: StepFacts) -> None:
        """Tell what became of the offers that were kept, and of others. All known tokens are in the table now, also
        where the next step has been launched already."""
        foretold = self._shadows.foretold()
        if foretold is not None:
            self.policy.foretold(foretold)
        number = self.policy.shadows(facts)
        if number is None:
            return
        # By slot: the same sequences again and again, so that their texts are indexed like those of ones that draft.
        slot_S = np.sort(facts.slot_S[np.isin(facts.slot_S, self._scheduler.running)])[:MOST_SHADOWED]
        proposer = self.proposers[number]
        assert isinstance(proposer, LooksUp), "only such a one can be asked once more"
        replayed = replay(proposer, self._scheduler.table, slot_S)
        if len(replayed.count_O):
            self.policy.foretold(replayed)

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
