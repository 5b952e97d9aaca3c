"""From a window that is not complete to the units of it that are left. No Ray."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from pipeline.data.output.parts import PartStore
from pipeline.data.source import Source
from pipeline.data.units import Unit, Units, UnitSpec, window_units
from pipeline.errors import OutputError
from pipeline.job.dataflow.spec import WindowTask

T = TypeVar("T")
MAX_SAMPLED_UNITS = 16  # of a window, each a file of what is kept


def read_units(task: WindowTask, source: Source, spec: UnitSpec, output: str) -> Iterator[Unit]:
    """The units of one window that are not done. Raises InputError, and OutputError as `check_units` does."""
    return check_units(task, window_units(source, task.window, spec), output)


def check_units(task: WindowTask, units: Units, store: PartStore | str) -> Iterator[Unit]:
    """Of a window's units those to do, each made as it is asked for. Raises OutputError at once when the parts
    that are there were cut differently."""
    if task.units_of is not None and task.units_of != len(units):
        raise OutputError(
            f"output.path {store}: window {task.window.index} was cut into {task.units_of} units before "
            f"and into {len(units)} now; was the output written by another version of this program?"
        )
    left = [i for i in range(len(units)) if i not in task.done]
    if task.sample is not None:
        return _sampled(units, left, task.sample)
    return units.some(left)


def _sampled(units: Units, left: Sequence[int], rows: int) -> Iterator[Unit]:
    """So many rows, of units evenly spread: units are sorted by length, so short and long ones are among them."""
    chosen = evenly(left, min(rows, MAX_SAMPLED_UNITS))
    counts = dict(zip(chosen, shares([units.num_rows_of(i) for i in chosen], rows)))
    for unit in units.some(index for index, count in counts.items() if count):
        yield unit.of_rows(evenly(range(unit.num_rows), counts[unit.index]))


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """So many in all, about as many of each; what a small one lacks the larger ones give."""
    counts = [0] * len(sizes)
    for place, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        counts[index] = min(sizes[index], -(-total // (len(sizes) - place)))
        total -= counts[index]
    return counts


def evenly(items: Sequence[T], count: int) -> list[T]:
    """So many of them, evenly spread; all where there are no more."""
    count = min(count, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]
