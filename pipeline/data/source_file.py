"""One file of the input: what planning knows of it, and the reading of its rows.

Before rows are read the file is seen to be the one that was planned. Damage found then is told apart from a
disk or store that fails: it is still there when the same rows are read again, through a new handle.
"""

import posixpath
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.footer import DamagedFile, Footer, decoding, digest, footer_bytes, metadata_of, reading
from pipeline.data.listing import is_local
from pipeline.errors import InputError
from pipeline.stores.filesystem import secrets_in
from pipeline.stores.ranged_file import RangedFile

_BATCH_ROWS = 4096  # of a row group too large for a window, decoded at a time


@dataclass(frozen=True, slots=True)
class SourceFile:
    relative: str  # to the root, "/"-separated
    size: int
    digest: str  # sha256 of the footer
    num_rows: int
    group_rows: "array[int]"  # of each row group; arrays, as 10^9 rows may lie in 10^6 row groups
    group_bytes: "array[int]"  # uncompressed, of all columns
    first_group: int = 0  # of those in the arrays, and how many of the file's rows come before it
    first_row: int = 0

    @classmethod
    def of(cls, relative: str, size: int, footer: Footer) -> "SourceFile":
        metadata = footer.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        rows = array("q", (g.num_rows for g in groups))
        return cls(
            relative, size, footer.digest, sum(rows), rows, array("q", (max(0, g.total_byte_size) for g in groups))
        )

    def only(self, start: int, stop: int) -> "SourceFile":
        """The same file, knowing only the row groups that hold rows start <= i < stop of those it knows."""
        ends = list(accumulate(self.group_rows))
        a, b = bisect_right(ends, start), bisect_left(ends, stop) + 1
        rows = self.group_rows[a:b]
        before = ends[a] - rows[0]
        groups, first_row = self.first_group + a, self.first_row + before
        return SourceFile(
            self.relative, self.size, self.digest, sum(rows), rows, self.group_bytes[a:b], groups, first_row
        )

    def rows_of(self, group: int) -> int:
        """How many rows the file's row group `group` holds."""
        return self.group_rows[group - self.first_group]

    def slices(self, start: int, stop: int) -> Iterator["Slice"]:
        """The rows start <= i < stop of the file, in order."""
        first = self.first_row
        for group, count in enumerate(self.group_rows, self.first_group):
            a, b = max(start - first, 0), min(stop - first, count)
            if a < b:
                yield Slice(group, a, b, first + a)
            first += count


@dataclass(frozen=True)
class Slice:
    """Rows start <= i < stop of one row group. `first_row` is the file's row at its start."""

    row_group: int
    start: int
    stop: int
    first_row: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def read_slices(
    fs: Any, root: str, shown: str, file: SourceFile, slices: list[Slice], schema: pa.Schema
) -> Iterator[pa.Table | DamagedFile]:
    """Of each slice the columns of `schema`, or why they cannot be decoded. `shown` is the root for messages.

    Page checksums are verified where the file has them; without them a bit flip that still decodes cannot be
    found. Raises InputError when the file is not the one that was planned, EnvironmentFailed when it cannot
    be read. A slice of a large row group decodes the rows before it too, and drops them batch by batch.
    """
    path, name = posixpath.join(root, file.relative), posixpath.join(shown, file.relative)
    whole = all(s.num_rows == file.rows_of(s.row_group) for s in slices)
    with _open(fs, path, name, file, whole) as parquet:
        for piece in slices:
            try:
                yield _decode(parquet, piece, file, name, schema)
            except DamagedFile:
                yield _read_again(fs, path, name, file, piece, schema)


def _read_again(
    fs: Any, path: str, name: str, file: SourceFile, piece: Slice, schema: pa.Schema
) -> pa.Table | DamagedFile:
    try:
        with _open(fs, path, name, file, piece.num_rows == file.rows_of(piece.row_group)) as parquet:
            return _decode(parquet, piece, file, name, schema)
    except DamagedFile as damage:
        return damage


@contextmanager
def _open(fs: Any, path: str, name: str, file: SourceFile, whole: bool) -> Iterator[pq.ParquetFile]:
    with reading(name, secrets_in(fs)):
        size = int(fs.info(path)["size"])
        try:
            footer = footer_bytes(fs, path, size, name)
        except DamagedFile:  # it was whole when it was planned
            footer = b""
        if size != file.size or digest(footer) != file.digest:
            raise InputError(
                f"{name}: the file has changed since the job was planned; put it back, or start anew in another "
                "output.path"
            )
        with pa.OSFile(path) if is_local(fs) else pa.PythonFile(_Ranges(fs, path, name, size), "r") as handle:
            with decoding(name):
                parquet = pq.ParquetFile(
                    handle,
                    metadata=metadata_of(footer),  # not asked of a store twice
                    page_checksum_verification=True,
                    # whole row groups: fetch their ranges at once; slices: stream, never hold a huge group
                    pre_buffer=whole,
                    buffer_size=0 if whole else 1 << 20,
                )
            yield parquet


def _decode(parquet: pq.ParquetFile, piece: Slice, file: SourceFile, name: str, schema: pa.Schema) -> pa.Table:
    if not schema.names:
        return pa.table([pa.nulls(piece.num_rows)], names=["none"]).select([])
    place = f"{name}: row group {piece.row_group}"
    with decoding(place):
        if piece.num_rows == file.rows_of(piece.row_group):
            read = parquet.read_row_group(piece.row_group, columns=schema.names, use_threads=False)
            table = read.select(schema.names).cast(schema)
        else:
            table = _decode_part(parquet, piece, schema)
    if table.num_rows != piece.num_rows:
        raise DamagedFile(place, "damaged: it holds fewer rows than its footer says")
    return table


def _decode_part(parquet: pq.ParquetFile, piece: Slice, schema: pa.Schema) -> pa.Table:
    position, batches = 0, []
    for batch in parquet.iter_batches(
        _BATCH_ROWS, row_groups=[piece.row_group], columns=schema.names, use_threads=False
    ):
        start, stop = max(piece.start - position, 0), min(piece.stop - position, batch.num_rows)
        if start < stop:
            batches.append(pa.Table.from_batches([batch.slice(start, stop - start)]).select(schema.names).cast(schema))
        position += batch.num_rows
        if position >= piece.stop:
            break
    return pa.concat_tables(batches) if batches else schema.empty_table()


class _Ranges(RangedFile):
    """What Arrow reads a remote file through. What goes wrong in a read is one of our errors before Arrow sees it, so
    that it is never taken for damage."""

    def __init__(self, fs: Any, path: str, name: str, size: int) -> None:
        super().__init__(lambda start, stop: fs.cat_file(path, start, stop), size, name)
        self._secrets = secrets_in(fs)

    def readinto(self, buffer: Any) -> int:
        with reading(self._name, self._secrets):
            return super().readinto(buffer)
