"""The output: one Parquet file per unit, created once, and what a listing of them says is done.

A part is the commit record of its unit: it is there, whole, or it is not. Whoever creates it first wins; a
later writer of the same unit finds it and is done too. No lock, no clock, no log: resuming is one listing of
names.
"""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.folder import LocalFolder
from pipeline.data.records import PartTotals
from pipeline.errors import EnvironmentFailed, OutputError

UNIT_KEY = b"pipeline.unit"  # file metadata: the part's PartTotals as JSON
SUCCESS = "_SUCCESS"

_PART = re.compile(r"part-([0-9a-f]{8})-w(\d{5,})-u(\d{4,})of(\d{4,})-n(\d+)\.parquet")


@dataclass(frozen=True)
class PartName:
    """Unit `unit` of the `of` units of window `window`, holding `rows` rows, of the job `fingerprint8`."""

    fingerprint8: str
    window: int
    unit: int
    of: int
    rows: int

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[0-9a-f]{8}", self.fingerprint8), f"expected 8 hex digits: {self.fingerprint8!r}"
        assert 0 <= self.unit < self.of, self
        assert min(self.window, self.rows) >= 0, self

    def __str__(self) -> str:
        unit = f"u{self.unit:04d}of{self.of:04d}"
        return f"part-{self.fingerprint8}-w{self.window:05d}-{unit}-n{self.rows}.parquet"

    def format(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> "PartName | None":
        """The name that is written so, or None."""
        match = _PART.fullmatch(text)
        if not match:
            return None
        fingerprint8, window, unit, of, rows = match.groups()
        if int(unit) >= int(of):
            return None
        name = cls(fingerprint8, int(window), int(unit), int(of), int(rows))
        return name if str(name) == text else None


class Progress:
    """Which units are done: a bitmap and the number of units per window. `add` keeps it true as parts are
    written."""

    def __init__(self) -> None:
        self._units_of: dict[int, int] = {}
        self._done: dict[int, int] = {}  # window -> bitmap over its units
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
        self._done[name.window] = self._done.get(name.window, 0) | 1 << name.unit
        self.num_rows += name.rows
        self.num_units += 1
        self.fingerprint8 = name.fingerprint8
        return True

    def is_done(self, window: int, unit: int) -> bool:
        return bool(self._done.get(window, 0) >> unit & 1)

    def units_of(self, window: int) -> int | None:
        """How many units the window has; None while none of its parts is there."""
        return self._units_of.get(window)

    def complete(self, window: int) -> bool:
        of = self._units_of.get(window)
        return of is not None and self._done[window] == (1 << of) - 1


class PartStore:
    """The output folder. Safe for any number of writers, threads and processes; holds no state but the
    path."""

    def __init__(self, path: str, storage: Mapping[str, Any] | None = None) -> None:
        """`storage`: fsspec options, for stores that are not local. Raises OutputError when there is no
        support."""
        if path.startswith("file://"):
            path = path.removeprefix("file://")
        if "://" in path:
            raise OutputError(f"output.path {path}: writing to {path.split('://')[0]}:// is not supported yet")
        if storage:
            raise OutputError(f"output.storage: a local folder takes no options, found {', '.join(sorted(storage))}")
        self.folder = LocalFolder(path)

    @property
    def path(self) -> str:
        return str(self.folder.root)

    def probe(self) -> None:
        """Make the folder if need be and see that create-only writes work. Raises OutputError,
        EnvironmentFailed."""
        self.folder.probe()

    def list(self, fingerprint8: str | None = None) -> Progress:
        """What is done, from one listing. No folder: nothing is.

        Raises OutputError when the folder holds parts of another job (than `fingerprint8`, where given; than
        each other, in any case) or files that are no parts.
        """
        progress = Progress()
        for file in self.folder.names():
            if file[0] in "_.":
                continue
            name = PartName.parse(file)
            if name is None:
                raise OutputError(
                    f"{self.folder.root / file}: not a part; output.path must be a new folder or this job's own"
                )
            expected = fingerprint8 or progress.fingerprint8
            if expected is not None and name.fingerprint8 != expected:
                raise OutputError(
                    f"{self.folder.root / file}: belongs to another job (fingerprint {name.fingerprint8}, "
                    f"this one is {expected}); choose another output.path"
                )
            if not progress.add(name):
                raise OutputError(f"{self.folder.root / file}: another part holds the same unit; remove one of them")
        return progress

    def write(self, name: PartName, table: pa.Table, metadata: Mapping[str, str] | None = None) -> bool:
        """Commit a unit's rows. True: we made the part. False: it was there already, with as many rows.

        table: of `records.output_schema`. metadata: provenance, kept in the file; the part's totals are added
        to it. Raises EnvironmentFailed when the disk fails, OutputError when the part that is there is not
        this unit's.
        """
        assert table.num_rows == name.rows, f"{name}: the table has {table.num_rows} rows"
        data = serialize(table, metadata or {})
        if self.folder.create(str(name), data, lambda path: _check(path, len(data), name.rows), "part"):
            return True
        there = _footer(self.folder.path(str(name)))
        if there.num_rows != name.rows:
            raise OutputError(f"{self.folder.root / str(name)}: holds {there.num_rows} rows, its name says {name.rows}")
        return False

    def create(self, name: str, data: bytes) -> bool:
        """Create a small file such as `_pipeline/job.json`; False where it is there already, unchanged."""
        return self.folder.create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Put a small file in the place of the old one, atomically."""
        self.folder.replace(name, data)

    def read(self, name: str) -> bytes | None:
        """A small file's bytes; None where there is none."""
        return self.folder.read(name)

    def names(self, folder: str) -> tuple[str, ...]:
        """The files directly in a folder such as `_pipeline/runs`, sorted."""
        return tuple(self.folder.names(folder))

    def remove(self, name: str) -> None:
        """Remove a small file, if it is there."""
        self.folder.remove(name)

    def success(self, data: bytes) -> None:
        """Write `_SUCCESS`: the last thing a job does, after its parts have been counted."""
        self.folder.replace(SUCCESS, data)

    def clean_tmp(self) -> int:
        """Remove temporary files whose writers are gone; how many there were."""
        return self.folder.clean_tmp()

    def totals(self) -> PartTotals:
        """Rows and tokens of all parts, from their footers. Raises OutputError naming a part that cannot be
        read."""
        names = [n for n in self.folder.names() if PartName.parse(n)]
        with ThreadPoolExecutor(max_workers=8) as pool:
            return reduce(PartTotals.__add__, pool.map(self._totals_of, names), PartTotals())

    def _totals_of(self, file: str) -> PartTotals:
        path = self.folder.path(file)
        footer = _footer(path)
        name = PartName.parse(file)
        text = (footer.metadata or {}).get(UNIT_KEY)
        if text is None:
            raise OutputError(f"{path}: has no {UNIT_KEY.decode()} metadata: not written by this program")
        totals = PartTotals.from_json(text)
        if name is None or not totals.rows == footer.num_rows == name.rows:
            raise OutputError(f"{path}: holds {footer.num_rows} rows, its name and metadata say otherwise")
        return totals


def serialize(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The part's bytes: zstd, one row group, a checksum for every page, provenance and totals in the
    footer."""
    notes = {k.encode(): v.encode() for k, v in metadata.items()}
    notes[UNIT_KEY] = PartTotals.of_table(table).to_json().encode()
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata(notes),
        sink,
        compression="zstd",
        row_group_size=max(1, table.num_rows),
        write_page_checksum=True,
    )
    return sink.getvalue().to_pybytes()


def _check(path: Path, size: int, rows: int) -> None:
    """See that the file on disk is what was meant before it gets its name."""
    written = path.stat().st_size
    try:
        there = pq.read_metadata(path).num_rows if written == size else -1
    except pa.ArrowException:
        there = -1
    if there != rows:
        raise EnvironmentFailed(f"{path}: {written} of {size} bytes were written, or they read back differently")


def _footer(path: Path) -> pq.FileMetaData:
    try:
        return pq.read_metadata(path)
    except (pa.ArrowException, OSError) as e:
        if isinstance(e, OSError) and e.errno is not None:
            raise EnvironmentFailed(f"{path}: cannot be read: {e.strerror}") from e
        raise OutputError(f"{path}: this part is damaged: {e}; remove it and run again to make it anew") from e
