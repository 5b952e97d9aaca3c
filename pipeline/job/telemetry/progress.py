"""When anything last moved in a run, and when each engine actor last reported.

One object answers all of it: whether the run has stalled for good, whether /healthz says that it is well, and how each
actor is.
"""

import time
from collections.abc import Sequence

from pipeline.errors import EnvironmentFailed
from pipeline.job.telemetry.actor_state import ActorState

SILENT_S = 15.0  # since an actor's last report, of which there is one each second
UNWELL_SHARE = 1 / 6  # of the limit without progress, after which a run is not well
HEALTH = ("starting", "loading", "ready", "silent", "given back", "lost")


class Progress:
    """Used by the driver's main thread, about once a second. Times are monotonic; those that end in `_at` are Unix
    times to show."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: object = None
        self._moved = time.monotonic()
        self._reports: dict[int, tuple[int, float]] = {}  # of each actor: how many, and when the last one came
        self.began_at = self.moved_at = time.time()

    def look(self, seen: object, actors: Sequence[ActorState]) -> None:
        """Record what is known now. seen: differs where rows, units or phases have moved."""
        now = time.monotonic()
        steps = sum(actor.record.stats.get("num_steps", 0) for actor in actors)
        # an engine that loads ends no step; its phases grow only while its actor lives
        loading = sum(a.record.phases_us["startup"] + a.record.phases_us["load"] for a in actors)
        if (seen, steps, loading) != self._seen:
            self._seen, self._moved, self.moved_at = (seen, steps, loading), now, time.time()
        for actor in actors:
            number = actor.record.actor
            if self._reports.get(number, (-1, now))[0] != actor.told:
                self._reports[number] = actor.told, now

    @property
    def still_s(self) -> float:
        """Return the seconds since anything moved."""
        return time.monotonic() - self._moved

    @property
    def is_well(self) -> bool:
        return self.still_s < UNWELL_SHARE * self._limit_s

    def check(self, actors: Sequence[ActorState]) -> None:
        """Raise EnvironmentFailed once nothing has moved for the limit."""
        if self.still_s <= self._limit_s:
            return
        idle = f"Nothing has moved for {self._limit_s:g} s (6 times run.stall_timeout)"
        if not actors:
            raise EnvironmentFailed(
                f"{idle}: no engine actor could be started. Has the cluster the CPUs and GPUs that run.actors, "
                "run.cpus_per_actor and run.gpus_per_actor ask for?"
            )
        raise EnvironmentFailed(f"{idle}: {len(actors)} engine actors were seen, none works. Are their machines gone?")

    def health(self, actor: ActorState) -> str:
        """Return one of HEALTH."""
        record = actor.record
        if record.node_lost:
            return "lost"
        if record.released:
            return "given back"
        if time.monotonic() - self._reports[record.actor][1] > SILENT_S:
            return "silent"
        return "ready" if record.stats.get("num_steps") else "loading" if actor.loading else "starting"
