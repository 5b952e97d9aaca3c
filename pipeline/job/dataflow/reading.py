"""Read the remaining units of an incomplete window. Does not import Ray."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from pipeline.data.output.parts import PartStore
from pipeline.data.source import Source
from pipeline.data.units import Unit, Units, UnitSpec, window_units
from pipeline.errors import OutputError
from pipeline.job.dataflow.spec import WindowTask

T = TypeVar("T")
MAX_SAMPLED_UNITS = 16  # per window; each unit is a file of kept rows


def read_units(task: WindowTask, source: Source, spec: UnitSpec, output: str) -> Iterator[Unit]:
    """Yield the remaining units of one window. Raises InputError, and OutputError as `check_units` does."""
    return check_units(task, window_units(source, task.window, spec), output)


def check_units(task: WindowTask, units: Units, store: PartStore | str) -> Iterator[Unit]:
    """Yield a window's remaining units, each created on demand. Raises OutputError at once if the existing parts were
    cut differently."""
    if task.units_of is not None and task.units_of != len(units):
        raise OutputError(
            f"output.path {store}: window {task.window.index} was cut into {task.units_of} units before and into "
            f"{len(units)} now; was the output written by another version?"
        )
    left = [i for i in range(len(units)) if i not in task.done]
    if task.sample is not None:
        return _sampled(units, left, task.sample)
    return units.some(left)


def _sampled(units: Units, left: Sequence[int], rows: int) -> Iterator[Unit]:
    """Yield `rows` rows of evenly spread units. Units are sorted by length, so the sample has short and long rows."""
    chosen = evenly(left, min(rows, MAX_SAMPLED_UNITS))
    counts = dict(zip(chosen, shares([units.num_rows_of(i) for i in chosen], rows)))
    for unit in units.some(index for index, count in counts.items() if count):
        yield unit.of_rows(evenly(range(unit.num_rows), counts[unit.index]))


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split `total` into about equal shares, none larger than its size; larger ones take over what small ones lack."""
    counts = [0] * len(sizes)
    for position, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        counts[index] = min(sizes[index], -(-total // (len(sizes) - position)))
        total -= counts[index]
    return counts


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Return `count` evenly spread items, or all if there are fewer."""
    count = min(count, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]
