"""Planning metadata of one input file: its groups of rows, and the slices of groups for a range of rows.

A group can be read without the data before it: a row group of Parquet, a block of whole rows of JSON Lines or CSV, or
a record batch of Arrow. The readers in `formats` read them.
"""

import io
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pyarrow as pa

from pipeline.data.files.footer import Footer, reading
from pipeline.data.files.listing import is_local
from pipeline.errors import InputError
from pipeline.stores.filesystem import secrets_in
from pipeline.stores.ranged_file import RangedFile

_REQUEST_BYTES = 8 << 20  # per request to a store


@dataclass(frozen=True, slots=True)
class Blocks:
    """Positions and checksums of the groups of a file that has no footer with them."""

    offsets: "array[int]"  # decompressed bytes before each group
    checksums: "array[int]"  # CRC-32 of each group; detects changes
    first_lines: "array[int]"  # lines of text before each group, including empty ones
    header: tuple[str, ...] = ()  # names of the columns in the first line of CSV
    num_before: int = 0  # messages of Arrow before the first group: the schema, and dictionaries

    def only(self, start: int, stop: int) -> "Blocks":
        return replace(
            self,
            offsets=self.offsets[start:stop],
            checksums=self.checksums[start:stop],
            first_lines=self.first_lines[start:stop],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """Planning metadata of one file."""

    relative: str  # to the root, "/"-separated
    size: int
    digest: str  # sha256 of Parquet's footer, or of the whole content
    num_rows: int
    group_rows: "array[int]"  # rows of each group; an array, since 10^9 rows may be in 10^6 row groups
    group_bytes: "array[int]"  # uncompressed size of each group, all columns
    first_group: int = 0  # index of the first group in the arrays
    first_row: int = 0  # number of the file's rows before that group
    blocks: Blocks | None = None  # all formats except Parquet

    @classmethod
    def from_footer(cls, relative: str, size: int, footer: Footer) -> "SourceFile":
        metadata = footer.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        rows = array("q", (g.num_rows for g in groups))
        return cls(
            relative=relative,
            size=size,
            digest=footer.digest,
            num_rows=sum(rows),
            group_rows=rows,
            group_bytes=array("q", (max(0, g.total_byte_size) for g in groups)),
        )

    def only(self, start: int, stop: int) -> "SourceFile":
        """Return the file restricted to the groups that hold rows start <= i < stop, numbered over its known rows."""
        ends = list(accumulate(self.group_rows))
        a, b = bisect_right(ends, start), bisect_left(ends, stop) + 1
        rows = self.group_rows[a:b]
        before = ends[a] - rows[0]
        return replace(
            self,
            num_rows=sum(rows),
            group_rows=rows,
            group_bytes=self.group_bytes[a:b],
            first_group=self.first_group + a,
            first_row=self.first_row + before,
            blocks=self.blocks and self.blocks.only(a, b),
        )

    def rows_of(self, group: int) -> int:
        """Return the number of rows in the file's group `group`."""
        return self.group_rows[group - self.first_group]

    def slices(self, start: int, stop: int) -> Iterator["Slice"]:
        """Yield the slices of groups that make up rows start <= i < stop of the file, in order."""
        first = self.first_row
        for group, count in enumerate(self.group_rows, self.first_group):
            a, b = max(start - first, 0), min(stop - first, count)
            if a < b:
                yield Slice(group, a, b, first + a)
            first += count


@dataclass(frozen=True)
class Slice:
    """Rows start <= i < stop of one group. first_row: index in the file of its first row."""

    group: int
    start: int
    stop: int
    first_row: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SliceRead:
    """Rows of a slice. The `damaged` ones (start, stop, reason) are null."""

    table: pa.Table
    damaged: list[tuple[int, int, str]]


def changed(name: str) -> InputError:
    return InputError(
        f"{name}: the file has changed since the job was planned; restore it, or choose a new output.path"
    )


def open_file(fs: Any, path: str, size: int, name: str) -> "BoundedReader":
    """Open a file for reading from start to end, with large requests to a store."""
    if is_local(fs):
        return BoundedReader(io.FileIO(path), io.DEFAULT_BUFFER_SIZE, size)
    return BoundedReader(StoredRanges(fs, path, name, size), _REQUEST_BYTES, size)


class BoundedReader(io.BufferedReader):
    """Reader that allocates no more than the file's `size`, whatever length damaged data requests."""

    def __init__(self, raw: io.RawIOBase, buffer_size: int, size: int) -> None:
        super().__init__(raw, buffer_size)
        self._size = size

    def read(self, size: int | None = -1, /) -> bytes:
        rest = max(0, self._size - self.tell())
        return super().read(rest if size is None or size < 0 else min(size, rest))


class StoredRanges(RangedFile):
    """Remote file that raises our own errors for failed reads, so that Arrow never reports them as damaged data."""

    def __init__(self, fs: Any, path: str, name: str, size: int) -> None:
        super().__init__(lambda start, stop: fs.cat_file(path, start, stop), size, name)
        self._secrets = secrets_in(fs)

    def readinto(self, buffer: Any) -> int:
        with reading(self._name, self._secrets):
            return super().readinto(buffer)
