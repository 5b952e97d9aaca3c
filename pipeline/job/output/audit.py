"""Whether an output still is what its job wrote: names and sizes, every footer, and with `deep` every page and row.

Owns `pipeline verify`. Nothing is changed. All that is wrong is counted and the first problems are told, so that one
call says what is to be mended. What is held does not grow with the rows: a window's places at a time, of which windows
follow each other, and some parts being read.
"""

import json
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
from pipeline.job.planning.fingerprint import JOB
from pipeline.stores.read_ahead import read_ahead

MAX_SHOWN = 20
NOT_FINISHED = "no _SUCCESS that counts its rows: the job is not finished; `pipeline run` goes on with it"
_COUNTED = ("num_input_tokens", "num_cached_tokens", "num_generated_tokens", "num_error_input_tokens")
_CODES = frozenset(str(code) for code in RowError)

Place = tuple[int, str, int]  # number of the batch that the file was appended in, source_file, source_row


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What was found. `problems` are the first of `num_problems`; rows and errors are those of the parts that could be
    read."""

    path: str
    deep: bool
    parts: int
    parts_bytes: int
    rows: int
    error_rows: int
    num_problems: int
    problems: tuple[str, ...]
    output_rows: int  # with all samples, where they are rows

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
            how = "every page and row was read" if self.deep else "footers were read; --deep reads every page and row"
            return f"{self.path}: sound: {held}; {how}"
        if self.problems == (NOT_FINISHED,):
            return f"{self.path}: not finished: {held}; what is there is sound\n  {NOT_FINISHED}"
        more = self.num_problems - len(self.problems)
        return "\n".join(
            [
                f"{self.path}: damaged: {counted(self.num_problems, 'problem')}, {held}",
                *(f"  {problem}" for problem in self.problems),
                *([f"  and {more:,} more"] if more else []),
                "Remove the parts that are damaged and `pipeline run` the job again: it makes what is missing.",
            ]
        )


@dataclass(frozen=True)
class _Part:
    """One part as it was looked at; `problem` where it cannot be read or contradicts itself."""

    totals: PartTotals = field(default_factory=PartTotals)
    schema: pa.Schema | None = None
    places: pa.Table | None = None  # `file` and `row` of its rows of the input, where they were read
    problem: str | None = None


def audit(store: PartStore, deep: bool, say: Callable[[str], None]) -> Audit:
    """Look at all of an output. Raises OutputError where it is no job's, EnvironmentFailed when a disk or store
    fails."""
    return _Auditor(store, deep, _fingerprint(store)).run(say)


def _fingerprint(store: PartStore) -> str:
    raw = store.folder.read(JOB)
    if raw is None:
        raise OutputError(f"{store.path}: no {JOB}, so it is not the output of a job of this program")
    try:
        fingerprint = json.loads(raw)["fingerprint"]
    except (ValueError, KeyError, TypeError):
        fingerprint = None
    if not isinstance(fingerprint, str):
        raise OutputError(f"{store.path}/{JOB}: damaged; was it edited?")
    return fingerprint


class _Auditor:
    def __init__(self, store: PartStore, deep: bool, fingerprint: str) -> None:
        self._store = store
        self._deep = deep
        self._fingerprint = fingerprint
        self._problems: list[str] = []
        self._num_problems = 0
        self._windows = 0  # as far as names tell
        self._schema: tuple[PartName, pa.Schema] | None = None  # the first part's

    def run(self, say: Callable[[str], None]) -> Audit:
        progress = DoneUnits()
        inventory = Inventory.of_sizes(self._listed(progress))
        self._count_units(progress)
        counts = read_counts(self._store)
        if counts is None:
            self._add(NOT_FINISHED)
        elif wrong := inventory.wrong(counts):
            self._add(wrong)
        totals = self._read(progress, Remaining(say, "verifying parts", progress.num_units))
        if counts is not None and not self._num_problems:  # else the sums differ for a reason that was told
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
        """The job's parts with their bytes, one for each unit."""
        for file, size in self._store.folder.each_size():
            if file[0] in "_.":
                continue
            name = PartName.parse(file)
            if name is None:
                self._add(f"{file}: not a part")
            elif name.fingerprint8 != self._fingerprint[:8]:
                self._add(f"{file}: a part of another job (this one's begin with part-{self._fingerprint[:8]})")
            elif progress.units_of(name.window) not in (None, name.of):
                self._add(f"{file}: other parts say that this window has {progress.units_of(name.window)} units")
            elif not progress.add(name):
                self._add(f"{file}: another part holds the same unit; remove one of them")
            else:
                self._windows = max(self._windows, name.window + 1)
                yield name, size

    def _count_units(self, progress: DoneUnits) -> None:
        for window in range(self._windows):
            of = progress.units_of(window)
            if of is None:
                self._add(f"window {window}: none of its parts is there")
            elif not progress.complete(window):
                missing = [unit for unit in range(of) if not progress.is_done(window, unit)]
                which = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
                self._add(f"window {window}: {len(missing)} of its {of} parts are missing (unit {which})")

    # -- footers and rows

    def _read(self, progress: DoneUnits, remaining: Callable[[int], None]) -> PartTotals:
        totals, done, rows = PartTotals(), 0, _Rows(self._add, batch_numbers(self._store))
        with closing(read_ahead(self._look, progress.parts(), self._store.folder.reads_at_once)) as parts:
            for name, part in parts:
                done += 1
                remaining(done)
                totals += part.totals
                if part.problem is not None:
                    self._add(part.problem)
                self._check_columns(name, part)
                if self._deep:
                    rows.add(name.window, part.places, progress.complete(name.window))
        rows.end()
        return totals

    def _look(self, name: PartName) -> _Part:
        try:
            footer = self._store.footer(name)
            totals = self._store.totals_in(name, footer)
            schema = footer.schema.to_arrow_schema()
            found = _Part(totals, schema, problem=self._wrong_notes(name, footer.metadata or {}, totals))
            return self._look_inside(name, found) if self._deep else found
        except OutputError as error:
            return _Part(problem=str(error))

    def _wrong_notes(self, name: PartName, notes: dict[bytes, bytes], totals: PartTotals) -> str | None:
        job = notes.get(b"pipeline.fingerprint", self._fingerprint.encode()).decode(errors="replace")
        if job != self._fingerprint:
            return f"{name}: its footer says that it is another job's ({job[:16]}...)"
        unknown = sorted(totals.error_rows.keys() - _CODES)
        return f"{name}: error codes that are not known: {', '.join(unknown)}" if unknown else None

    def _look_inside(self, name: PartName, part: _Part) -> _Part:
        """Every page, with its checksum, and every row."""
        read = self._store.read_part(name)
        table = read.table
        totals, problem = PartTotals.of_table(table), part.problem
        if totals != part.totals:
            problem = f"{name}: its rows, errors or tokens are not those that its footer counts"
        places = pa.table({"file": result_column(table, "source_file"), "row": result_column(table, "source_row")})
        if places["file"].null_count or places["row"].null_count:
            return _Part(part.totals, part.schema, None, f"{name}: rows without source_file or source_row")
        if (index := sample_indices(table)) is not None:
            problem = problem or _wrong_samples(name, places.append_column("sample", index))
        places = places.filter(is_first_sample(table))
        if problem is None and not _retried_are_there(read.metadata, places):
            problem = f"{name}: its note {RETRIED} is damaged, or names rows that are not in it"
        return _Part(part.totals, part.schema, places, problem)

    def _check_columns(self, name: PartName, part: _Part) -> None:
        if part.schema is None:
            return
        if self._schema is None:
            self._schema = name, part.schema
        first, schema = self._schema
        if not part.schema.equals(schema):
            here, there = ({(f.name, str(f.type)) for f in fields} for fields in (part.schema, schema))
            odd = ", ".join(f"{name} ({kind})" for name, kind in sorted(here ^ there)) or "their order"
            self._add(f"{name}: has other columns than {first}: {odd}")

    def _compare(self, totals: PartTotals, counts: dict[str, Any]) -> None:
        found = {"error_rows": totals.num_error_rows, "errors": dict(totals.error_rows)}
        found |= {key: getattr(totals, key) for key in _COUNTED}
        found["output_rows"] = totals.output_rows
        for key, value in found.items():
            if counts.get(key) != value:
                self._add(f"{key}: the parts hold {value}, _SUCCESS counts {counts.get(key)}")


def _wrong_samples(name: PartName, places: pa.Table) -> str | None:
    """What is wrong with the samples of a part's rows, as far as the part tells: those of a row are numbered from 0,
    each is there once."""
    if places["sample"].null_count:
        return f"{name}: rows without sample_index"
    sums = [("sample", kind) for kind in ("min", "max", "count", "count_distinct")]
    for row in places.group_by(["file", "row"]).aggregate(sums).to_pylist():
        low, high, count = row["sample_min"], row["sample_max"], row["sample_count"]
        where = f"{name}: {row['file']} row {row['row']}"
        if count != row["sample_count_distinct"]:
            return f"{where}: {count - row['sample_count_distinct']} samples are there more than once"
        if low < 0 or high + 1 != count:
            return f"{where}: {high + 1 - count} samples up to {high} are missing"
    return None


class _Rows:
    """Rows in the order of windows, which follow the input's: each row once, none left out in between."""

    def __init__(self, add: Callable[[str], None], batches: Mapping[str, int]) -> None:
        self._add = add
        self._batches = batches
        self._window = -1
        self._whole = False
        self._places: list[pa.Table] = []
        self._last: Place | None = None  # of the windows before
        self._last_window = -1  # the last one that was whole

    def add(self, window: int, places: pa.Table | None, whole: bool) -> None:
        """A part's rows; None: not known. `whole`: all parts of the window are there."""
        if window != self._window:
            self.end()
            self._window, self._whole = window, whole
        if places is None:
            self._whole = False
        elif places.num_rows:
            self._places.append(places)

    def end(self) -> None:
        """Check the window that was added."""
        if not self._places:
            return
        table, self._places = pa.concat_tables(self._places), []
        sums = [("row", "min"), ("row", "max"), ("row", "count"), ("row", "count_distinct")]
        files = table.group_by("file").aggregate(sums).sort_by("file").to_pylist()
        first = True
        for file in files:
            low, high, count = file["row_min"], file["row_max"], file["row_count"]
            where = f"window {self._window}, {file['file']}"
            if count != file["row_count_distinct"]:
                self._add(f"{where}: {count - file['row_count_distinct']} rows are there more than once")
            elif self._whole and high - low + 1 != count:
                self._add(f"{where}: {high - low + 1 - count} rows between {low} and {high} are missing")
            if first:
                self._check_first((self._batch_of(file["file"]), file["file"], low), where)
            elif self._whole and low != 0:
                self._add(f"{where}: its rows before {low} are missing")
            first = False
        last = files[-1]
        self._last = max(self._last or (0, "", -1), (self._batch_of(last["file"]), last["file"], last["row_max"]))
        if self._whole:
            self._last_window = self._window

    def _batch_of(self, file: str) -> int:
        return self._batches.get(file, 0)

    def _check_first(self, place: Place, where: str) -> None:
        """The window's first row comes right after the last one of the window before."""
        row = place[2]
        if self._last is not None and place <= self._last:
            self._add(f"{where}: row {row} and others are in a window before, too")
        elif self._whole and self._last_window == self._window - 1:
            expected = self._last[2] + 1 if self._last is not None and self._last[:2] == place[:2] else 0
            if row != expected:
                self._add(f"{where}: its rows from {expected} to {row - 1} are missing")


def _retried_are_there(notes: Mapping[str, str], places: pa.Table) -> bool:
    if RETRIED not in notes:
        return True
    try:
        return RetriedRows(notes).places <= set(zip(places["file"].to_pylist(), places["row"].to_pylist()))
    except (ValueError, KeyError, TypeError):
        return False
