"""Runs the steps of an engine one after the other.

    plan -> drafts -> input -> model -> sample, read -> commit -> append tokens

`overlapped.py` does the same one step ahead of the tokens, for a device that works asynchronously. `out_of_memory.py`
wraps either loop and undoes steps that run out of memory. `SpecDecoder` adds drafts to a plan and verifies them.
"""

from collections.abc import Callable
from time import perf_counter_ns

import numpy as np
import torch

from pipeline.engine.drafts.spec_decoder import SpecDecoder
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
from pipeline.engine.step.grammar_masks import GrammarMasks
from pipeline.engine.step.output_processor import OutputProcessor


class StepLoop:
    """Synchronous step loop of one engine. When a step raises, e.g. by Ctrl-C while the model computes, the sequences
    are unchanged."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        output_processor: OutputProcessor,
        masks: GrammarMasks,
        spec_decoder: SpecDecoder | None = None,
    ) -> None:
        self.scheduler, self.table, self.stats = scheduler, scheduler.table, scheduler.stats
        self.runner, self.output_processor, self.masks, self.spec_decoder = (
            runner,
            output_processor,
            masks,
            spec_decoder,
        )
        self.computing: StepPlan | None = None  # planned but not computed yet

    def step(self) -> None:
        """Run one step. Completions are passed to the calls that own the requests."""
        begun_ns, rejected = perf_counter_ns(), self.stats.rejected_drafts
        plan = self.scheduler.plan()
        if plan is None:
            return
        if self.spec_decoder is not None:
            self.computing = plan  # a draft model may run out of memory too
            if self.spec_decoder.select(plan):
                plan = self.spec_decoder.extend(plan)
        self._compute(plan, begun_ns, rejected)

    def _compute(self, plan: StepPlan, begun_ns: int, rejected: int) -> None:
        """Compute a plan whose known tokens have all been sampled, and append its tokens."""
        self.computing = plan
        self._copy_states()
        step = build_input(plan, self.table)
        reading = StepReading.of_plan(plan, self.table) if self.table.num_readers else None
        if reading is None:
            output = self._sample(plan, self.runner.execute(step))
        else:
            logits_RV, hidden_NH = self.runner.execute_and_read(step, reading.row_N)
            output = self._sample(plan, logits_RV)
            reading.read_outputs(
                hidden_NH, self.runner, self.table
            )  # last, so that an undone step is not recorded twice
        self.computing = None
        tokens = self.scheduler.commit(plan)
        self._append(plan.sampling_slot_S, output)
        self.output_processor.finish_read(plan.slot_S)
        step_us, rejected = (perf_counter_ns() - begun_ns) // 1000, self.stats.rejected_drafts - rejected
        only_samples = plan.draft_S is None and reading is None and plan.num_tokens == len(plan.slot_S)
        tokens.add_time(self.stats, step_us, only_samples, rejected)

    def _copy_states(self) -> None:
        """Make the copies that the scheduler has planned since the last step."""
        if copies := self.scheduler.snapshots.copies:
            self.runner.copy_states(copies)
            copies.clear()

    def _sample(self, plan: StepPlan, logits_RV: torch.Tensor) -> SamplerOutput | Verified:
        """Return the next tokens of the sequences that sample: one each, or those verified from their drafts."""
        output = self._chosen(plan, logits_RV)
        if plan.draft_S is None:
            return output
        assert self.spec_decoder is not None
        return self.spec_decoder.verify(output)

    def _chosen(self, plan: StepPlan, logits_RV: torch.Tensor) -> SamplerOutput:
        """Return the token of each row of logits."""
        are_plain, mask = self._mask_of(plan)
        if plan.draft_S is None and are_plain:
            return greedy(logits_RV, mask)
        return sample(logits_RV, self._batch(plan, are_plain, mask), self._proposal(plan))

    def _proposal(self, plan: StepPlan) -> ProposalDistribution | None:
        if plan.draft_S is None:
            return None
        assert self.spec_decoder is not None
        return self.spec_decoder.proposal()

    def batch_of(self, plan: StepPlan) -> SamplingBatch | None:
        """Return the sampler inputs of the step's rows; None if all are greedy without other options."""
        return self._batch(plan, *self._mask_of(plan))

    def _batch(self, plan: StepPlan, are_plain: bool, mask: TokenMask | None) -> SamplingBatch | None:
        if are_plain and mask is None:
            return None
        return SamplingBatch.of_plan(plan, self.table).with_mask(mask)

    def _mask_of(self, plan: StepPlan) -> tuple[bool, TokenMask | None]:
        """Return whether all rows are greedy without other options, and their mask."""
        table, slot_S = self.table, plan.sampling_slot_S
        is_unmasked = not (table.has_grammar[slot_S].any() or table.thinking[slot_S].any())
        return bool(table.is_plain[slot_S].all()), None if is_unmasked else self.masks.of_plan(plan, self.spec_decoder)

    def _append(self, slot_S: np.ndarray, output: SamplerOutput | Verified) -> None:
        """Append these sequences' tokens and record the drafts' results."""
        num_generated = self.output_processor.append_tokens(slot_S, output)
        if self.spec_decoder is not None:
            self.spec_decoder.done(self.stats, self.spec_decoder.pop_step(), output, num_generated)

    def undo(self, plan: StepPlan) -> None:
        """Undo a step that was planned but not computed."""
        self.scheduler.undo(plan)
        if self.spec_decoder is not None:
            self.spec_decoder.on_rollback(plan)

    def sync(self) -> None:
        """Append all tokens in flight: none here."""

    def abort(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove the matching sequences, waiting or running, and return them. Sequences that end with a token in flight
        count as ended."""
        self.sync()
        return self.scheduler.abort(matches)

    def close(self) -> None:
        """Release the model and everything in flight."""
        self.spec_decoder = self.table.watcher = None
        self.runner.close()
        del self.runner
