"""A finished job's many small parts as a few large files, in the order of the input when asked.

Owns `pipeline compact`. The plan (how many files, how many rows in each) is put into the new folder first and
follows from the parts alone, so each file's rows are known before it is written, files are created only where
none stands, and an interrupted call is gone on with by the same command. Nothing is ever replaced, the job's
output is only read, and `_SUCCESS` comes last, after counting. Plan and names count rows of the input, whose samples
stay together where they are rows.

Windows of a job do not overlap in rows and follow the input, so sorting within each gives the input's order.
Memory holds one window and one file, encoded.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import SUCCESS, UNIT_KEY, PartName, PartStore
from pipeline.data.output.result_columns import is_first_sample, places_of, result_column, sample_indices
from pipeline.data.output.retried import Place, RetriedRows
from pipeline.errors import OutputError
from pipeline.formatting import counted
from pipeline.stores.filesystem import is_url

Order = Literal["parts", "input"]

PLAN = "_pipeline/compact.json"
FORMAT = 1
MAX_FILE_BYTES = 4 * 2**30  # an object store takes 5 GB in one request
_GROUP_BYTES = 64 * 2**20  # of a row group, decoded
_GROUP_ROWS = 131_072
_NUM_SAMPLES = 16
_NUM_READERS = 8


@dataclass(frozen=True)
class FilePlan:
    """What the new folder is to hold. `source` is a digest of the job's `_SUCCESS`, so of its counts."""

    format: int
    fingerprint: str
    source: str
    order: Order
    target_bytes: int
    rows: int
    rows_per_file: int

    @property
    def num_files(self) -> int:
        return max(1, -(-self.rows // self.rows_per_file))

    def bounds(self, file: int) -> tuple[int, int]:
        """The first row of a file, and the first one after it."""
        return file * self.rows_per_file, min((file + 1) * self.rows_per_file, self.rows)

    def name(self, file: int) -> str:
        start, stop = self.bounds(file)
        return f"data-{self.fingerprint[:8]}-{file:05d}of{self.num_files:05d}-n{stop - start}.parquet"


@dataclass(frozen=True)
class Compacted:
    """What is in the new folder. `files_made` of its files are this call's work."""

    path: str
    order: Order
    parts: int
    files: int
    files_made: int
    rows: int
    error_rows: int
    output_rows: int  # with all samples, where they are rows

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        samples = "" if self.output_rows == self.rows else f" as {self.output_rows:,} samples"
        errors, files = counted(self.error_rows, "error row"), counted(self.files, "file")
        counts = f"{counted(self.parts, 'part')}, {counted(self.rows, 'row')}{samples} ({errors})"
        if not self.files_made:
            return f"{self.path}: is complete already, nothing to do: {counts} in {files}"
        found = self.files - self.files_made
        earlier = f", {found:,} of them from an earlier call" if found else ""
        order = "in the order of the input" if self.order == "input" else "in the order of the parts"
        return f"{self.path}: {counts} in {files}{earlier}, {order}"


def compact(
    source: PartStore, target: PartStore, order: Order, target_bytes: int, say: Callable[[str], None]
) -> Compacted:
    """Merge the parts of a finished job into new files of about `target_bytes` each.

    Raises OutputError when the job is not finished, its output is not what `_SUCCESS` counts, or the new folder
    holds anything else; EnvironmentFailed when a disk or store fails.
    """
    raw = source.folder.read(SUCCESS)
    if raw is None:
        raise OutputError(f"{source.path}: no _SUCCESS, so the job is not finished; `pipeline run` it to its end first")
    _refuse_inside(source, target)
    counts = _counts(source, raw)
    parts = _parts(source, counts)
    plan = _claim(source, target, parts, counts["fingerprint"], hashlib.sha256(raw).hexdigest(), order, target_bytes)
    there = set(target.folder.names(""))
    if SUCCESS in there:
        output_rows = counts["output_rows"]
        return Compacted(
            target.path, order, len(parts), plan.num_files, 0, plan.rows, counts["error_rows"], output_rows
        )
    target.name_data_files()
    target.folder.clean_tmp()
    windows, made = _windows(parts), 0
    for file in range(plan.num_files):
        if plan.name(file) not in there:
            say(f"file {file + 1:,} of {plan.num_files:,}")
            made += target.folder.create(plan.name(file), _file(source, windows, plan, file))
    totals = _verify(source, target, plan, counts)
    done = {
        "job": counts["job"],
        **asdict(plan),
        "files": plan.num_files,
        "parts": len(parts),
        "completed_rows": totals.rows - totals.num_error_rows,
        "output_rows": totals.output_rows,
        "error_rows": totals.num_error_rows,
        "errors": dict(totals.error_rows),
    }
    target.folder.replace(SUCCESS, json.dumps(done, indent=1).encode())
    return Compacted(
        target.path,
        order,
        len(parts),
        plan.num_files,
        made,
        totals.rows,
        totals.num_error_rows,
        totals.output_rows,
    )


def _refuse_inside(source: PartStore, target: PartStore) -> None:
    """The new files beside the parts would be rows twice to whoever reads the folder."""
    a, b = source.path.rstrip("/"), target.path.rstrip("/")
    if not (is_url(a) or is_url(b)):
        a, b = str(Path(a).resolve()), str(Path(b).resolve())
    if f"{b}/".startswith(f"{a}/"):
        raise OutputError(
            f"--output {target.path}: lies in the job's output {source.path}; choose a folder outside of it"
        )


def _counts(source: PartStore, raw: bytes) -> dict[str, Any]:
    try:
        counts = json.loads(raw)
        numbers = [counts[name] for name in ("completed_rows", "error_rows", "num_generated_tokens", "output_rows")]
        texts = [counts[name] for name in ("job", "fingerprint")]
        known = all(isinstance(n, int) for n in numbers) and all(isinstance(t, str) for t in texts)
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise OutputError(
            f"{source.path}/{SUCCESS}: not what a job of this program writes; is this the output of `pipeline run`?"
        )
    return counts


def _parts(source: PartStore, counts: dict[str, Any]) -> list[PartName]:
    """All parts in the order of windows and units."""
    source.list(counts["fingerprint"][:8])  # raises where the folder holds anything else
    found = [name for name in map(PartName.parse, source.folder.names("")) if name is not None]
    rows = sum(name.rows for name in found)
    if rows != counts["completed_rows"] + counts["error_rows"]:
        raise OutputError(
            f"{source.path}: its parts hold {rows:,} rows, _SUCCESS counts "
            f"{counts['completed_rows'] + counts['error_rows']:,}; were parts added or removed since? "
            "`pipeline run` checks and completes it"
        )
    return sorted(found, key=lambda name: (name.window, name.unit))


@dataclass(frozen=True)
class _WindowParts:
    """A window's parts, which hold rows start <= i < stop of all."""

    start: int
    stop: int
    parts: tuple[PartName, ...]


def _windows(parts: list[PartName]) -> list[_WindowParts]:
    windows, start = [], 0
    for _, group in groupby(parts, key=lambda name: name.window):
        names = tuple(group)
        stop = start + sum(name.rows for name in names)
        windows.append(_WindowParts(start, stop, names))
        start = stop
    return windows


def _claim(
    source: PartStore,
    target: PartStore,
    parts: list[PartName],
    fingerprint: str,
    digest: str,
    order: Order,
    target_bytes: int,
) -> FilePlan:
    """The plan in the new folder, made if there is none. Raises OutputError when it is of something else."""
    raw = target.folder.read(PLAN)
    if raw is None:
        foreign = [name for name in target.folder.names("") if name[0] != "." and name != "_pipeline"]
        if foreign:
            raise OutputError(f"--output {target.path}: not empty ({foreign[0]}); choose a new folder")
        rows = sum(name.rows for name in parts)
        rows_per_file = max(1, int(target_bytes / max(1.0, _bytes_per_row(source, parts))))
        num_files = max(1, -(-rows // rows_per_file))
        target.folder.probe()
        plan = FilePlan(FORMAT, fingerprint, digest, order, target_bytes, rows, max(1, -(-rows // num_files)))
        if target.folder.create(PLAN, json.dumps(asdict(plan), indent=1).encode()):
            return plan
        raw = target.folder.read(PLAN)  # another call was first: then its plan is the one to agree with
    try:
        plan = FilePlan(**json.loads(raw or b""))
    except (ValueError, TypeError):
        raise OutputError(f"{target.path}/{PLAN}: not written by this version; choose another --output") from None
    wanted = (FORMAT, fingerprint, digest, order, target_bytes)
    if (plan.format, plan.fingerprint, plan.source, plan.order, plan.target_bytes) != wanted:
        same_job = plan.fingerprint == fingerprint and plan.source == digest
        what = (
            f"was begun with --order {plan.order} --target-size {plan.target_bytes}; give the same"
            if same_job
            else f"was begun from another state of {source.path}, or from another job"
        )
        raise OutputError(f"--output {target.path}: {what}, or choose another folder")
    return plan


def _bytes_per_row(source: PartStore, parts: list[PartName]) -> float:
    """From some parts spread over all."""
    filled = [name for name in parts if name.rows]
    some = filled[:: max(1, len(filled) // _NUM_SAMPLES)]
    if not some:
        return 1.0
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        size = sum(len(data or b"") for data in pool.map(source.folder.read, map(str, some)))
    return size / sum(name.rows for name in some)


def _file(source: PartStore, windows: list[_WindowParts], plan: FilePlan, file: int) -> bytes:
    """The file's bytes: its rows of the sequence of all rows, in row groups of a useful size."""
    first = source.read_part(windows[0].parts[0])
    sink = pa.BufferOutputStream()
    notes, retried, places = RetriedRows().in_notes(first.metadata), RetriedRows(), set[Place]()
    schema = first.table.schema.with_metadata(notes)
    totals = PartTotals()
    with pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True) as writer:
        held: list[pa.Table] = []
        for table in _rows(source, windows, plan.order, *plan.bounds(file), retried):
            totals += PartTotals.of_table(table)
            if retried.places:
                places |= retried.places.intersection(places_of(table))
            held.append(table)
            if sum(t.nbytes for t in held) >= _GROUP_BYTES or sum(t.num_rows for t in held) >= _GROUP_ROWS:
                _write_group(source, writer, held)
                held = []
        _write_group(source, writer, held)
        writer.add_key_value_metadata(retried.of(places).in_notes({}))
        writer.add_key_value_metadata({UNIT_KEY.decode(): replace(totals, units=1).to_json()})
    return sink.getvalue().to_pybytes()


def _write_group(source: PartStore, writer: pq.ParquetWriter, held: list[pa.Table]) -> None:
    if held:
        table = _concatenated(source, held)
        writer.write_table(table.replace_schema_metadata(writer.schema.metadata), row_group_size=_GROUP_ROWS)


def _concatenated(source: PartStore, tables: list[pa.Table]) -> pa.Table:
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise OutputError(f"{source.path}: parts of different columns or types: {error}") from None


def _rows(
    source: PartStore, windows: list[_WindowParts], order: Order, start: int, stop: int, retried: RetriedRows
) -> Iterator[pa.Table]:
    """Rows start <= i < stop of all, window by window; only windows that have some of them are read. `retried` takes in
    what their parts say."""
    first = bisect_right(windows, start, key=lambda window: window.stop)
    for window in takewhile(lambda window: window.start < stop, islice(windows, first, None)):
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            parts = list(pool.map(source.read_part, window.parts))
        for part in parts:
            retried.take(part.metadata)
        tables = [part.table for part in parts]
        del parts
        whole = _concatenated(source, tables)
        if order == "input":
            whole = _in_order(whole)
        edges = [*np.flatnonzero(is_first_sample(whole).to_numpy()).tolist(), whole.num_rows]  # of the input's rows
        if len(edges) != window.stop - window.start + 1:
            raise OutputError(
                f"{source.path}: the parts of window {window.parts[0].window} do not hold the rows that "
                "their names say; `pipeline verify --deep` names what is damaged"
            )
        low, high = edges[max(start, window.start) - window.start], edges[min(stop, window.stop) - window.start]
        for at in range(low, high, _GROUP_ROWS):
            yield whole.slice(at, min(_GROUP_ROWS, high - at))


def _in_order(table: pa.Table) -> pa.Table:
    """The window's rows in the order of the input: by file, as the input is sorted, row and sample."""
    keys = pa.table({name: result_column(table, name) for name in ("source_file", "source_row")})
    if (index := sample_indices(table)) is not None:
        keys = keys.append_column("sample_index", index)
    order = pc.SortOptions([(name, "ascending") for name in keys.column_names])
    return table.take(pc.call_function("sort_indices", [keys], order))


def _verify(source: PartStore, target: PartStore, plan: FilePlan, counts: dict[str, Any]) -> PartTotals:
    """The new folder's totals, from the footers of its files, which must be what the job counted."""
    expected = {plan.name(file): plan.bounds(file) for file in range(plan.num_files)}
    there = {name for name in target.folder.names("") if name[0] not in "_."}
    if there != expected.keys():
        odd = sorted(there ^ expected.keys())[0]
        raise OutputError(f"{target.path}: {odd} is {'not expected there' if odd in there else 'gone again'}")
    totals = PartTotals()
    for name, (start, stop) in sorted(expected.items()):
        with target.folder.open(name) as file:
            footer = pq.read_metadata(file)
        held = PartTotals.from_json((footer.metadata or {})[UNIT_KEY])
        if (footer.num_rows, held.rows) != (held.output_rows, stop - start):
            raise OutputError(
                f"{target.folder.shown(name)}: holds {held.rows} rows of the input, its name says {stop - start}; "
                "remove it and compact again"
            )
        totals += held
    found = (totals.rows, totals.num_error_rows, totals.num_generated_tokens, totals.output_rows)
    expected_totals = (plan.rows, counts["error_rows"], counts["num_generated_tokens"], counts["output_rows"])
    if found != expected_totals:
        raise OutputError(
            f"{target.path}: holds (rows, error rows, generated tokens, rows with all samples) {found}, the job's "
            f"_SUCCESS counts {expected_totals}; was {source.path} changed meanwhile? Choose another --output and "
            "compact again"
        )
    return totals
