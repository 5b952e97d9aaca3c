"""How a run went over time: what its engines had computed at some moments, for pictures of it.

Of a run of any length there are at most MAX_MOMENTS, evenly spread: when there are more, every second one is dropped
and the next ones are taken half as often.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from pipeline.report.record.computed import Computed
from pipeline.report.record.run_record import ActorRecord, Moment

MAX_MOMENTS = 240
FIRST_EVERY_US = 1_000_000


class Moments:
    def __init__(self) -> None:
        self._every_us, self._next_us = FIRST_EVERY_US, 0
        self.kept: list[Moment] = []

    def add(self, at_us: int, actors: Iterable[ActorRecord]) -> None:
        """at_us: since the run began. Too soon after the last one, nothing is kept."""
        if at_us < self._next_us:
            return
        self.kept.append(moment_of(at_us, list(actors)))
        if len(self.kept) > MAX_MOMENTS:
            self.kept, self._every_us = self.kept[::2], self._every_us * 2
        self._next_us = at_us + self._every_us


def moment_of(at_us: int, actors: list[ActorRecord]) -> Moment:
    computed = sum((actor.computed for actor in actors), Computed())
    steps, batch, kv = (
        sum(actor.stats.get(name, 0) for actor in actors) for name in ("num_steps", "batch_sum", "kv_used_ppm_sum")
    )
    running = sum(bool(actor.open_units) for actor in actors)
    return Moment(at_us, computed.prompt, computed.generated, steps, batch, kv, running)


@dataclass(frozen=True)
class Stretch:
    """Between two moments, from_s to to_s since the job's first run began, runs one after the other. running: rows in
    a step on average, over all engines; kv_used: the share of the KV cache, on average."""

    from_s: float
    to_s: float
    prompt_per_s: float
    generated_per_s: float
    running: float
    kv_used: float


def stretches(moments: list[Moment], began_s: float = 0.0) -> list[Stretch]:
    """Of one run. Counters that fell, as an engine's process was replaced, count as not having moved."""
    found = []
    for before, now in pairwise(moments):
        span_s = (now.at_us - before.at_us) / 1e6
        if span_s <= 0:
            continue
        steps = max(0, now.steps - before.steps)
        batch, kv = now.batch_sum - before.batch_sum, now.kv_used_ppm_sum - before.kv_used_ppm_sum
        found.append(
            Stretch(
                began_s + before.at_us / 1e6,
                began_s + now.at_us / 1e6,
                max(0, now.prompt - before.prompt) / span_s,
                max(0, now.generated - before.generated) / span_s,
                max(0.0, batch / steps * max(1, now.running)) if steps else 0.0,
                max(0.0, kv / steps / 1e6) if steps else 0.0,
            )
        )
    return found
