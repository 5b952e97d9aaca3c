"""What a dataflow is made of: the windows that are left, and what its actors are given. No Ray."""

from dataclasses import dataclass, field
from typing import Literal

from pipeline.data.source import Source, Window
from pipeline.data.units import UnitSpec
from pipeline.job.actor.worker import WorkSpec

NUM_READERS = 2  # windows read at once; one for a single actor, as each is a process to start
# More readers for more actors. One was seen to render 16,000 rows of 2,000 characters a second (two shared cores,
# local disk), some eight million tokens. What an engine on a GPU reads was not measured; a tenth would be much.
ACTORS_PER_READER = 8

MIN_IN_FLIGHT, MAX_IN_FLIGHT = 4, 48
FULL_BATCHES = 4  # rows in flight, in batches: some wait, and of most units only the longest rows still run


def units_in_flight(max_num_seqs: int, unit_rows: int, unit_tokens: int, max_tokens: int, n: int = 1) -> int:
    """How many units an engine of `max_num_seqs` sequences at once needs open so that its batch stays full, by the most
    rows of `n` samples that a unit can have. `python -m benchmarks.simulate pools` compares numbers of them."""
    rows = max(1, min(unit_rows, unit_tokens // max(1, max_tokens * n)))
    return min(MAX_IN_FLIGHT, max(MIN_IN_FLIGHT, -(-FULL_BATCHES * max_num_seqs // (rows * n))))


@dataclass(frozen=True)
class WindowTask:
    """One window that is not complete, and the units of it that are done. Picklable: a read task."""

    window: Window
    done: frozenset[int]
    units_of: int | None  # as the parts that are there say
    sample: int | None = None  # so many of its rows only


@dataclass(frozen=True)
class Spot:
    """Whom an actor asks whether its machine is to be taken away, and how long it then goes on."""

    notice: Literal["off", "aws", "gcp", "azure"] = "off"
    drain_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class FlowSpec:
    """All that a dataflow is made of. `cpus` and `gpus` are what one actor is booked with; `actors` is the most that
    there are at once, `min_actors` how many it starts with where they are fewer."""

    source: Source = field(repr=False)
    tasks: tuple[WindowTask, ...] = field(repr=False)
    units: UnitSpec
    work: WorkSpec = field(repr=False)
    actors: int
    cpus: float
    gpus: float
    units_in_flight: int
    ray_address: str | None = None
    spot: Spot = Spot()
    failpoints: str = ""  # of tests
    always_ray: bool = False
    min_actors: int | None = None

    @property
    def is_elastic(self) -> bool:
        return self.min_actors is not None and self.min_actors < self.actors

    @property
    def needs_ray(self) -> bool:
        """Where one engine on this machine computes one window, or a sample, Ray brings nothing but its seconds to
        start."""
        if self.always_ray or self.ray_address is not None or self.actors > 1:
            return True
        return len(self.tasks) > 1 and any(task.sample is None for task in self.tasks)


class EndOfUnits(Exception):
    """All units of a dataflow have been computed."""
