"""A step of the engine from its plan to the tokens that come of it, one in flight where the device works on its own.

    plan -> drafts -> StepInput -> ModelRunner -> logits -> sampler -> tokens taken, or left in flight and landed behind
    the launch of the next step

Where a device works beside the host, the next step is planned, and launched, while the device still draws the tokens
of this one: the plan counts on them (`Scheduler.promise`), and takes that back before they are known.
"""

import time
from collections.abc import Callable

import numpy as np

from pipeline.engine.drafts.drafting import DraftedStep, Drafting
from pipeline.engine.sampling.batch import SamplerOutput, SamplingBatch
from pipeline.engine.sampling.on_device import Drawn, draw_on_device
from pipeline.engine.sampling.on_host import greedy, sample
from pipeline.engine.sampling.penalties import takes_best
from pipeline.engine.sampling.verify import Checked, Verified
from pipeline.engine.schedule.accounting import classify, record
from pipeline.engine.schedule.scheduler import NO_PROMISE, Promise, Scheduler
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.step_plan import StepPlan, build_input, runs
from pipeline.engine.startup.memory import is_out_of_memory
from pipeline.engine.step.completing import Completing, fail
from pipeline.engine.step.in_flight import Flight
from pipeline.engine.step.out_of_memory import Shortage
from pipeline.engine.step.runner import Runner


class Stepping:
    """Of one engine. Holds the step in flight and the sequences that memory did not suffice for."""

    def __init__(self, scheduler: Scheduler, runner: Runner, completing: Completing) -> None:
        self._scheduler, self._table, self.runner, self.completing = scheduler, scheduler.table, runner, completing
        self.drafting: Drafting | None = None
        self.flight: Flight | None = None
        self._shortage = Shortage(scheduler)
        self._drafted: DraftedStep | None = None  # of the step in flight

    @property
    def num_suspects(self) -> int:
        """Sequences that are neither waiting nor running nor ended: see `Shortage`."""
        return self._shortage.num_suspects

    def close(self) -> None:
        """Let go of the model and of what is in flight."""
        self.drafting = self._scheduler.watcher = self.flight = None
        del self.runner, self.completing

    def step(self) -> None:
        """See `Engine.step`; completions go to the calls whose they are.

        Where it raises, a Ctrl-C while the model computes for instance, the sequences are as before it, and the step
        in flight is still there.
        """
        try:
            self._step()
        except BaseException:
            self._scheduler.retract()
            raise

    def abort(self, is_meant: Callable[[Sequence], bool]) -> list[Sequence]:
        """Forget those sequences wherever they are, and return them. What ends with the token that is being drawn for
        it has ended."""
        self.land()
        return self._scheduler.abort(is_meant) + self._shortage.abort(is_meant)

    def _step(self) -> None:
        start_ns = time.perf_counter_ns()
        stats, pool = self._scheduler.stats, self._scheduler.pool
        promise = self._promise()
        plan = self._scheduler.plan()
        if plan is None:
            self._shortage.convict()
        elif self.drafting is not None:
            plan, promise = self._with_drafts(plan, promise)
        for rejected in self._scheduler.take_rejected():
            fail(*rejected)
        if plan is None:
            self.land()
            return
        slot_R = plan.slot_S[plan.samples_S]
        output = self._compute(plan, slot_R, promise)
        drafted = None if self.drafting is None else self.drafting.take_step()
        self._scheduler.retract()
        if output is None:
            self.land()
            self._shortage.make_smaller(plan, stats)
            if self.drafting is not None:
                self.drafting.undone(plan)
            stats.repeated_us += (time.perf_counter_ns() - start_ns) // 1000
            return
        self._shortage.convict()
        tokens, num_sequences = classify(plan, self._table), len(plan.slot_S)
        kv_used_ppm = pool.num_held * 1_000_000 // pool.num_blocks
        self.land(plan)
        if len(promise.slot_P):
            plan = self._scheduler.follow_up(plan, promise)
        self._scheduler.advance(plan)
        self._take(slot_R, output, drafted)
        record(stats, tokens, num_sequences, kv_used_ppm, (time.perf_counter_ns() - start_ns) // 1000)

    def _promise(self) -> Promise:
        """The slots whose next tokens are being drawn and may be counted on.

        A plan that gives up sequences waits for them: they leave with all they know.
        """
        flight = self.flight
        if flight is None:
            return NO_PROMISE
        promise = self._scheduler.promise(flight.slot_K, flight.draft_K)
        if not self._scheduler.would_preempt():
            return promise
        self._scheduler.retract()
        self.land()
        return NO_PROMISE

    def _with_drafts(self, plan: StepPlan, promise: Promise) -> tuple[StepPlan | None, Promise]:
        """`plan` with drafts, or as it is. Where the tokens in flight must be known, they are waited for now, after the
        plan was made; then nothing is promised any more.

        Who drafts by looking up must know them; and where drafts in flight leave open how many tokens there are, rows
        that depend on that, and kernels that read contexts on the host.
        """
        drafting, flight = self.drafting, self.flight
        assert drafting is not None
        proposer, most_queries = drafting.select(plan), None
        if flight is not None:
            follows = proposer is None or drafting.follows(proposer, flight, self._drafted)
            if flight.has_drafts:
                most_queries = self.runner.most_short_queries
                follows = follows and int(plan.count_S.max()) <= most_queries
                follows = follows and bool(takes_best(self._table.sampling[plan.slot_S[plan.samples_S]]).all())
            if not follows:
                self._scheduler.retract()
                self.land(plan)
                flight, most_queries = None, None
                plan, promise = self._scheduler.follow_up(plan, promise), NO_PROMISE
        if proposer is not None and len(plan.slot_S):
            plan = drafting.extend(plan, proposer, flight, most_queries)
        return plan if len(plan.slot_S) else None, promise

    def _compute(
        self, plan: StepPlan, slot_R: np.ndarray, promise: Promise
    ) -> SamplerOutput | Verified | Drawn | Checked | None:
        """The next tokens of the sequences that sample, of some perhaps several, or on their way; None when the memory
        does not suffice."""
        late = None
        if self.flight is not None and len(promise.slot_P):
            late = self.flight.late(plan, self._table)
        if self.drafting is not None:
            late = self.drafting.late(plan, late)
        try:
            step = build_input(plan, self._table)
            logits_RV = self.runner.execute(step, late)
            batch = None if self._table.is_plain[slot_R].all() else self._sampling_batch(plan, slot_R)
            drafting = None if plan.draft_S is None else self.drafting
            if not self.runner.is_asynchronous:
                if drafting is not None:
                    return drafting.verify(logits_RV, batch)
                return greedy(logits_RV) if batch is None else sample(logits_RV, batch)
            late_ids = None
            if late is not None and late.shortfall is None and batch is not None:
                late_ids = late.ids(step)
            if drafting is not None:
                return drafting.check(self.runner, logits_RV, batch, late_ids)
            return draw_on_device(self.runner, logits_RV, batch, late_ids)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _take(
        self, slot_R: np.ndarray, output: SamplerOutput | Verified | Drawn | Checked, drafted: DraftedStep | None
    ) -> None:
        """Give sequences their tokens, or leave them in flight where the device is still drawing them."""
        if isinstance(output, Drawn | Checked):
            flight = Flight.of(slot_R, output, self._table, self._scheduler.running)
            if len(flight.slot_K):
                self.flight, self._drafted = flight, drafted
        else:
            self._give(slot_R, output, np.ones(len(slot_R), dtype=bool), drafted)

    def land(self, behind: StepPlan | None = None) -> None:
        """Wait for the step in flight and take its tokens. `behind`: a step that is planned with them already, whose
        blocks are kept."""
        flight = self.flight
        if flight is None:
            return
        output = flight.output()  # where that is interrupted, the step is still in flight
        self.flight = None
        drafted, self._drafted = self._drafted, None
        self._give(flight.slot_K, output, flight.kept_S, drafted, behind)

    def _give(
        self,
        slot_K: np.ndarray,
        output: SamplerOutput | Verified,
        kept_S: np.ndarray,
        drafted: DraftedStep | None,
        behind: StepPlan | None = None,
    ) -> None:
        """Give the sequences of a step that are still there (kept_S, of all that got tokens) what they get."""
        stats = self._scheduler.stats
        generated_before = stats.generated_tokens
        accepted_S = np.zeros(len(kept_S), dtype=np.int64)
        if isinstance(output, Verified):
            num_ended = self.completing.take_verified(slot_K, output, _now_us())
            accepted_S[kept_S] = output.num_accepted_S
            count_of = np.zeros(self._table.num_slots, dtype=np.int64)
            if behind is not None:
                count_of[behind.slot_S] = behind.count_S
            here_K = slot_K[np.isin(slot_K, self._scheduler.running)] if num_ended else slot_K
            self._scheduler.release_draft_blocks(here_K, count_of[here_K])
        else:
            self.completing.take(slot_K, output, _now_us())
        if self.drafting is not None and drafted is not None:
            num_generated = stats.generated_tokens - generated_before
            self.drafting.done(stats, drafted, accepted_S, kept_S, num_generated)

    def _sampling_batch(self, plan: StepPlan, slot_S: np.ndarray) -> SamplingBatch:
        """A row behind the known tokens of each sequence and one behind each draft, which sees the drafts before it."""
        if plan.draft_S is None:
            return SamplingBatch.of(self._table, slot_S, self._table.num_known[slot_S])
        count_S = plan.draft_S[plan.samples_S] + 1
        known_R = runs(self._table.num_known[slot_S], count_S)
        return SamplingBatch.of(self._table, np.repeat(slot_S, count_S), known_R)


def _now_us() -> int:
    return time.monotonic_ns() // 1000
