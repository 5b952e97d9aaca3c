"""From a window that is not complete to the units of it that are left. No Ray."""

from collections.abc import Iterator, Sequence

from pipeline.data.output.parts import PartStore
from pipeline.data.source import Source, read_window
from pipeline.data.units import Unit, UnitSpec, make_units
from pipeline.errors import OutputError
from pipeline.job.dataflow.spec import WindowTask


def read_units(task: WindowTask, source: Source, spec: UnitSpec, output: str) -> Iterator[Unit]:
    """The units of one window that are not done. Raises InputError, and OutputError as `check_units` does."""
    table = read_window(source, task.window, spec.columns)
    return check_units(task, make_units(table, spec, task.window.index), output)


def check_units(task: WindowTask, units: Sequence[Unit], store: PartStore | str) -> Iterator[Unit]:
    """Of a window's units those to do, each made as it is asked for. Raises OutputError at once when the parts
    that are there were cut differently."""
    if task.units_of is not None and task.units_of != len(units):
        raise OutputError(
            f"output.path {store}: window {task.window.index} was cut into {task.units_of} units before "
            f"and into {len(units)} now; was the output written by another version of this program?"
        )
    return (units[i] for i in range(len(units)) if i not in task.done)
