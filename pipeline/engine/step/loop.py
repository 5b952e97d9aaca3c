"""Runs the steps of an engine one after the other.

    plan -> drafts -> input -> model -> sample, read -> commit -> take

`overlapped.py` does the same one step ahead of the tokens, for a device that works beside the host. Either is wrapped
by `out_of_memory.py`, which undoes a step that did not fit. `Drafting` adds drafts to a plan and checks them.
"""

from collections.abc import Callable
from time import perf_counter_ns

import numpy as np
import torch

from pipeline.engine.drafts.drafting import Drafting
from pipeline.engine.forward.runner import Runner
from pipeline.engine.grammar.token_mask import TokenMask
from pipeline.engine.reading.step_reading import StepReading
from pipeline.engine.sampling.batch import SamplerOutput, SamplingBatch
from pipeline.engine.sampling.on_host import greedy, sample
from pipeline.engine.sampling.rejection import ProposalDistribution
from pipeline.engine.sampling.verify import Verified
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.step_plan import StepPlan, build_input
from pipeline.engine.step.completing import Completing
from pipeline.engine.step.grammar_masks import GrammarMasks


class StepLoop:
    """Of one engine. When a step raises, a Ctrl-C while the model computes for instance, the sequences are as before
    it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        completing: Completing,
        masks: GrammarMasks,
        drafting: Drafting | None = None,
    ) -> None:
        self.scheduler, self.table, self.stats = scheduler, scheduler.table, scheduler.stats
        self.runner, self.completing, self.masks, self.drafting = runner, completing, masks, drafting
        self.computing: StepPlan | None = None  # planned, and not computed yet

    def step(self) -> None:
        """Run one step. Completions go to the calls that asked for them."""
        begun_ns, rejected = perf_counter_ns(), self.stats.rejected_drafts
        plan = self.scheduler.plan()
        if plan is None:
            return
        if self.drafting is not None:
            self.computing = plan  # a draft model computes too
            if self.drafting.select(plan):
                plan = self.drafting.extend(plan)
        self._compute(plan, begun_ns, rejected)

    def _compute(self, plan: StepPlan, begun_ns: int, rejected: int) -> None:
        """Compute a plan whose known tokens are all known, and take what comes of it."""
        self.computing = plan
        step = build_input(plan, self.table)
        reading = StepReading.of_plan(plan, self.table) if self.table.num_readers else None
        if reading is None:
            output = self._sample(plan, self.runner.execute(step))
        else:
            logits_RV, hidden_NH = self.runner.execute_and_read(step, reading.row_N)
            output = self._sample(plan, logits_RV)
            reading.take(hidden_NH, self.runner, self.table)  # last: nobody is told twice of a step that is undone
        self.computing = None
        tokens = self.scheduler.commit(plan)
        self._take(plan.sampling_slot_S, output)
        self.completing.take_read(plan.slot_S)
        step_us, rejected = (perf_counter_ns() - begun_ns) // 1000, self.stats.rejected_drafts - rejected
        only_samples = plan.draft_S is None and reading is None and plan.num_tokens == len(plan.slot_S)
        tokens.add_time(self.stats, step_us, only_samples, rejected)

    def _sample(self, plan: StepPlan, logits_RV: torch.Tensor) -> SamplerOutput | Verified:
        """The next tokens of the sequences that sample: one each, or those that follow from their drafts."""
        output = self._chosen(plan, logits_RV)
        if plan.draft_S is None:
            return output
        assert self.drafting is not None
        return self.drafting.verify(output)

    def _chosen(self, plan: StepPlan, logits_RV: torch.Tensor) -> SamplerOutput:
        """The token of each row of logits."""
        are_plain, mask = self._mask_of(plan)
        if plan.draft_S is None and are_plain:
            return greedy(logits_RV, mask)
        return sample(logits_RV, self._batch(plan, are_plain, mask), self._proposal(plan))

    def _proposal(self, plan: StepPlan) -> ProposalDistribution | None:
        if plan.draft_S is None:
            return None
        assert self.drafting is not None
        return self.drafting.proposal()

    def batch_of(self, plan: StepPlan) -> SamplingBatch | None:
        """What sampling is told of the step's rows; None where all are greedy and want nothing else."""
        return self._batch(plan, *self._mask_of(plan))

    def _batch(self, plan: StepPlan, are_plain: bool, mask: TokenMask | None) -> SamplingBatch | None:
        if are_plain and mask is None:
            return None
        return SamplingBatch.of_plan(plan, self.table).with_mask(mask)

    def _mask_of(self, plan: StepPlan) -> tuple[bool, TokenMask | None]:
        """Whether all rows are greedy and want nothing else but this mask."""
        table, slot_S = self.table, plan.sampling_slot_S
        has_none = not (table.has_grammar[slot_S].any() or table.thinking[slot_S].any())
        return bool(table.is_plain[slot_S].all()), None if has_none else self.masks.of_plan(plan, self.drafting)

    def _take(self, slot_S: np.ndarray, output: SamplerOutput | Verified) -> None:
        """Give these sequences their tokens."""
        num_generated = self.completing.take(slot_S, output)
        if self.drafting is not None:
            self.drafting.done(self.stats, self.drafting.take_step(), output, num_generated)

    def undo(self, plan: StepPlan) -> None:
        """Forget a step that was planned and not computed."""
        self.scheduler.undo(plan)
        if self.drafting is not None:
            self.drafting.undone(plan)

    def land(self) -> None:
        """Take all tokens that are being computed: none here."""

    def abort(self, is_meant: Callable[[Sequence], bool]) -> list[Sequence]:
        """Forget those sequences wherever they are, and return them. What ends with a token in flight has ended."""
        self.land()
        return self.scheduler.abort(is_meant)

    def close(self) -> None:
        """Let go of the model and of what is in flight."""
        self.drafting = self.table.watcher = None
        del self.runner
