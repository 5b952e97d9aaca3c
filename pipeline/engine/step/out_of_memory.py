"""Steps that do not fit the device's memory: undone, made smaller, and blamed on a sequence only where it is proven."""

from collections.abc import Callable
from time import perf_counter_ns

from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.engine.startup.memory import release_cached_memory
from pipeline.engine.step.loop import StepLoop
from pipeline.errors import EnvironmentFailed, RowError
from pipeline.machine.out_of_memory import is_out_of_memory

MAX_SUSPECTS = 3  # requests of which a sequence fits the memory not even alone, with nothing computed in between


class MemoryRecovery:
    """Wraps the loop of one engine. A suspect is a sequence of which one token alone did not fit; nothing was computed
    since."""

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
        except (MemoryError, RuntimeError) as error:
            plan = self._loop.computing
            if plan is None or not is_out_of_memory(error):
                raise
        else:
            if self._suspects:
                self._convict()
            return
        finally:
            self._loop.computing = None
        # By now the error is gone, and with it the frames that held the step's tensors.
        self._loop.land()
        self._make_smaller(plan)
        self._loop.stats.retried_us += (perf_counter_ns() - begun_ns) // 1000

    def abort(self, is_meant: Callable[[Sequence], bool]) -> list[Sequence]:
        """Forget those sequences wherever they are, and return them."""
        gone = self._loop.abort(is_meant) + [sequence for sequence in self._suspects if is_meant(sequence)]
        self._suspects = [sequence for sequence in self._suspects if not is_meant(sequence)]
        return gone

    def _make_smaller(self, plan: StepPlan) -> None:
        """Undo a step that did not fit; a sequence of which one token alone does not fit is taken out."""
        release_cached_memory()
        self._loop.stats.num_out_of_memory += 1
        # Nobody drafts in limited steps; in others a draft model may be what did not fit.
        was_alone = self._loop.drafting is None or self._scheduler.step_tokens == 1
        self._loop.undo(plan)
        if plan.num_tokens == 1 and was_alone and plan.slot_S[0] in self._scheduler.running:
            self._suspects.append(self._scheduler.drop(int(plan.slot_S[0])))
        # The sequences of one request are as long as each other: they tell no more than one of them.
        if len({id(sequence.group or sequence) for sequence in self._suspects}) == MAX_SUSPECTS:
            raise EnvironmentFailed(
                f"out of memory: {MAX_SUSPECTS} rows in a row did not fit even alone and one token at a time, so "
                "it is not they. Something else takes this machine's memory, or engine.gpu_memory_utilization or "
                "engine.kv_cache_memory_bytes leaves too little beside the KV cache"
            )

    def _convict(self) -> None:
        """Another sequence was computed, or none is left to try: the memory that suspects lack is their own doing."""
        for sequence in self._suspects:
            sequence.fail(
                RowError.OUT_OF_MEMORY,
                f"not even one of its {len(sequence.token_ids)} tokens, alone in a step, fits the memory that is free; "
                "lower engine.gpu_memory_utilization or engine.kv_cache_memory_bytes to leave more beside the KV cache",
            )
        self._suspects.clear()
        self._scheduler.step_tokens = self._scheduler.max_num_batched_tokens
