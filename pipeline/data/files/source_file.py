"""One file of the input as planning knows it: how its rows are grouped, and where a stretch of them lies.

A group is what can be read without what lies before it: a row group of Parquet, a block of whole lines of JSON Lines.
Reading is the work of `parquet_file` and `json_lines`.
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
    """Where the blocks of a file of lines begin, and what tells that one is still what it was."""

    offsets: "array[int]"  # bytes of the file before each block, decompressed
    first_lines: "array[int]"  # lines before each block, empty ones too
    checksums: "array[int]"  # CRC-32 of each block's bytes

    def only(self, start: int, stop: int) -> "LineBlocks":
        return LineBlocks(self.offsets[start:stop], self.first_lines[start:stop], self.checksums[start:stop])


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """What planning knows of one file."""

    relative: str  # to the root, "/"-separated
    size: int
    digest: str  # sha256 of the footer, or of all lines
    num_rows: int
    group_rows: "array[int]"  # of each group; arrays, as 10^9 rows may lie in 10^6 row groups
    group_bytes: "array[int]"  # uncompressed, of all columns
    first_group: int = 0  # of those in the arrays, and how many of the file's rows come before it
    first_row: int = 0
    blocks: LineBlocks | None = None  # of a file of lines, a block a group

    @classmethod
    def of(cls, relative: str, size: int, footer: Footer) -> "SourceFile":
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
        """The same file, knowing only the groups that hold rows start <= i < stop of those it knows."""
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
        """How many rows the file's group `group` holds."""
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
    """Rows start <= i < stop of one group. `first_row` is the file's row at its start."""

    group: int
    start: int
    stop: int
    first_row: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def changed(name: str) -> InputError:
    return InputError(
        f"{name}: the file has changed since the job was planned; put it back, or start anew in another output.path"
    )


class StoredRanges(RangedFile):
    """What a remote file is read through. What goes wrong in a read is one of our errors before Arrow sees it, so
    that it is never taken for damage."""

    def __init__(self, fs: Any, path: str, name: str, size: int) -> None:
        super().__init__(lambda start, stop: fs.cat_file(path, start, stop), size, name)
        self._secrets = secrets_in(fs)

    def readinto(self, buffer: Any) -> int:
        with reading(self._name, self._secrets):
            return super().readinto(buffer)
