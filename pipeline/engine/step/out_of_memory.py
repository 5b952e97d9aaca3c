"""Recovery from out-of-memory: a step is undone and split; a sequence fails only once it is proven to be the cause."""

from collections.abc import Callable
from time import perf_counter_ns

from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.engine.startup.memory import release_cached_memory
from pipeline.engine.step.loop import StepLoop
from pipeline.errors import EnvironmentFailed, RowError
from pipeline.machine.out_of_memory import is_out_of_memory

MAX_SUSPECTS = 3  # consecutive requests that do not fit even alone, with nothing computed in between


class MemoryRecovery:
    """Recovery around the loop of one engine. A suspect is a sequence of which not even one token fit alone; nothing
    was computed since."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop, self._scheduler = loop, loop.scheduler
        self._suspects: list[Sequence] = []

    @property
    def num_suspects(self) -> int:
        return len(self._suspects)

    def step(self) -> None:
        """Run one step of the loop, or undo it. Raises EnvironmentFailed when sequence after sequence does not fit."""
        begun_ns = perf_counter_ns()
        try:
            self._loop.step()
        except BaseException as error:
            plan = self._loop.computing
            if plan is None:
                raise
            if not isinstance(error, MemoryError | RuntimeError) or not is_out_of_memory(error):
                self._scheduler.begin_again(plan)
                raise
        else:
            if self._suspects:
                self._fail_suspects()
            return
        finally:
            self._loop.computing = None
        # The exception has been dropped here, and with it the frames that held the step's tensors.
        self._loop.sync()
        self._undo(plan)
        self._loop.stats.retried_us += (perf_counter_ns() - begun_ns) // 1000

    def abort(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove the matching sequences and return them."""
        aborted = self._loop.abort(matches) + [sequence for sequence in self._suspects if matches(sequence)]
        self._suspects = [sequence for sequence in self._suspects if not matches(sequence)]
        return aborted

    def _undo(self, plan: StepPlan) -> None:
        """Undo a step that did not fit, and remove a sequence of which not even one token fits alone."""
        release_cached_memory()
        self._loop.stats.num_out_of_memory += 1
        # Limited steps have no drafts; in other steps the draft model may be what did not fit.
        was_alone = self._loop.spec_decoder is None or self._scheduler.step_tokens == 1
        self._loop.undo(plan)
        if plan.num_tokens == 1 and was_alone and plan.slot_S[0] in self._scheduler.running:
            self._suspects.append(self._scheduler.drop(int(plan.slot_S[0])))
        # The sequences of one request have the same length, so they count as one.
        if len({id(sequence.group or sequence) for sequence in self._suspects}) == MAX_SUSPECTS:
            raise EnvironmentFailed(
                f"out of memory: {MAX_SUSPECTS} consecutive rows did not fit even alone, one token at a time, so the "
                "rows are not the cause. Another process uses this machine's memory, or engine.gpu_memory_utilization "
                "or engine.kv_cache_memory_bytes leaves too little memory besides the KV cache"
            )

    def _fail_suspects(self) -> None:
        """Fail the suspects: another sequence was computed, or none is left, so they are the cause."""
        for sequence in self._suspects:
            sequence.fail(
                RowError.OUT_OF_MEMORY,
                f"not even one of its {len(sequence.token_ids)} tokens, alone in a step, fits in the free memory; "
                "lower engine.gpu_memory_utilization or engine.kv_cache_memory_bytes",
            )
        self._suspects.clear()
        self._scheduler.step_tokens = self._scheduler.max_num_batched_tokens
