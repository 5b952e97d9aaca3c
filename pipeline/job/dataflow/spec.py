"""What the graph is made of: the windows that are left, and what its actors are given. No Ray."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.data.output.parts import PartStore
from pipeline.data.source import Source, Window
from pipeline.data.units import Unit, UnitSpec
from pipeline.errors import OutputError
from pipeline.job.actor.worker import WorkSpec

NUM_READERS = 2  # windows read at once; one for a single actor, as each is a process to start


@dataclass(frozen=True)
class WindowTask:
    """One window that is not complete, and the units of it that are done. Picklable: a read task."""

    window: Window
    done: frozenset[int]
    units_of: int | None  # as the parts that are there say


@dataclass(frozen=True)
class Spot:
    """Whom an actor asks whether its machine is to be taken away, and how long it then goes on."""

    notice: Literal["off", "aws", "gcp", "azure"] = "off"
    drain_s: float = 30.0


@dataclass(frozen=True)
class FlowSpec:
    """All that the graph is made of. `cpus` and `gpus` are what one actor is booked with."""

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


def check_units(task: WindowTask, units: Sequence[Unit], store: PartStore | str) -> Iterator[Unit]:
    """Of a window's units those to do, each made as it is asked for. Raises OutputError at once when the parts
    that are there were cut differently."""
    if task.units_of is not None and task.units_of != len(units):
        raise OutputError(
            f"output.path {store}: window {task.window.index} was cut into {task.units_of} units before "
            f"and into {len(units)} now; was the output written by another version of this program?"
        )
    return (units[i] for i in range(len(units)) if i not in task.done)
