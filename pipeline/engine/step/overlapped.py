"""Runs steps on an asynchronous device (a GPU), one step ahead of the tokens.

    plan n+1 with placeholders -> launch n+1 -> read the tokens of n -> append them -> n+1 is in flight

To plan a step the host must know which sequences get a token, not which tokens. So it plans and launches step n+1
while the device samples the tokens of step n, and reads these afterwards. A step with drafts waits for the previous
tokens, from which it drafts, and the next step waits for its accepted tokens.

A sequence that ended with its token of n was computed once too often; its row of n+1 is dropped. That row wrote after
the sequence's last token, into blocks that no sequence reads before they are written again: the device works in the
order of the launches.
"""

from time import perf_counter_ns

import torch

from pipeline.engine.drafts.spec_decoder import DraftedStep, SpecDecoder
from pipeline.engine.forward.in_flight import Placeholders, StepInFlight
from pipeline.engine.forward.runner import Runner
from pipeline.engine.sampling.batch import SamplerOutput
from pipeline.engine.sampling.on_device import PendingOutput, sample_on_device
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.step_plan import StepPlan, build_input
from pipeline.engine.schedule.thinking import budget_exhausted
from pipeline.engine.step.grammar_masks import GrammarMasks
from pipeline.engine.step.loop import StepLoop
from pipeline.engine.step.output_processor import OutputProcessor


class OverlappedLoop(StepLoop):
    """Step loop that keeps one step in flight. When a step raises, that one is still in flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        output_processor: OutputProcessor,
        masks: GrammarMasks,
        spec_decoder: SpecDecoder | None = None,
    ) -> None:
        super().__init__(scheduler, runner, output_processor, masks, spec_decoder)
        self.in_flight: StepInFlight | None = None
        self._selected: DraftedStep | None = None  # of the step in flight
        self._placeholders = Placeholders(self.table, None)

    def step(self) -> None:
        """Launch one step, and append the tokens of the previous one."""
        begun_ns, rejected = perf_counter_ns(), self.stats.rejected_drafts
        self._placeholders = Placeholders(self.table, self.in_flight)
        try:
            plan = self._plan()
            if plan is None:
                self.sync()
                return
            if self.table.num_readers or plan.draft_S is not None:
                return self._compute(plan, begun_ns, rejected)
            self.computing = plan
            pending = self._launch(plan)
        finally:
            self._placeholders.withdraw()
        self.computing = None
        selected = None if self.spec_decoder is None else self.spec_decoder.pop_step()
        try:
            self.sync()
        except BaseException:
            self.scheduler.begin_again(plan)  # it has been launched, and does not count
            raise
        slot_S, plan = plan.sampling_slot_S, self._placeholders.rebase(plan, self.scheduler.running)
        tokens = self.scheduler.commit(plan)
        in_flight = StepInFlight.from_pending(slot_S, pending, self.scheduler.running)
        if len(in_flight.slot_K):
            self.in_flight, self._selected = in_flight, selected
        # Most of this time the device computed the previous step.
        step_us = (perf_counter_ns() - begun_ns) // 1000
        tokens.add_time(self.stats, step_us, only_samples=plan.num_tokens == len(plan.slot_S))
        if self.scheduler.pacing is not None:
            self.scheduler.pacing.observe(step_us, is_mixed=tokens.prefill + tokens.repeated > 0)

    def sync(self) -> None:
        """Wait for the step in flight and append its tokens."""
        self._placeholders.withdraw()
        in_flight = self.in_flight
        if in_flight is None:
            return
        output = in_flight.output()  # if this is interrupted, the step is still in flight
        self.in_flight = None
        num_generated = self.output_processor.append_tokens(in_flight.slot_K, output)
        if self.spec_decoder is not None and self._selected is not None:
            self.spec_decoder.done(self.stats, self._selected, output, num_generated)

    def close(self) -> None:
        self.in_flight = None
        super().close()

    def _plan(self) -> StepPlan | None:
        """Plan the next step with its drafts, waiting for the tokens in flight if it depends on them."""
        if self.in_flight is not None and (self.scheduler.would_preempt() or self._has_masks()):
            self.sync()  # a preempted sequence keeps all its tokens; a mask depends on all tokens before it
            self._placeholders = Placeholders(self.table, None)
        plan = self.scheduler.plan()
        if plan is None or not len(plan.slot_S):
            return None
        # The host reads the results of steps with readers at once, and the next plan depends on them.
        has_drafts = self.spec_decoder is not None and self.spec_decoder.select(plan)
        if self.in_flight is not None and (has_drafts or self.table.num_readers):
            self.sync()
            plan = self._placeholders.rebase(plan, self.scheduler.running)
        if has_drafts and len(plan.slot_S):
            assert self.spec_decoder is not None
            self.computing = plan
            plan = self.spec_decoder.extend(plan)
        return plan if len(plan.slot_S) else None

    def _has_masks(self) -> bool:
        """Return whether a mask of a row's next token may depend on the tokens in flight."""
        slot_S = self.scheduler.running
        return bool(self.table.has_grammar[slot_S].any() or budget_exhausted(self.table, slot_S).any())

    def _launch(self, plan: StepPlan) -> PendingOutput:
        """Queue the step and the sampling of its tokens without waiting."""
        future = None if self.in_flight is None else self.in_flight.future_tokens(plan, self.table)
        self._copy_states()
        step = build_input(plan, self.table)
        logits_RV = self.runner.execute(step, future)
        batch = self.batch_of(plan)
        ids = None if future is None or batch is None else future.ids(step)
        return sample_on_device(self.runner, logits_RV, batch, ids)

    def _chosen(self, plan: StepPlan, logits_RV: torch.Tensor) -> SamplerOutput:
        return sample_on_device(self.runner, logits_RV, self.batch_of(plan), proposal=self._proposal(plan)).output()
