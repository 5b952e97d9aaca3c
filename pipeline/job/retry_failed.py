"""`--retry-failed`: the error rows of an output computed again, and nothing else.

A unit whose part holds error rows is handed out once more. Of its rows only those are computed; the part with their
new results replaces the old one whole, under the same name, by one atomic replace. So the output holds each row
once at every moment, and a run that is killed in between leaves units of the old and of the new kind, both whole.
"""

from collections.abc import Iterable

import pyarrow as pa

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import DoneUnits, PartName
from pipeline.data.output.result_columns import result_column
from pipeline.data.units import Unit
from pipeline.job.plan import Plan, WindowTask, what_is_left


def tasks_with_failed(plan: Plan, progress: DoneUnits, failed: Iterable[PartName]) -> list[WindowTask]:
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


def failed_rows(unit: Unit, part: pa.Table) -> Unit:
    """The rows of the unit that are error rows in its part, as a unit of the same name; maybe none."""
    bad = {place for place, error in zip(_places(part), result_column(part, "error").to_pylist()) if error is not None}
    own = zip(unit.own("source_file").to_pylist(), unit.own("source_row").to_pylist())
    rows = [i for i, place in enumerate(own) if place in bad]
    return Unit(unit.window, unit.index, unit.of, unit.table.take(pa.array(rows, pa.int64())))


def patched(part: pa.Table, rows: pa.Table) -> pa.Table:
    """The part with `rows` in the place of its rows of the same origin."""
    new = {place: part.num_rows + i for i, place in enumerate(_places(rows))}
    both = pa.concat_tables([part, pa.Table.from_arrays(rows.columns, schema=part.schema)])
    return both.take(pa.array([new.get(place, i) for i, place in enumerate(_places(part))], pa.int64()))


def _places(table: pa.Table) -> list[tuple[str, int]]:
    files, rows = result_column(table, "source_file"), result_column(table, "source_row")
    return list(zip(files.to_pylist(), rows.to_pylist()))
