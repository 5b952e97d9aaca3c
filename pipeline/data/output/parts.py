"""Parts: one Parquet file per unit, created once; their listing shows which units are done.

A part is the commit record of its unit and appears atomically. The first writer wins; a later writer of the same unit
finds the part and is done. There is no lock, clock or log: resuming takes one listing of names.
"""

import json
import re
import secrets
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.files.footer import metadata_of
from pipeline.data.output.part_totals import PartTotals
from pipeline.errors import EnvironmentFailed, OutputError, PipelineError
from pipeline.stores.filesystem import is_url, local_path
from pipeline.stores.folder import Folder
from pipeline.stores.local_folder import LocalFolder
from pipeline.stores.object_folder import open_objects
from pipeline.stores.read_ahead import read_ahead
from pipeline.stores.retries import RetryCounts

T = TypeVar("T")
UNIT_KEY = b"pipeline.unit"  # file metadata: the part's PartTotals as JSON
NONCE_KEY = b"pipeline.nonce"  # file metadata: random per write, so that equal bytes prove the same write
SUCCESS = "_SUCCESS"
# Hugging Face's `load_dataset(folder)` reads all subfolders and picks the most frequent format, which would be the JSON
# of `_pipeline/`. This file takes precedence. Other loaders skip names that begin with a dot.
LOADER = ".huggingface.yaml"
_LOADER_TEXT = b'configs:\n- config_name: default\n  data_files: "*.parquet"\n'
_TAIL_BYTES = 16 * 1024  # fits most footers, so that most parts need one read
_NOT_DONE = -1  # instead of a unit's number of rows

# Numbers padded to 5 or 4 digits, or longer. The limit on unit numbers bounds the arrays of `DoneUnits`.
_FIVE, _FOUR = r"(\d{5}|[1-9]\d{5,})", r"(\d{4}|[1-9]\d{4,6})"
_PART = re.compile(rf"part-([0-9a-f]{{8}})-w{_FIVE}-u{_FOUR}of{_FOUR}-n(0|[1-9]\d{{0,17}})\.parquet", re.ASCII)


@dataclass(frozen=True)
class PartName:
    """Name of the part of unit `unit` of `of` in window `window`, with `rows` input rows, of job `fingerprint8`."""

    fingerprint8: str
    window: int
    unit: int
    num_units: int
    rows: int

    def __post_init__(self) -> None:
        hex_digits = re.fullmatch(r"[0-9a-f]{8}", self.fingerprint8)
        if not (hex_digits and 0 <= self.unit < self.num_units and min(self.window, self.rows) >= 0):
            raise PipelineError(f"{self!r}: not a valid part name")

    def __str__(self) -> str:
        unit = f"u{self.unit:04d}of{self.num_units:04d}"
        return f"part-{self.fingerprint8}-w{self.window:05d}-{unit}-n{self.rows}.parquet"

    @property
    def of_window(self) -> str:
        """Pattern of the names of all parts of the window, for messages."""
        return f"part-{self.fingerprint8}-w{self.window:05d}-*.parquet"

    @classmethod
    def parse(cls, text: str) -> "PartName | None":
        """Parse a file name; None if it is not a part's."""
        match = _PART.fullmatch(text)
        if not match:
            return None
        fingerprint8, window, unit, num_units, rows = match.groups()
        if int(unit) >= int(num_units):
            return None
        return cls(fingerprint8, int(window), int(unit), int(num_units), int(rows))


class DoneUnits:
    """Finished units and their numbers of rows, in about 8 bytes per unit. `add` records new parts."""

    def __init__(self) -> None:
        self._units_of: dict[int, int] = {}
        self._rows: dict[int, array[int]] = {}  # window -> rows by unit, or _NOT_DONE
        self.num_rows = 0
        self.num_units = 0
        self.fingerprint8: str | None = None  # of the recorded parts; None if there are none

    def add(self, name: PartName) -> bool:
        """Record a part. Return False if its unit is already recorded; raise OutputError if it contradicts another
        part."""
        num_units = self._units_of.setdefault(name.window, name.num_units)
        if num_units != name.num_units:
            raise OutputError(
                f"{name}: contradicts the name of another part, by which the window has {num_units} units"
            )
        if self.is_done(name.window, name.unit):
            return False
        rows = self._rows.setdefault(name.window, array("q"))
        rows.extend([_NOT_DONE] * (name.unit + 1 - len(rows)))
        rows[name.unit] = name.rows
        self.num_rows += name.rows
        self.num_units += 1
        self.fingerprint8 = name.fingerprint8
        return True

    def is_done(self, window: int, unit: int) -> bool:
        rows = self._rows.get(window, ())
        return unit < len(rows) and rows[unit] != _NOT_DONE

    def rows_of(self, window: int) -> dict[int, int]:
        """Return the number of rows of each finished unit in the window."""
        return {unit: rows for unit, rows in enumerate(self._rows.get(window, ())) if rows != _NOT_DONE}

    def units_of(self, window: int) -> int | None:
        """Return the number of units in the window; None if none of its parts exists."""
        return self._units_of.get(window)

    def complete(self, window: int) -> bool:
        rows = self._rows.get(window)
        return rows is not None and len(rows) == self._units_of[window] and _NOT_DONE not in rows

    def parts(self) -> Iterator[PartName]:
        """Yield the recorded part names in the order of windows and units."""
        for window in sorted(self._rows):
            assert self.fingerprint8 is not None
            for unit, rows in enumerate(self._rows[window]):
                if rows != _NOT_DONE:
                    yield PartName(self.fingerprint8, window, unit, self._units_of[window], rows)


@dataclass(frozen=True)
class StoredPart:
    """Contents of a part. `tag` identifies the version that was read."""

    table: pa.Table
    metadata: Mapping[str, str]  # provenance, without the keys that `write` adds
    tag: str


class PartStore:
    """Parts in an output folder. Stateless; safe for concurrent threads and processes."""

    def __init__(
        self,
        path: str,
        storage: Mapping[str, Any] | None = None,
        retries: RetryCounts | None = None,
        option: str = "output.path",
    ) -> None:
        """Open a local path, or a url with fsspec options in `storage`.

        retries: counts retried requests. option: the key or option that gave the path, for messages. Raises OutputError
        if the path cannot be an output.
        """
        self.folder: Folder
        local = local_path(path)
        if local is None:
            self.folder = open_objects(path, storage or {}, retries, option)
        elif storage:
            raise OutputError(f"storage_options: a local folder takes no options; found {', '.join(sorted(storage))}")
        else:
            self.folder = LocalFolder(local)

    def __repr__(self) -> str:
        return f"PartStore({self.path})"

    @property
    def path(self) -> str:
        return self.folder.shown()

    def list(self, fingerprint8: str | None = None) -> DoneUnits:
        """Return the finished units, from one listing; empty if the folder does not exist.

        Raises OutputError if the folder holds files that are not parts, or parts of another job than `fingerprint8` or,
        without it, of several jobs.
        """
        progress = DoneUnits()
        for file in self.folder.each_name():
            if file[0] in "_.":
                continue
            name = PartName.parse(file)
            if name is None:
                raise OutputError(
                    f"{self.folder.shown(file)}: not a part; output.path must be a new folder or this job's own. To "
                    "keep another file there, give it a name that begins with _ or a dot"
                )
            expected = fingerprint8 or progress.fingerprint8
            if expected is not None and name.fingerprint8 != expected:
                raise OutputError(
                    f"{self.folder.shown(file)}: belongs to another job (fingerprint {name.fingerprint8}, expected "
                    f"{expected}); choose another output.path"
                )
            if not progress.add(name):
                raise OutputError(f"{self.folder.shown(file)}: another part holds the same unit; remove one of them")
        return progress

    def refuse_inside(self, path: str, option: str) -> None:
        """Raise OutputError if `path` is inside this output, where its readers would find rows twice. option: gave the
        path, for messages."""
        here, given = self.path.rstrip("/"), path.rstrip("/")
        if not (is_url(here) or is_url(given)):
            here, given = str(Path(here).resolve()), str(Path(given).resolve())
        if f"{given}/".startswith(f"{here}/"):
            raise OutputError(f"{option} {path}: is inside the job's output {self.path}; choose a path outside of it")

    def name_data_files(self) -> None:
        """Write the file that lists the data files for `load_dataset`, unless it exists."""
        self.folder.create(LOADER, _LOADER_TEXT)

    def write(self, name: PartName, table: pa.Table, metadata: Mapping[str, str] | None = None) -> bool:
        """Commit a unit's rows. Return False if the part exists already with the same rows.

        table: with `result_columns.output_schema`. metadata: provenance, stored in the file together with the part's
        totals. Raises EnvironmentFailed if the disk fails, OutputError if the existing part is not of this unit.
        """
        unit = _checked_totals(name, table)
        if self.folder.create(str(name), serialize(table, metadata or {}, unit), "part"):
            return True
        self.check_unit(name, self.totals_in(name, self.footer(name)), unit.rows, unit.rows_checksum)
        return False

    def read_record(self, path: str, kind: int, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """Return `parse` of a JSON record of format `kind`; None if there is none. Raises OutputError if it is of
        another format, or damaged."""
        raw = self.folder.read(path)
        if raw is None:
            return None
        name = self.folder.shown(path)
        try:
            record = json.loads(raw)
            if record["format"] != kind:
                raise OutputError(f"{name}: format {record['format']!r}; this version reads format {kind}")
            return parse(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OutputError(f"{name}: damaged ({error}); was it edited?") from error

    def check_unit(self, name: PartName, part: PartTotals, rows: int, checksum: int) -> None:
        """Raise OutputError unless the part holds the rows of its unit. rows, checksum: of the unit as cut now."""
        if (part.rows, part.rows_checksum) == (rows, checksum):
            return
        differs = (
            f"{part.rows} rows, and the unit now has {rows}"
            if part.rows != rows
            else f"other rows than the unit now has, though both have {rows}"
        )
        raise OutputError(
            f"{self.folder.shown(str(name))}: this part of window {name.window}, unit {name.unit} holds {differs}: the "
            "window was cut differently, as if the input's values had changed, or the part is a copy of another one. "
            f"Restore the input as the part's run read it, or remove {name.of_window} and run again"
        )

    def footer(self, name: PartName) -> pq.FileMetaData:
        """Read the footer of a part. Raises OutputError if it is damaged or missing."""
        file = str(name)
        try:
            tail = self.folder.tail(file, _TAIL_BYTES)
            length = int.from_bytes(tail[-8:-4], "little") + 8
            if length > len(tail):
                tail = self.folder.tail(file, length)
            return metadata_of(tail[-length:])
        except FileNotFoundError as e:
            raise OutputError(f"{self.folder.shown(file)}: this part no longer exists") from e
        except (pa.ArrowException, OSError) as e:
            if isinstance(e, OSError) and e.errno is not None:
                raise EnvironmentFailed(f"{self.folder.shown(file)}: cannot be read: {e.strerror}") from e
            raise self._damaged(file, e) from e

    def read_part(self, name: PartName, choose: Callable[[pa.Schema], Sequence[str]] | None = None) -> StoredPart:
        """Read a part and verify its page checksums. choose: selects columns from its schema; None: all. Raises
        OutputError if it is damaged or missing."""
        stored = self.folder.read_tagged(str(name))
        if stored is None:
            raise OutputError(f"{self.folder.shown(str(name))}: this part no longer exists")
        data, tag = stored
        try:
            columns = None if choose is None else list(choose(pq.read_schema(pa.BufferReader(data))))
            table = pq.read_table(pa.BufferReader(data), columns=columns, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as e:
            raise self._damaged(str(name), e) from e
        notes = table.schema.metadata or {}
        kept = {k.decode(): v.decode() for k, v in notes.items() if k not in (UNIT_KEY, NONCE_KEY)}
        return StoredPart(table.replace_schema_metadata(None), kept, tag)

    def rewrite(self, name: PartName, table: pa.Table, metadata: Mapping[str, str], tag: str) -> None:
        """Atomically replace the part that was read with this tag.

        Raises OutputError, without a change, if the part has changed since it was read.
        """
        data = serialize(table, metadata, _checked_totals(name, table))
        if not self.folder.swap(str(name), data, tag):
            raise OutputError(
                f"{self.folder.shown(str(name))}: another run replaced or removed this part since it was read; it was "
                "not changed. Let only one run at a time rewrite an output, then run again"
            )

    def tables(self, choose: Callable[[pa.Schema], Sequence[str]]) -> Generator[pa.Table]:
        """Yield some columns of each part, in the order of windows and units. Raises the errors of `parts`."""
        read = read_ahead(lambda name: self.read_part(name, choose), self.list().parts(), self.folder.reads_at_once)
        with closing(read):
            for _, part in read:
                yield part.table

    def sizes(self) -> Iterator[tuple[PartName, int]]:
        """Yield each part with its size in bytes, from one listing, in any order. Other files are skipped."""
        for file, size in self.folder.each_size():
            name = PartName.parse(file)
            if name is not None:
                yield name, size

    def totals(self, progress: DoneUnits | None = None) -> PartTotals:
        """Return the total rows and tokens of these parts (None: list all). Raises the errors of `parts`."""
        total = PartTotals()
        with closing(self.parts(progress)) as parts:
            for _, totals in parts:
                total += totals
        return total

    def parts(self, progress: DoneUnits | None = None) -> Generator[tuple[PartName, PartTotals]]:
        """Yield these parts (None: list all) with their rows and tokens from their footers, in the order of windows and
        units. Raises OutputError for an unreadable part, and the errors of `list`.

        Memory does not grow with the number of parts. Closing the generator waits for no read.
        """
        yield from self.totals_of((self.list() if progress is None else progress).parts())

    def totals_of(self, names: Iterable[PartName]) -> Generator[tuple[PartName, PartTotals]]:
        """Yield these parts with their rows and tokens, as `parts` does."""
        yield from read_ahead(lambda name: self.totals_in(name, self.footer(name)), names, self.folder.reads_at_once)

    def totals_in(self, name: PartName, footer: pq.FileMetaData) -> PartTotals:
        """Return the rows and tokens in a part's footer. Raises OutputError if it contradicts the name or itself."""
        file = str(name)
        try:
            totals = PartTotals.from_json((footer.metadata or {})[UNIT_KEY])
        except (KeyError, ValueError, TypeError):
            raise OutputError(
                f"{self.folder.shown(file)}: has no valid {UNIT_KEY.decode()} metadata, so another version or program "
                "wrote it; choose another output.path"
            ) from None
        if (totals.output_rows, totals.rows) != (footer.num_rows, name.rows):
            of_input = f" ({totals.rows} input rows)" if totals.further_samples else ""
            raise OutputError(
                f"{self.folder.shown(file)}: holds {footer.num_rows} rows{of_input}, expected {name.rows} by its name "
                f"and {totals.output_rows} by its metadata; remove it and run again"
            )
        return totals

    def _damaged(self, file: str, error: Exception) -> OutputError:
        return OutputError(
            f"{self.folder.shown(file)}: this part is damaged: {error}; remove it and run again to recreate it"
        )


def _checked_totals(name: PartName, table: pa.Table) -> PartTotals:
    """Return the totals of a part. Checks the number of rows before writing: a part with missing rows would count as
    its whole unit."""
    totals = PartTotals.of_table(table)
    if totals.rows != name.rows:
        raise PipelineError(f"{name}: the table has {totals.rows} rows, expected {name.rows}")
    return totals


def serialize(table: pa.Table, metadata: Mapping[str, str], totals: PartTotals) -> bytes:
    """Encode a part: zstd, one row group, page checksums, and provenance and totals in the footer."""
    notes = {k.encode(): v.encode() for k, v in metadata.items()}
    notes[UNIT_KEY] = totals.to_json().encode()
    notes[NONCE_KEY] = secrets.token_hex(8).encode()
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata(notes),
        sink,
        compression="zstd",
        row_group_size=max(1, table.num_rows),
        write_page_checksum=True,
    )
    return sink.getvalue().to_pybytes()
