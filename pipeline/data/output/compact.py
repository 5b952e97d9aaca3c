"""`pipeline compact`: merge the small parts of a finished job into a few large files, optionally in input order, or
with a row for each input file.

The plan (number of files, rows per file) depends only on the parts and is written to the new folder first. The rows of
each file are thus known in advance, files are created exclusively, and the same command resumes an interrupted call.
Files are never replaced, the job's output is only read, and `_SUCCESS` is written last, after counting. The plan and
the file names count input rows; samples that are rows stay with their input row. A file with joined rows holds the
documents that begin in its rows.

Windows do not overlap and follow the input, so sorting each window gives the input order. Memory holds one decoded
window and one encoded file.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice, takewhile
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.data.output.documents import document_schema, joined, whole_documents
from pipeline.data.output.inventory import finished_counts
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import SUCCESS, UNIT_KEY, PartName, PartStore
from pipeline.data.output.result_columns import is_first_sample, result_column, row_ids_of, sample_indices
from pipeline.data.output.retried import RetriedRows, RowId
from pipeline.errors import OutputError
from pipeline.formatting import counted

Order = Literal["parts", "input", "source_file"]  # the last: joined by it

_OPTIONS = {"parts": "--order parts", "input": "--order input", "source_file": "--by source_file"}
_ORDERS = {"parts": "in the order of the parts", "input": "in input order", "source_file": "joined by source_file"}

PLAN = "_pipeline/compact.json"
FORMAT = 1
MAX_FILE_BYTES = 4 * 2**30  # object stores accept up to 5 GB in one request
_GROUP_BYTES = 64 * 2**20  # decoded size of a row group
_GROUP_ROWS = 131_072
_NUM_SAMPLES = 16
_NUM_READERS = 8


@dataclass(frozen=True)
class FilePlan:
    """Planned files of the new folder. `source` is a digest of the job's `_SUCCESS`, and so of its counts."""

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
        """Return the first row of a file and the one after its last."""
        return file * self.rows_per_file, min((file + 1) * self.rows_per_file, self.rows)

    def name(self, file: int) -> str:
        start, stop = self.bounds(file)
        num_rows = "" if self.order == "source_file" else f"-n{stop - start}"
        return f"data-{self.fingerprint[:8]}-{file:05d}of{self.num_files:05d}{num_rows}.parquet"


@dataclass(frozen=True)
class Compacted:
    """Contents of the new folder. This call wrote `files_made` of its files."""

    path: str
    order: Order
    parts: int
    files: int
    files_made: int
    rows: int
    error_rows: int
    output_rows: int  # counts every sample if samples are rows

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        samples = "" if self.output_rows == self.rows else f" as {self.output_rows:,} samples"
        errors, files = counted(self.error_rows, "error row"), counted(self.files, "file")
        counts = f"{counted(self.parts, 'part')}, {counted(self.rows, 'row')}{samples} ({errors})"
        if not self.files_made:
            return f"{self.path}: already complete: {counts} in {files}"
        found = self.files - self.files_made
        earlier = f", {found:,} of them from an earlier call" if found else ""
        order = _ORDERS[self.order]
        return f"{self.path}: {counts} in {files}{earlier}, {order}"


def compact(
    source: PartStore, target: PartStore, order: Order, target_bytes: int, log: Callable[[str], None]
) -> Compacted:
    """Merge the parts of a finished job into new files of about `target_bytes` each.

    Raises OutputError if the job is not finished, its output differs from `_SUCCESS`, or the new folder holds other
    files; EnvironmentFailed if a disk or store fails.
    """
    source.refuse_inside(target.path, "--output")
    raw, counts = source.folder.read(SUCCESS) or b"", finished_counts(source)
    parts = list(source.list(counts["fingerprint"][:8]).parts())
    plan = _claim(source, target, parts, counts["fingerprint"], hashlib.sha256(raw).hexdigest(), order, target_bytes)
    existing = set(target.folder.names(""))
    if SUCCESS in existing:
        output_rows = counts["output_rows"]
        return Compacted(
            target.path, order, len(parts), plan.num_files, 0, plan.rows, counts["error_rows"], output_rows
        )
    target.name_data_files()
    target.folder.clean_tmp()
    windows, made = _windows(parts), 0
    for file in range(plan.num_files):
        if plan.name(file) not in existing:
            log(f"file {file + 1:,} of {plan.num_files:,}")
            made += target.folder.create(plan.name(file), _file(source, windows, plan, file))
    totals = _compare(source, target, plan, counts)
    done = {
        "job": counts["job"],
        **asdict(plan),
        "files": plan.num_files,
        "parts": len(parts),
        "completed_rows": totals.num_completed_rows,
        "output_rows": totals.output_rows,
        "error_rows": totals.num_error_rows,
        "errors": dict(totals.error_rows),
        "dropped_rows": dict(totals.dropped_rows),
        "rows_checksum": totals.checksum_hex,
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


@dataclass(frozen=True)
class _WindowParts:
    """Parts of one window, which hold rows start <= i < stop of the output."""

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
    """Read the plan in the new folder, or create it. Raises OutputError if it is for other parts or options."""
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
        raw = target.folder.read(PLAN)  # another call created the plan first, so this one must match it
    try:
        plan = FilePlan(**json.loads(raw or b""))
    except (ValueError, TypeError):
        raise OutputError(f"{target.path}/{PLAN}: not written by this version; choose another --output") from None
    wanted = (FORMAT, fingerprint, digest, order, target_bytes)
    if (plan.format, plan.fingerprint, plan.source, plan.order, plan.target_bytes) != wanted:
        same_job = plan.fingerprint == fingerprint and plan.source == digest
        problem = (
            f"was started with {_OPTIONS[plan.order]} --target-size {plan.target_bytes}; pass the same, or"
            if same_job
            else f"was started from another state of {source.path} or from another job;"
        )
        raise OutputError(f"--output {target.path}: {problem} choose another folder")
    return plan


def _bytes_per_row(source: PartStore, parts: list[PartName]) -> float:
    """Estimate the bytes per row from a sample of the parts."""
    filled = [name for name in parts if name.rows]
    some = filled[:: max(1, len(filled) // _NUM_SAMPLES)]
    if not some:
        return 1.0
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        size = sum(len(data or b"") for data in pool.map(source.folder.read, map(str, some)))
    return size / sum(name.rows for name in some)


def _file(source: PartStore, windows: list[_WindowParts], plan: FilePlan, file: int) -> bytes:
    """Encode one file, with row groups of about _GROUP_BYTES or _GROUP_ROWS."""
    first = source.read_part(windows[0].parts[0])
    sink = pa.BufferOutputStream()
    notes, retried, retried_ids = RetriedRows().in_notes(first.metadata), RetriedRows(), set[RowId]()
    is_joined = plan.order == "source_file"
    schema = (document_schema(first.table.schema) if is_joined else first.table.schema).with_metadata(notes)
    start, stop = plan.bounds(file)
    totals = PartTotals()
    with pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True) as writer:
        held: list[pa.Table] = []

        def counted_rows(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
            nonlocal totals, retried_ids
            for table in tables:
                totals += PartTotals.of_table(table)
                if retried.row_ids:
                    retried_ids |= retried.row_ids.intersection(row_ids_of(table))
                yield table

        rows = _rows(source, windows, plan.order, start, plan.rows if is_joined else stop, retried)
        counted = counted_rows(whole_documents(rows, stop - start) if is_joined else rows)
        for table in joined(counted, schema) if is_joined else counted:
            held.append(table)
            if sum(t.nbytes for t in held) >= _GROUP_BYTES or sum(t.num_rows for t in held) >= _GROUP_ROWS:
                _write_group(source, writer, held)
                held = []
        _write_group(source, writer, held)
        writer.add_key_value_metadata(retried.restricted_to(retried_ids).in_notes({}))
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
        raise OutputError(f"{source.path}: parts have different columns or types: {error}") from None


def _rows(
    source: PartStore, windows: list[_WindowParts], order: Order, start: int, stop: int, retried: RetriedRows
) -> Iterator[pa.Table]:
    """Yield rows start <= i < stop of the output, reading only the windows that contain them. Adds the retried rows of
    their parts to `retried`."""
    first = bisect_right(windows, start, key=lambda window: window.stop)
    for window in takewhile(lambda window: window.start < stop, islice(windows, first, None)):
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            parts = list(pool.map(source.read_part, window.parts))
        for part in parts:
            retried.add_notes(part.metadata)
        tables = [part.table for part in parts]
        del parts
        whole = _concatenated(source, tables)
        if order != "parts":
            whole = _in_order(whole)
        # offsets of the input rows in the table
        edges = [*np.flatnonzero(is_first_sample(whole).to_numpy()).tolist(), whole.num_rows]
        if len(edges) != window.stop - window.start + 1:
            raise OutputError(
                f"{source.path}: the parts of window {window.parts[0].window} have other numbers of rows than their "
                "names state; run `pipeline verify --deep` to find the damaged parts"
            )
        low, high = edges[max(start, window.start) - window.start], edges[min(stop, window.stop) - window.start]
        for offset in range(low, high, _GROUP_ROWS):
            yield whole.slice(offset, min(_GROUP_ROWS, high - offset))


def _in_order(table: pa.Table) -> pa.Table:
    """Sort a window's rows by file, row and sample, which is the input order."""
    keys = pa.table({name: result_column(table, name) for name in ("source_file", "source_row")})
    if (index := sample_indices(table)) is not None:
        keys = keys.append_column("sample_index", index)
    order = pc.SortOptions([(name, "ascending") for name in keys.column_names])
    return table.take(pc.call_function("sort_indices", [keys], order))


def _compare(source: PartStore, target: PartStore, plan: FilePlan, counts: dict[str, Any]) -> PartTotals:
    """Return the new folder's totals, from the footers of its files. Raises OutputError if they differ from the job's
    counts."""
    expected = {plan.name(file): plan.bounds(file) for file in range(plan.num_files)}
    existing = {name for name in target.folder.names("") if name[0] not in "_."}
    if existing != expected.keys():
        odd = sorted(existing ^ expected.keys())[0]
        problem = "unexpected file" if odd in existing else "file was removed during the call"
        raise OutputError(f"{target.path}: {odd}: {problem}; compact again")
    totals = PartTotals()
    for name, (start, stop) in sorted(expected.items()):
        with target.folder.open(name) as file:
            footer = pq.read_metadata(file)
        held = PartTotals.from_json((footer.metadata or {})[UNIT_KEY])
        if plan.order != "source_file" and (footer.num_rows, held.rows) != (held.output_rows, stop - start):
            raise OutputError(
                f"{target.folder.shown(name)}: holds {held.rows} input rows, expected {stop - start} by its name; "
                "remove it and compact again"
            )
        totals += held
    found = (totals.rows, totals.num_error_rows, totals.num_generated_tokens, totals.output_rows, totals.checksum_hex)
    names = ("error_rows", "num_generated_tokens", "output_rows", "rows_checksum")
    expected_totals = (plan.rows, *(counts[name] for name in names))
    if found != expected_totals:
        raise OutputError(
            f"{target.path}: holds (rows, error rows, generated tokens, output rows, checksum of rows) {found}, but "
            f"the job's _SUCCESS counts {expected_totals}; {source.path} may have changed meanwhile. Choose another "
            "--output and compact again"
        )
    return totals
