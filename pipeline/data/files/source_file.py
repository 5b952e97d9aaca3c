"""Planning metadata of one input file: its groups of rows, and the slices of groups for a range of rows.

A group can be read without the data before it: a row group of Parquet, or a block of whole lines of JSON Lines.
`parquet_file` and `json_lines` read them.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pipeline.data.files.footer import Footer, reading
from pipeline.errors import InputError
from pipeline.stores.filesystem import secrets_in
from pipeline.stores.ranged_file import RangedFile


@dataclass(frozen=True, slots=True)
class LineBlocks:
    """Positions and checksums of the blocks of a JSON Lines file."""

    offsets: "array[int]"  # decompressed bytes before each block
    first_lines: "array[int]"  # lines before each block, including empty ones
    checksums: "array[int]"  # CRC-32 of each block; detects changes

    def only(self, start: int, stop: int) -> "LineBlocks":
        return LineBlocks(self.offsets[start:stop], self.first_lines[start:stop], self.checksums[start:stop])


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """Planning metadata of one file."""

    relative: str  # to the root, "/"-separated
    size: int
    digest: str  # sha256 of the footer, or of all lines
    num_rows: int
    group_rows: "array[int]"  # rows of each group; an array, since 10^9 rows may be in 10^6 row groups
    group_bytes: "array[int]"  # uncompressed size of each group, all columns
    first_group: int = 0  # index of the first group in the arrays
    first_row: int = 0  # number of the file's rows before that group
    blocks: LineBlocks | None = None  # JSON Lines only, one block per group

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


def changed(name: str) -> InputError:
    return InputError(
        f"{name}: the file has changed since the job was planned; restore it, or choose a new output.path"
    )


class StoredRanges(RangedFile):
    """Remote file that raises our own errors for failed reads, so that Arrow never reports them as damaged data."""

    def __init__(self, fs: Any, path: str, name: str, size: int) -> None:
        super().__init__(lambda start, stop: fs.cat_file(path, start, stop), size, name)
        self._secrets = secrets_in(fs)

    def readinto(self, buffer: Any) -> int:
        with reading(self._name, self._secrets):
            return super().readinto(buffer)
