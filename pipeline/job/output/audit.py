"""Audit an output against its job: names and sizes, every footer, and with `deep` every page and row.

Implements `pipeline verify`. Changes nothing. Counts all problems and reports the first ones, so that one call shows
what to fix. Memory does not grow with the rows: it holds the row positions of one window at a time, in the order of
windows, and a few parts being read.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from pipeline.data.output.inventory import Inventory, read_counts
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import DoneUnits, PartName, PartStore
from pipeline.data.output.result_columns import is_first_sample, result_column, sample_indices
from pipeline.data.output.retried import KEY as RETRIED
from pipeline.data.output.retried import RetriedRows
from pipeline.errors import OutputError, RowError
from pipeline.formatting import Remaining, counted
from pipeline.job.planning.appended import batch_numbers
from pipeline.job.planning.fingerprint import JOB, read_job
from pipeline.stores.read_ahead import read_ahead

MAX_SHOWN = 20
NOT_FINISHED = "no _SUCCESS that counts its rows: the job is not finished; `pipeline run` resumes it"
_COUNTED = ("num_input_tokens", "num_cached_tokens", "num_generated_tokens", "num_error_input_tokens")
_CODES = frozenset(str(code) for code in RowError)

RowPosition = tuple[int, str, int]  # (batch number of the file, source_file, source_row)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Result of an audit. `problems` are the first of `num_problems`; rows and errors count the readable parts."""

    path: str
    deep: bool
    parts: int
    parts_bytes: int
    rows: int
    error_rows: int
    num_problems: int
    problems: tuple[str, ...]
    output_rows: int  # including samples that are rows

    @property
    def sound(self) -> bool:
        return self.num_problems == 0

    def to_json(self) -> dict[str, Any]:
        return {"sound": self.sound, **asdict(self)}

    def to_text(self) -> str:
        rows = counted(self.rows, "row") + (
            "" if self.output_rows == self.rows else f" as {self.output_rows:,} samples"
        )
        errors = counted(self.error_rows, "error row")
        held = f"{counted(self.parts, 'part')}, {rows} ({errors}), {self.parts_bytes:,} bytes"
        if self.sound:
            depth = "every page and row was read" if self.deep else "footers were read; --deep reads every page and row"
            return f"{self.path}: sound: {held}; {depth}"
        if self.problems == (NOT_FINISHED,):
            return f"{self.path}: not finished: {held}; existing parts are sound\n  {NOT_FINISHED}"
        more = self.num_problems - len(self.problems)
        return "\n".join(
            [
                f"{self.path}: damaged: {counted(self.num_problems, 'problem')}, {held}",
                *(f"  {problem}" for problem in self.problems),
                *([f"  and {more:,} more"] if more else []),
                "Remove the damaged parts and run the job again with `pipeline run`: it recomputes missing parts.",
            ]
        )


@dataclass(frozen=True)
class _Part:
    """Checked part; `problem` is set if it is unreadable or contradicts itself."""

    totals: PartTotals = field(default_factory=PartTotals)
    schema: pa.Schema | None = None
    positions: pa.Table | None = None  # `file` and `row` of its input rows, if they were read
    problem: str | None = None


def audit(store: PartStore, deep: bool, log: Callable[[str], None]) -> Audit:
    """Audit an output. Raises OutputError if it is not the output of a job, EnvironmentFailed if a disk or store
    fails."""
    return _Auditor(store, deep, _fingerprint(store)).run(log)


def _fingerprint(store: PartStore) -> str:
    job = read_job(store)
    if job is None:
        raise OutputError(f"{store.path}: no {JOB}, so it is not the output of a job")
    return job["fingerprint"]


class _Auditor:
    def __init__(self, store: PartStore, deep: bool, fingerprint: str) -> None:
        self._store = store
        self._deep = deep
        self._fingerprint = fingerprint
        self._problems: list[str] = []
        self._num_problems = 0
        self._windows = 0  # according to names
        self._schema: tuple[PartName, pa.Schema] | None = None  # of the first part

    def run(self, log: Callable[[str], None]) -> Audit:
        progress = DoneUnits()
        inventory = Inventory.of_sizes(self._listed(progress))
        self._count_units(progress)
        counts = read_counts(self._store)
        if counts is None:
            self._add(NOT_FINISHED)
        elif wrong := inventory.wrong(counts):
            self._add(wrong)
        totals = self._read(progress, Remaining(log, "verifying parts", progress.num_units))
        if counts is not None and not self._num_problems:  # else the sums differ because of a reported problem
            self._compare(totals, counts)
        return Audit(
            path=self._store.path,
            deep=self._deep,
            parts=inventory.parts,
            parts_bytes=inventory.parts_bytes,
            rows=totals.rows,
            error_rows=totals.num_error_rows,
            num_problems=self._num_problems,
            problems=tuple(self._problems),
            output_rows=totals.output_rows,
        )

    def _add(self, problem: str) -> None:
        self._num_problems += 1
        if len(self._problems) < MAX_SHOWN:
            self._problems.append(problem)

    # -- names

    def _listed(self, progress: DoneUnits) -> Iterator[tuple[PartName, int]]:
        """Yield the job's parts with their sizes, one per unit."""
        for file, size in self._store.folder.each_size():
            if file[0] in "_.":
                continue
            name = PartName.parse(file)
            if name is None:
                self._add(f"{file}: not a part")
            elif name.fingerprint8 != self._fingerprint[:8]:
                self._add(f"{file}: a part of another job (this job's parts begin with part-{self._fingerprint[:8]})")
            elif progress.units_of(name.window) not in (None, name.num_units):
                self._add(f"{file}: other parts name {progress.units_of(name.window)} units for this window")
            elif not progress.add(name):
                self._add(f"{file}: another part contains the same unit; remove one of them")
            else:
                self._windows = max(self._windows, name.window + 1)
                yield name, size

    def _count_units(self, progress: DoneUnits) -> None:
        for window in range(self._windows):
            num_units = progress.units_of(window)
            if num_units is None:
                self._add(f"window {window}: all of its parts are missing")
            elif not progress.complete(window):
                missing = [unit for unit in range(num_units) if not progress.is_done(window, unit)]
                units_text = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
                self._add(f"window {window}: {len(missing)} of its {num_units} parts are missing (unit {units_text})")

    # -- footers and rows

    def _read(self, progress: DoneUnits, remaining: Callable[[int], None]) -> PartTotals:
        totals, done, rows = PartTotals(), 0, _RowChecker(self._add, batch_numbers(self._store))
        with closing(read_ahead(self._check_part, progress.parts(), self._store.folder.reads_at_once)) as parts:
            for name, part in parts:
                done += 1
                remaining(done)
                totals += part.totals
                if part.problem is not None:
                    self._add(part.problem)
                self._check_columns(name, part)
                if self._deep:
                    rows.add(name.window, part.positions, progress.complete(name.window))
        rows.end()
        return totals

    def _check_part(self, name: PartName) -> _Part:
        try:
            footer = self._store.footer(name)
            totals = self._store.totals_in(name, footer)
            schema = footer.schema.to_arrow_schema()
            found = _Part(totals, schema, problem=self._note_problem(name, footer.metadata or {}, totals))
            return self._read_rows(name, found) if self._deep else found
        except OutputError as error:
            return _Part(problem=str(error))

    def _note_problem(self, name: PartName, notes: dict[bytes, bytes], totals: PartTotals) -> str | None:
        job = notes.get(b"pipeline.fingerprint", self._fingerprint.encode()).decode(errors="replace")
        if job != self._fingerprint:
            return f"{name}: its footer names another job ({job[:16]}...)"
        unknown = sorted(totals.error_rows.keys() - _CODES)
        return f"{name}: unknown error codes: {', '.join(unknown)}" if unknown else None

    def _read_rows(self, name: PartName, part: _Part) -> _Part:
        """Read every page, with its checksum, and every row."""
        read = self._store.read_part(name)
        table = read.table
        totals, problem = PartTotals.of_table(table), part.problem
        if totals != part.totals:
            problem = f"{name}: its rows, errors or tokens differ from the counts in its footer"
        positions = pa.table({"file": result_column(table, "source_file"), "row": result_column(table, "source_row")})
        if positions["file"].null_count or positions["row"].null_count:
            return _Part(part.totals, part.schema, None, f"{name}: rows without source_file or source_row")
        if (index := sample_indices(table)) is not None:
            problem = problem or _sample_problem(name, positions.append_column("sample", index))
        positions = positions.filter(is_first_sample(table))
        if problem is None and not _retried_rows_exist(read.metadata, positions):
            problem = f"{name}: its note {RETRIED} is damaged, or names rows that it does not contain"
        return _Part(part.totals, part.schema, positions, problem)

    def _check_columns(self, name: PartName, part: _Part) -> None:
        if part.schema is None:
            return
        if self._schema is None:
            self._schema = name, part.schema
        first, schema = self._schema
        if not part.schema.equals(schema):
            own, others = ({(f.name, str(f.type)) for f in fields} for fields in (part.schema, schema))
            odd = ", ".join(f"{name} ({kind})" for name, kind in sorted(own ^ others)) or "their order"
            self._add(f"{name}: its columns differ from those of {first}: {odd}")

    def _compare(self, totals: PartTotals, counts: dict[str, Any]) -> None:
        found: dict[str, Any] = {"error_rows": totals.num_error_rows, "errors": dict(totals.error_rows)}
        if totals.dropped_rows:
            found["dropped_rows"] = dict(totals.dropped_rows)
        found |= {key: getattr(totals, key) for key in _COUNTED}
        found |= {"output_rows": totals.output_rows, "rows_checksum": totals.checksum_hex}
        for key, value in found.items():
            if counts.get(key) != value:
                self._add(f"{key}: the parts contain {value}, _SUCCESS counts {counts.get(key)}")


def _sample_problem(name: PartName, positions: pa.Table) -> str | None:
    """Return a problem with the samples of a part's rows, if any: a row's samples are numbered from 0, each exactly
    once."""
    if positions["sample"].null_count:
        return f"{name}: rows without sample_index"
    sums = [("sample", kind) for kind in ("min", "max", "count", "count_distinct")]
    for row in positions.group_by(["file", "row"]).aggregate(sums).to_pylist():
        low, high, count = row["sample_min"], row["sample_max"], row["sample_count"]
        location = f"{name}: {row['file']} row {row['row']}"
        if count != row["sample_count_distinct"]:
            return f"{location}: {count - row['sample_count_distinct']} samples are duplicates"
        if low < 0 or high + 1 != count:
            return f"{location}: {high + 1 - count} samples up to {high} are missing"
    return None


class _RowChecker:
    """Check of rows in the order of windows, which is the input's: each row exactly once."""

    def __init__(self, add: Callable[[str], None], batches: Mapping[str, int]) -> None:
        self._add = add
        self._batches = batches
        self._window = -1
        self._is_complete = False
        self._positions: list[pa.Table] = []
        self._last: RowPosition | None = None  # last row of the earlier windows
        self._last_window = -1  # the last complete window

    def add(self, window: int, positions: pa.Table | None, is_complete: bool) -> None:
        """Add a part's rows; None if they are unknown. `is_complete`: all parts of the window exist."""
        if window != self._window:
            self.end()
            self._window, self._is_complete = window, is_complete
        if positions is None:
            self._is_complete = False
        elif positions.num_rows:
            self._positions.append(positions)

    def end(self) -> None:
        """Check the rows of the current window."""
        if not self._positions:
            return
        table, self._positions = pa.concat_tables(self._positions), []
        sums = [("row", "min"), ("row", "max"), ("row", "count"), ("row", "count_distinct")]
        files = table.group_by("file").aggregate(sums).sort_by("file").to_pylist()
        first = True
        for file in files:
            low, high, count = file["row_min"], file["row_max"], file["row_count"]
            location = f"window {self._window}, {file['file']}"
            if count != file["row_count_distinct"]:
                self._add(f"{location}: {count - file['row_count_distinct']} rows are duplicates")
            elif self._is_complete and high - low + 1 != count:
                self._add(f"{location}: {high - low + 1 - count} rows between {low} and {high} are missing")
            if first:
                self._check_first((self._batch_of(file["file"]), file["file"], low), location)
            elif self._is_complete and low != 0:
                self._add(f"{location}: its rows before {low} are missing")
            first = False
        last = files[-1]
        self._last = max(self._last or (0, "", -1), (self._batch_of(last["file"]), last["file"], last["row_max"]))
        if self._is_complete:
            self._last_window = self._window

    def _batch_of(self, file: str) -> int:
        return self._batches.get(file, 0)

    def _check_first(self, position: RowPosition, location: str) -> None:
        """Check that the window's first row directly follows the last one of the previous window."""
        row = position[2]
        if self._last is not None and position <= self._last:
            self._add(f"{location}: row {row} and others are also in an earlier window")
        elif self._is_complete and self._last_window == self._window - 1:
            expected = self._last[2] + 1 if self._last is not None and self._last[:2] == position[:2] else 0
            if row != expected:
                self._add(f"{location}: its rows from {expected} to {row - 1} are missing")


def _retried_rows_exist(notes: Mapping[str, str], positions: pa.Table) -> bool:
    if RETRIED not in notes:
        return True
    try:
        return RetriedRows(notes).row_ids <= set(zip(positions["file"].to_pylist(), positions["row"].to_pylist()))
    except (ValueError, KeyError, TypeError):
        return False
