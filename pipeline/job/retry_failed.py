"""`--retry-failed`: the error rows of an output computed again, and nothing else.

A unit whose part holds error rows is handed out once more. Of its rows only those are computed; the part with their
new results replaces the old one whole, under the same name, by one atomic replace. So the output holds each row
once at every moment, and a run that is killed in between leaves units of the old and of the new kind, both whole.
"""

from collections.abc import Iterable

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import DoneUnits, PartName
from pipeline.job.dataflow.spec import WindowTask
from pipeline.job.plan import JobPlan, what_is_left


def tasks_with_failed(plan: JobPlan, progress: DoneUnits, failed: Iterable[PartName]) -> list[WindowTask]:
    """What is left of the job, and the units of the parts in `failed`, by window in order."""
    again: dict[int, set[int]] = {}
    for name in failed:
        again.setdefault(name.window, set()).add(name.unit)
    left = {task.window.index: task for task in what_is_left(plan, progress)}
    tasks = []
    for window in plan.windows:
        index = window.index
        of = progress.units_of(index)
        if index in again and of is not None:
            done = frozenset(unit for unit in range(of) if progress.is_done(index, unit)) - again[index]
            tasks.append(WindowTask(window, done, of))
        elif index in left:
            tasks.append(left[index])
    return tasks


def split_totals(parts: Iterable[tuple[PartName, PartTotals]]) -> tuple[list[PartName], PartTotals]:
    """The parts that hold error rows, and the totals of the others."""
    failed, rest = [], PartTotals()
    for name, totals in parts:
        if totals.num_error_rows:
            failed.append(name)
        else:
            rest += totals
    return failed, rest
