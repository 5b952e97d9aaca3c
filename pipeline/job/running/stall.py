"""Notices that nothing moves in a run any more: no unit ends, no engine steps, none is loading."""

import time

from pipeline.errors import EnvironmentFailed
from pipeline.job.telemetry.actor_state import ActorState


class Stall:
    """Looked at about once a second."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = time.monotonic()
        self._seen: object = None

    def look(self, units: int, actors: list[ActorState]) -> None:
        """Raise EnvironmentFailed once it has been so for the limit."""
        now = (
            units,
            sum(actor.record.stats.get("num_steps", 0) for actor in actors),
            # an engine that loads steps nothing; its time goes on only while its actor lives
            sum(a.record.phases_us["startup"] + a.record.phases_us["load"] for a in actors),
        )
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        elif time.monotonic() - self._since > self._limit_s:
            raise EnvironmentFailed(self._why(actors))

    def _why(self, actors: list[ActorState]) -> str:
        idle = f"Nothing has moved for {self._limit_s:g} s (6 times run.stall_timeout)"
        if not actors:
            return (
                f"{idle}: no engine actor could be started. Has the cluster the CPUs and GPUs that run.actors, "
                "run.cpus_per_actor and run.gpus_per_actor ask for?"
            )
        return f"{idle}: {len(actors)} engine actors were seen, none of them works. Are their machines gone?"
