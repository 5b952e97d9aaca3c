"""The output: one Parquet file per unit, created once, and what a listing of them says is done.

A part is the commit record of its unit: it is there, whole, or it is not. Whoever creates it first wins; a
later writer of the same unit finds it and is done too. No lock, no clock, no log: resuming is one listing of
names.
"""

import re
import secrets
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.files.footer import metadata_of
from pipeline.data.output.part_totals import PartTotals
from pipeline.errors import EnvironmentFailed, OutputError, PipelineError
from pipeline.stores.filesystem import local_path
from pipeline.stores.folder import Folder
from pipeline.stores.local_folder import LocalFolder
from pipeline.stores.object_folder import open_objects
from pipeline.stores.read_ahead import read_ahead
from pipeline.stores.retries import RetryCounts

UNIT_KEY = b"pipeline.unit"  # file metadata: the part's PartTotals as JSON
NONCE_KEY = b"pipeline.nonce"  # file metadata: random for each write, so that equal bytes are from the same one
SUCCESS = "_SUCCESS"
# Hugging Face's `load_dataset(folder)` takes files of all subfolders, and of these the kind that is there most often:
# the JSON of `_pipeline/`. It looks into this file first. Other loaders pass names by that begin with a dot.
LOADER = ".huggingface.yaml"
_LOADER_TEXT = b'configs:\n- config_name: default\n  data_files: "*.parquet"\n'
_TAIL_BYTES = 16 * 1024  # holds most parts' footers, so that a part costs one read
_NOT_DONE = -1  # in place of a unit's rows

# Padded to so many digits, longer where it must be; a unit's number also says how much `DoneUnits` holds.
_FIVE, _FOUR = r"(\d{5}|[1-9]\d{5,})", r"(\d{4}|[1-9]\d{4,6})"
_PART = re.compile(rf"part-([0-9a-f]{{8}})-w{_FIVE}-u{_FOUR}of{_FOUR}-n(0|[1-9]\d{{0,17}})\.parquet", re.ASCII)


@dataclass(frozen=True)
class PartName:
    """Unit `unit` of the `of` units of window `window`, holding `rows` rows of the input, of the job `fingerprint8`."""

    fingerprint8: str
    window: int
    unit: int
    of: int
    rows: int

    def __post_init__(self) -> None:
        hex_digits = re.fullmatch(r"[0-9a-f]{8}", self.fingerprint8)
        if not (hex_digits and 0 <= self.unit < self.of and min(self.window, self.rows) >= 0):
            raise PipelineError(f"{self!r} names no part")

    def __str__(self) -> str:
        unit = f"u{self.unit:04d}of{self.of:04d}"
        return f"part-{self.fingerprint8}-w{self.window:05d}-{unit}-n{self.rows}.parquet"

    @classmethod
    def parse(cls, text: str) -> "PartName | None":
        """The name that is written so, or None."""
        match = _PART.fullmatch(text)
        if not match:
            return None
        fingerprint8, window, unit, of, rows = match.groups()
        if int(unit) >= int(of):
            return None
        return cls(fingerprint8, int(window), int(unit), int(of), int(rows))


class DoneUnits:
    """Which units are done and how many rows each holds, at some 8 bytes a unit. `add` keeps it true as parts are
    written."""

    def __init__(self) -> None:
        self._units_of: dict[int, int] = {}
        self._rows: dict[int, array[int]] = {}  # window -> rows by unit, _NOT_DONE where its part is not there
        self.num_rows = 0
        self.num_units = 0
        self.fingerprint8: str | None = None  # of the parts there; None while there are none

    def add(self, name: PartName) -> bool:
        """Count a part; False where its unit is counted. OutputError when it contradicts another part."""
        of = self._units_of.setdefault(name.window, name.of)
        if of != name.of:
            raise OutputError(f"{name}: another part says this window has {of} units")
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

    def units_of(self, window: int) -> int | None:
        """How many units the window has; None while none of its parts is there."""
        return self._units_of.get(window)

    def complete(self, window: int) -> bool:
        rows = self._rows.get(window)
        return rows is not None and len(rows) == self._units_of[window] and _NOT_DONE not in rows

    def parts(self) -> Iterator[PartName]:
        """The names that were counted, in the order of windows and units, each made when it is asked for."""
        for window in sorted(self._rows):
            assert self.fingerprint8 is not None
            for unit, rows in enumerate(self._rows[window]):
                if rows != _NOT_DONE:
                    yield PartName(self.fingerprint8, window, unit, self._units_of[window], rows)


@dataclass(frozen=True)
class StoredPart:
    """A part as it was read. `tag` tells this version of it from others."""

    table: pa.Table
    metadata: Mapping[str, str]  # provenance, without what `write` adds
    tag: str


class PartStore:
    """The output folder. Safe for any number of writers, threads and processes; holds no state but the
    place."""

    def __init__(
        self,
        path: str,
        storage: Mapping[str, Any] | None = None,
        retries: RetryCounts | None = None,
        what: str = "output.path",
    ) -> None:
        """A local path, or a url with its fsspec options in `storage`. `retries`: counts requests tried again. `what`:
        the key or option that gave the path. Raises OutputError when it cannot be one."""
        self.folder: Folder
        local = local_path(path)
        if local is None:
            self.folder = open_objects(path, storage or {}, retries, what)
        elif storage:
            raise OutputError(f"storage: a local folder takes no options, found {', '.join(sorted(storage))}")
        else:
            self.folder = LocalFolder(local)

    def __repr__(self) -> str:
        return f"PartStore({self.path})"

    @property
    def path(self) -> str:
        return self.folder.shown()

    def list(self, fingerprint8: str | None = None) -> DoneUnits:
        """What is done, from one listing. No folder: nothing is.

        Raises OutputError when the folder holds parts of another job (than `fingerprint8`, where given; than
        each other, in any case) or files that are no parts.
        """
        progress = DoneUnits()
        for file in self.folder.each_name():
            if file[0] in "_.":
                continue
            name = PartName.parse(file)
            if name is None:
                raise OutputError(
                    f"{self.folder.shown(file)}: not a part; output.path must be a new folder or this job's own. A "
                    "file of yours may stay there under a name that begins with _ or a dot"
                )
            expected = fingerprint8 or progress.fingerprint8
            if expected is not None and name.fingerprint8 != expected:
                raise OutputError(
                    f"{self.folder.shown(file)}: belongs to another job (fingerprint {name.fingerprint8}, "
                    f"this one is {expected}); choose another output.path"
                )
            if not progress.add(name):
                raise OutputError(f"{self.folder.shown(file)}: another part holds the same unit; remove one of them")
        return progress

    def name_data_files(self) -> None:
        """Write the file that tells `load_dataset` which files are the dataset. One that is there stays as it is."""
        self.folder.create(LOADER, _LOADER_TEXT)

    def write(self, name: PartName, table: pa.Table, metadata: Mapping[str, str] | None = None) -> bool:
        """Commit a unit's rows. True: we made the part. False: it was there already, with as many rows.

        table: of `result_columns.output_schema`. metadata: provenance, kept in the file; the part's totals are added
        to it. Raises EnvironmentFailed when the disk fails, OutputError when the part that is there is not
        this unit's.
        """
        _check_rows(name, table)
        if self.folder.create(str(name), serialize(table, metadata or {}), "part"):
            return True
        self.totals_in(name, self.footer(name))
        return False

    def footer(self, name: PartName) -> pq.FileMetaData:
        """What a part says of itself. Raises OutputError when it is damaged or not there."""
        file = str(name)
        try:
            tail = self.folder.tail(file, _TAIL_BYTES)
            length = int.from_bytes(tail[-8:-4], "little") + 8
            if length > len(tail):
                tail = self.folder.tail(file, length)
            return metadata_of(tail[-length:])
        except FileNotFoundError as e:
            raise OutputError(f"{self.folder.shown(file)}: this part is not there any more") from e
        except (pa.ArrowException, OSError) as e:
            if isinstance(e, OSError) and e.errno is not None:
                raise EnvironmentFailed(f"{self.folder.shown(file)}: cannot be read: {e.strerror}") from e
            raise self._damaged(file, e) from e

    def read_part(self, name: PartName, choose: Callable[[pa.Schema], Sequence[str]] | None = None) -> StoredPart:
        """A part with its page checksums verified. choose: the columns to take of those that it has; None: all. Raises
        OutputError when it is damaged or not there."""
        there = self.folder.read_tagged(str(name))
        if there is None:
            raise OutputError(f"{self.folder.shown(str(name))}: this part is not there any more")
        data, tag = there
        try:
            columns = None if choose is None else list(choose(pq.read_schema(pa.BufferReader(data))))
            table = pq.read_table(pa.BufferReader(data), columns=columns, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as e:
            raise self._damaged(str(name), e) from e
        notes = table.schema.metadata or {}
        kept = {k.decode(): v.decode() for k, v in notes.items() if k not in (UNIT_KEY, NONCE_KEY)}
        return StoredPart(table.replace_schema_metadata(None), kept, tag)

    def rewrite(self, name: PartName, table: pa.Table, metadata: Mapping[str, str], tag: str) -> None:
        """Put these rows in the place of the part that was read with this tag: one atomic replace of the whole file.

        Raises OutputError, with nothing changed, when the part is not the one that was read any more.
        """
        _check_rows(name, table)
        if not self.folder.swap(str(name), serialize(table, metadata), tag):
            raise OutputError(
                f"{self.folder.shown(str(name))}: was replaced or removed by another run since it was read; it is "
                "left as it is. Let only one run at a time rewrite an output, then run again"
            )

    def tables(self, choose: Callable[[pa.Schema], Sequence[str]]) -> Generator[pa.Table]:
        """Some columns of all parts, part by part, in the order of windows and units. Raises as `parts`."""
        read = read_ahead(lambda name: self.read_part(name, choose), self.list().parts(), self.folder.reads_at_once)
        with closing(read):
            for _, part in read:
                yield part.table

    def sizes(self) -> Iterator[tuple[PartName, int]]:
        """Each part with its bytes, from one listing, in any order; whatever is no part is left out."""
        for file, size in self.folder.each_size():
            name = PartName.parse(file)
            if name is not None:
                yield name, size

    def totals(self, progress: DoneUnits | None = None) -> PartTotals:
        """Rows and tokens of these parts (None: of all that are there, by a listing). Raises as `parts`."""
        total = PartTotals()
        with closing(self.parts(progress)) as parts:
            for _, totals in parts:
                total += totals
        return total

    def parts(self, progress: DoneUnits | None = None) -> Generator[tuple[PartName, PartTotals]]:
        """These parts (None: all that are there, by a listing) with their rows and tokens, from their footers, in
        the order of windows and units. Raises OutputError naming one that cannot be read, and as `list`.

        What is held does not grow with their number; when the caller stops, nothing that is being read is waited for.
        """
        names = (self.list() if progress is None else progress).parts()
        yield from read_ahead(lambda name: self.totals_in(name, self.footer(name)), names, self.folder.reads_at_once)

    def totals_in(self, name: PartName, footer: pq.FileMetaData) -> PartTotals:
        """The part's rows and tokens, of its footer. Raises OutputError where it contradicts the name or itself."""
        file = str(name)
        try:
            totals = PartTotals.from_json((footer.metadata or {})[UNIT_KEY])
        except (KeyError, ValueError, TypeError):
            raise OutputError(
                f"{self.folder.shown(file)}: has no {UNIT_KEY.decode()} metadata of this version's: not written by it"
            ) from None
        if (totals.output_rows, totals.rows) != (footer.num_rows, name.rows):
            of_input = f", {totals.rows} of the input" if totals.further_samples else ""
            raise OutputError(
                f"{self.folder.shown(file)}: holds {footer.num_rows} rows{of_input}, its name says {name.rows} and its "
                f"metadata {totals.output_rows}"
            )
        return totals

    def _damaged(self, file: str, error: Exception) -> OutputError:
        return OutputError(
            f"{self.folder.shown(file)}: this part is damaged: {error}; remove it and run again to make it anew"
        )


def _check_rows(name: PartName, table: pa.Table) -> None:
    """Before anything is written: a part of fewer rows would pass for its whole unit."""
    rows = PartTotals.of_table(table).rows
    if rows != name.rows:
        raise PipelineError(f"{name}: its table has {rows} rows")


def serialize(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The part's bytes: zstd, one row group, a checksum for every page, provenance and totals in the
    footer."""
    notes = {k.encode(): v.encode() for k, v in metadata.items()}
    notes[UNIT_KEY] = PartTotals.of_table(table).to_json().encode()
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
