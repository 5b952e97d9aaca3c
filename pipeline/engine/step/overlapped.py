"""Runs steps on a device that works beside the host (a GPU), one step ahead of the tokens.

    plan n+1 with placeholders -> launch n+1 -> read the tokens of n -> take them -> n+1 is in flight

To plan a step the host needs to know which sequences get a token, not which tokens. So it plans and launches step n+1
while the device samples the tokens of step n, and reads these afterwards.

A sequence that turns out to have ended with its token of n was computed once too often; its row of n+1 is dropped. What
that row wrote lies after the sequence's last token, in blocks that nobody reads before they are written again: the
device works in the order of the launches.
"""

from time import perf_counter_ns

from pipeline.engine.drafts.drafting import DraftedStep, Drafting
from pipeline.engine.drafts.proposer import Proposer
from pipeline.engine.forward.in_flight import Placeholders, StepInFlight
from pipeline.engine.forward.runner import Runner
from pipeline.engine.sampling.on_device import PendingOutput, sample_on_device
from pipeline.engine.sampling.verify import PendingVerified
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import is_greedy
from pipeline.engine.schedule.step_plan import StepPlan, build_input
from pipeline.engine.schedule.thinking import has_spent
from pipeline.engine.step.completing import Completing
from pipeline.engine.step.grammar_masks import GrammarMasks
from pipeline.engine.step.loop import StepLoop


class OverlappedLoop(StepLoop):
    """Keeps one step in flight. Where a step raises, that one is still in flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        completing: Completing,
        masks: GrammarMasks,
        drafting: Drafting | None = None,
    ) -> None:
        super().__init__(scheduler, runner, completing, masks, drafting)
        self.in_flight: StepInFlight | None = None
        self._drafted: DraftedStep | None = None  # of the step in flight
        self._placeholders = Placeholders(self.table, None)

    def step(self) -> None:
        """Launch one step, and take the tokens of the one before."""
        begun_ns, rejected = perf_counter_ns(), self.stats.rejected_drafts
        self._placeholders = Placeholders(self.table, self.in_flight)
        try:
            plan = self._plan()
            if plan is None:
                self.land()
                return
            if self.table.num_readers:
                return self._compute(plan, begun_ns, rejected)
            self.computing = plan
            pending = self._launch(plan)
        finally:
            self._placeholders.withdraw()
        self.computing = None
        drafted = None if self.drafting is None else self.drafting.take_step()
        self.land(ahead=plan)
        slot_S, plan = plan.sampling_slot_S, self._placeholders.rebase(plan, self.scheduler.running)
        tokens = self.scheduler.commit(plan)
        in_flight = StepInFlight.of(slot_S, pending, self.table, self.scheduler.running)
        if len(in_flight.slot_K):
            self.in_flight, self._drafted = in_flight, drafted
        # Most of this time the device computed the step whose tokens were taken: what it rejected counts here.
        step_us, rejected = (perf_counter_ns() - begun_ns) // 1000, self.stats.rejected_drafts - rejected
        only_samples = plan.draft_S is None and plan.num_tokens == len(plan.slot_S)
        tokens.add_time(self.stats, step_us, only_samples, rejected)
        if self.scheduler.pacing is not None:
            self.scheduler.pacing.observe(step_us, is_mixed=tokens.prefill + tokens.repeated > 0)

    def land(self, ahead: StepPlan | None = None) -> None:
        """Wait for the step in flight and take its tokens. ahead: a step that is planned with them, whose blocks are
        kept."""
        self._placeholders.withdraw()
        in_flight = self.in_flight
        if in_flight is None:
            return
        output = in_flight.output()  # where that is interrupted, the step is still in flight
        self.in_flight = None
        num_generated = self.completing.take(in_flight.slot_K, output, ahead)
        if self.drafting is not None and self._drafted is not None:
            self.drafting.done(self.stats, self._drafted, output, in_flight.kept_S, num_generated)

    def close(self) -> None:
        self.in_flight = None
        super().close()

    def _plan(self) -> StepPlan | None:
        """The next step with its drafts. Where that needs the tokens in flight, they are waited for."""
        if self.in_flight is not None and (self.scheduler.would_preempt() or self._has_masks()):
            self.land()  # who is preempted leaves with all that it knows; a mask depends on all tokens before it
            self._placeholders = Placeholders(self.table, None)
        plan = self.scheduler.plan()
        if plan is not None and self.table.num_readers and self.in_flight is not None:
            self.land(ahead=plan)  # the host waits for what it reads
            plan = self._placeholders.rebase(plan, self.scheduler.running)
        if plan is None or not len(plan.slot_S) or self.drafting is None:
            return plan if plan is not None and len(plan.slot_S) else None
        proposer = self.drafting.select(plan)
        if self.table.num_readers:
            proposer = None  # the host builds this step's input, and a draft model's drafts are on the device alone
        if self.in_flight is not None and not self._can_draft_ahead(plan, proposer):
            self.land(ahead=plan)
            plan = self._placeholders.rebase(plan, self.scheduler.running)
        if proposer is not None and len(plan.slot_S):
            max_queries = None
            if self.in_flight is not None and self.in_flight.has_drafts:
                max_queries = self.runner.max_corrected_queries
            self.computing = plan
            plan = self.drafting.extend(plan, proposer, self.in_flight, max_queries)
        return plan if len(plan.slot_S) else None

    def _has_masks(self) -> bool:
        """Whether a row's next token may depend on the tokens in flight by a mask."""
        slot_S = self.scheduler.running
        return bool(self.table.has_grammar[slot_S].any() or has_spent(self.table, slot_S).any())

    def _can_draft_ahead(self, plan: StepPlan, proposer: Proposer | None) -> bool:
        """Whether the step can be launched before the tokens in flight are known.

        Who drafts by looking up must know them. Where drafts in flight leave open how many tokens there are, so must
        rows that depend on it, and kernels that read contexts on the host.
        """
        drafting, in_flight = self.drafting, self.in_flight
        assert drafting is not None
        assert in_flight is not None
        if proposer is not None and not drafting.follows(proposer, in_flight, self._drafted):
            return False
        if not in_flight.has_drafts:
            return True
        fits = int(plan.count_S.max()) <= self.runner.max_corrected_queries
        return fits and bool(is_greedy(self.table.sampling[plan.sampling_slot_S]).all())

    def _launch(self, plan: StepPlan) -> PendingOutput | PendingVerified:
        """Queue the step and the sampling of its tokens; waits for nothing."""
        future = None if self.in_flight is None else self.in_flight.future_tokens(plan, self.table)
        if self.drafting is not None:
            future = self.drafting.with_future_drafts(plan, future)
        step = build_input(plan, self.table)
        logits_RV = self.runner.execute(step, future)
        batch, ids = self.batch_of(plan), None
        if future is not None and future.rejected is None and batch is not None:
            ids = future.ids(step)
        if plan.draft_S is None:
            return sample_on_device(self.runner, logits_RV, batch, ids)
        assert self.drafting is not None
        return self.drafting.verify_on_device(self.runner, logits_RV, batch, ids)
