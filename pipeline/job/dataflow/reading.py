"""Read the remaining units of an incomplete window. Does not import Ray."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

import pyarrow as pa

from pipeline.data.output.parts import PartName, PartStore
from pipeline.data.source import DamagedGroup, KnownDamage, group_window
from pipeline.data.units import Unit, Units, window_units
from pipeline.errors import InputError, OutputError, RowError
from pipeline.formatting import counted
from pipeline.job.dataflow.damage import load_damage, record_damage, record_name
from pipeline.job.dataflow.spec import ReadSpec, WindowTask

T = TypeVar("T")
MAX_SAMPLED_UNITS = 16  # per window; each unit is a file of kept rows
MAX_NAMED_PARTS = 4


def read_units(task: WindowTask, reading: ReadSpec) -> Iterator[Unit]:
    """Yield the remaining units of one window. Raises InputError, and OutputError as `check_units` does."""
    store = PartStore(reading.output, reading.storage)
    units = _cut(task, reading, store)
    left = check_units(task, units, store, reading.fingerprint)
    return _with_repaired(left, task, reading, units.damaged) if reading.retry_failed and units.damaged else left


def _cut(task: WindowTask, reading: ReadSpec, store: PartStore) -> Units:
    """Cut a window by its recorded damage. Damage that its first run did not have raises InputError."""
    source, window = reading.source, task.window
    recorded = load_damage(store, window.index)
    if recorded and source.on_corrupt == "fail" and not reading.retry_failed:
        raise InputError(
            f"{recorded[0].file}: row group {recorded[0].row_group} was damaged when window {window.index} was first "
            f"read, by {store.folder.shown(record_name(window.index))}, so its rows are error rows of the output; set "
            "input.on_corrupt: skip again. If the file was repaired, --retry-failed then computes them"
        )
    if recorded is None and not task.parts:
        units = window_units(source, window, reading.units)
        if not units.damaged or task.sample is not None:  # a sample writes no parts, so it decides nothing
            return units
        recorded = record_damage(store, window.index, units.damaged)
        if recorded == units.damaged:
            return units
    known = KnownDamage(recorded or (), _advice(task, store, reading.fingerprint, recorded is not None))
    return window_units(source, window, reading.units, known)


def _advice(task: WindowTask, store: PartStore, fingerprint: str, has_record: bool) -> str:
    """Return what to do about damage that is not recorded."""
    index, record = task.window.index, store.folder.shown(record_name(task.window.index))
    names = [_part_name(task, unit, fingerprint) for unit in sorted(task.parts)]
    before = f"window {index} was cut without this damage before"
    remove = [names[0].of_window] if names else []
    if has_record:
        before += f", by {record}"
        remove.append(record)
    if names:
        shown = ", ".join(map(str, names[:MAX_NAMED_PARTS]))
        more = f" and {len(names) - MAX_NAMED_PARTS:,} more" if len(names) > MAX_NAMED_PARTS else ""
        before += f", and has {counted(len(names), 'part')}: {shown}{more}"
    return (
        f"{before}. Restore the file from the copy that the first run read, or remove {' and '.join(remove)} and run "
        "again"
    )


def _part_name(task: WindowTask, unit: int, fingerprint: str) -> PartName:
    assert task.units_of is not None
    return PartName(fingerprint, task.window.index, unit, task.units_of, task.parts[unit])


def check_units(task: WindowTask, units: Units, store: PartStore, fingerprint: str) -> Iterator[Unit]:
    """Yield a window's remaining units, each created on demand. Raises OutputError at once if the existing parts were
    cut differently."""
    names = [_part_name(task, unit, fingerprint) for unit in sorted(task.parts)]
    if names and task.units_of != len(units):
        raise OutputError(
            f"output.path {store.path}: window {task.window.index} was cut into {task.units_of} units before and into "
            f"{len(units)} now, as if the input's values had changed. Restore the input as the first run read it, or "
            f"remove {names[0].of_window} and run again"
        )
    with closing(store.totals_of(names)) as parts:
        for name, part in parts:
            store.check_unit(name, part, units.num_rows_of(name.unit), units.checksum_of(name.unit))
    left = [i for i in range(len(units)) if i not in task.done]
    if task.sample is not None:
        return _sampled(units, left, task.sample)
    return units.some(left)


def _with_repaired(
    units: Iterable[Unit], task: WindowTask, reading: ReadSpec, damaged: Sequence[DamagedGroup]
) -> Iterator[Unit]:
    """Yield the units with the values of those damaged rows that can be read by now. The cut stays as it was."""
    windows = [group_window(reading.source, task.window, group) for group in damaged]
    repaired = [unit for window in windows for unit in window_units(reading.source, window, reading.units)]
    read = {row_id: i for i, row_id in enumerate(row_id for unit in repaired for row_id in unit.row_ids())}
    tables = [unit.table for unit in repaired]
    for unit in units:
        codes = zip(unit.row_ids(), unit.own("_error").to_pylist(), strict=True)
        order = [
            unit.num_rows + read[row_id] if code == RowError.CORRUPT_INPUT and row_id in read else i
            for i, (row_id, code) in enumerate(codes)
        ]
        yield replace(unit, table=pa.concat_tables([unit.table, *tables]).take(pa.array(order, pa.int64())))


def _sampled(units: Units, left: Sequence[int], rows: int) -> Iterator[Unit]:
    """Yield `rows` rows of evenly spread units. Units are sorted by length, so the sample has short and long
    rows. Dropped rows are left out."""
    chosen = evenly([i for i in left if units.num_computed_of(i)], min(rows, MAX_SAMPLED_UNITS))
    counts = dict(zip(chosen, shares([units.num_computed_of(i) for i in chosen], rows)))
    for unit in units.some(index for index, count in counts.items() if count):
        computed = sorted({*range(unit.num_rows)}.difference(unit.dropped()))
        yield unit.of_rows(evenly(computed, counts[unit.index]))


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
