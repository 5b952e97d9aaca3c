"""Steps that do not fit the device's memory: undone, made smaller, and blamed on a sequence only where it is proven."""

from collections.abc import Callable

from pipeline.engine.params import EngineStats
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.engine.startup.memory import release_cached_memory
from pipeline.errors import EnvironmentFailed, RowError

MAX_SUSPECTS = 3  # sequences that fit the memory not even alone, with nothing computed in between


class Shortage:
    """Of one engine. A suspect is a sequence of which one token alone did not fit; nothing was computed since."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._suspects: list[Sequence] = []

    @property
    def num_suspects(self) -> int:
        return len(self._suspects)

    def abort(self, is_meant: Callable[[Sequence], bool]) -> list[Sequence]:
        """Forget those suspects, and return them."""
        gone = [sequence for sequence in self._suspects if is_meant(sequence)]
        self._suspects = [sequence for sequence in self._suspects if not is_meant(sequence)]
        return gone

    def make_smaller(self, plan: StepPlan, stats: EngineStats) -> None:
        """Undo a step that did not fit; a sequence of which one token alone does not fit is taken out."""
        release_cached_memory()
        stats.num_out_of_memory += 1
        self._scheduler.undo(plan)
        if plan.num_tokens == 1 and plan.slot_S[0] in self._scheduler.running:
            self._suspects.append(self._scheduler.drop(int(plan.slot_S[0])))
        if len(self._suspects) == MAX_SUSPECTS:
            raise EnvironmentFailed(
                f"out of memory: {MAX_SUSPECTS} sequences in a row did not fit even alone and one token at a time, so "
                "it is not they. Something else takes this machine's memory, or engine.gpu_memory_utilization or "
                "engine.kv_cache_memory_bytes leaves too little beside the KV cache"
            )

    def convict(self) -> None:
        """Another sequence was computed, or none is left to try: the memory that suspects lack is their own doing."""
        for sequence in self._suspects:
            self._scheduler.reject(
                sequence,
                RowError.OUT_OF_MEMORY,
                f"not even one of its {len(sequence.token_ids)} tokens, alone in a step, fits the memory that is free; "
                "lower engine.gpu_memory_utilization or engine.kv_cache_memory_bytes to leave more beside the KV cache",
            )
            self._scheduler.lift_limit()
        self._suspects.clear()
