"""Track when a run last made progress, and when each engine actor last reported.

The same object decides whether the run has stalled for good, and the health of each actor.
"""

import time
from collections.abc import Sequence

from pipeline.errors import EnvironmentFailed
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.machine.liveness import ACTOR_SILENT_S, PROGRESS_TIMEOUTS

HEALTH = ("starting", "loading", "ready", "silent", "released", "lost")


class Progress:
    """Progress of a run. Used by the driver's main thread, about once a second. Times are monotonic, except those
    ending in `_at`, which are Unix times for display."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: object = None
        self._moved = time.monotonic()
        self._reports: dict[int, tuple[int, float]] = {}  # by actor: number of the last report, and its time
        self.began_at = self.moved_at = time.time()

    def look(self, seen: object, actors: Sequence[ActorState]) -> None:
        """Record the current state. seen: changes if rows, units or phases have."""
        now = time.monotonic()
        steps = sum(actor.record.stats.get("num_steps", 0) for actor in actors)
        # A loading engine finishes no step. Its phases grow only while its actor lives.
        loading = sum(a.record.phases_us["startup"] + a.record.phases_us["load"] for a in actors)
        if (seen, steps, loading) != self._seen:
            self._seen, self._moved, self.moved_at = (seen, steps, loading), now, time.time()
        for actor in actors:
            number = actor.record.actor
            if self._reports.get(number, (-1, now))[0] != actor.report_number:
                self._reports[number] = actor.report_number, now

    @property
    def still_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._moved

    def check(self, actors: Sequence[ActorState]) -> None:
        """Raise EnvironmentFailed after the limit without progress."""
        if self.still_s <= self._limit_s:
            return
        idle = f"No progress for {self._limit_s:g} s ({PROGRESS_TIMEOUTS} times run.stall_timeout)"
        if not actors:
            raise EnvironmentFailed(
                f"{idle}: no engine actor could be started. Does the cluster have the CPUs and GPUs of run.actors, "
                "run.cpus_per_actor and run.gpus_per_actor?"
            )
        if waits_for := next((actor.waits_for for actor in actors if actor.waits_for), ""):
            raise EnvironmentFailed(f"{idle}: {waits_for}")
        raise EnvironmentFailed(
            f"{idle}: {len(actors)} engine actors reported, but none is working. Did their machines fail?"
        )

    def health(self, actor: ActorState) -> str:
        """Return one of HEALTH."""
        record = actor.record
        if record.node_lost:
            return "lost"
        if record.released:
            return "released"
        if time.monotonic() - self._reports[record.actor][1] > ACTOR_SILENT_S:
            return "silent"
        return "ready" if record.stats.get("num_steps") else "loading" if actor.loading else "starting"
