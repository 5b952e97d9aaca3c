"""Text files with rows, plain or compressed, read in blocks of whole rows: the part that JSON Lines and CSV share.

Planning reads a file once from start to end, checks each row, and records the offset and checksum of each block. A
window is later read on its own and verified. Plain files are read from the offset of a block; gzip and zstd files are
decompressed from the start each time.
"""

import hashlib
import posixpath
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, Literal, Protocol

import pyarrow as pa

from pipeline.data.files.footer import DamagedFile, decoding, reading
from pipeline.data.files.json_types import column_of
from pipeline.data.files.source_file import Blocks, Slice, SliceRead, SourceFile, changed, open_file
from pipeline.stores.filesystem import secrets_in

BLOCK_BYTES = 1 << 20  # windows are cut at blocks: another value changes the windows of existing outputs
MAX_ROW_BYTES = 64 << 20
BOM = b"\xef\xbb\xbf"
_COMPRESSIONS: dict[str, Literal["gzip", "zstd"]] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
COMPRESSED = tuple(_COMPRESSIONS)

Row = dict[str, Any]


def compression_of(name: str) -> Literal["gzip", "zstd"] | None:
    return _COMPRESSIONS.get(posixpath.splitext(name.lower())[1])


def uncompressed(name: str) -> str:
    """Return the name of the decompressed file, in lower case."""
    return posixpath.splitext(name.lower())[0] if compression_of(name) is not None else name.lower()


class BadRow(ValueError):
    """The line, or the lines of a row, are not a valid row."""


class RowSyntax(Protocol):
    """Syntax of the rows of a file."""

    header: tuple[str, ...]  # column names that a file states once, in its first block

    def end(self, text: bytes) -> int:
        """Return the offset after the last whole row of `text`, which begins with a row; 0 if it holds no whole row."""
        ...

    def rows(self, block: bytes, first_line: int) -> Iterator[tuple[int, Row | BadRow]]:
        """Yield (line number from 1, row or BadRow) for each row. first_line: lines before the block."""
        ...


def scan(
    syntax: RowSyntax,
    fs: Any,
    path: str,
    relative: str,
    size: int,
    name: str,
    keep_bad: bool,
    add: Callable[[int, Row], None] = lambda number, row: None,
) -> SourceFile:
    """Read a whole file and return its planning metadata. name: for messages. add: called with each line number and
    row.

    Raises DamagedFile with the line number of a bad row. With `keep_bad`, such a row is one without values, but a file
    that cannot be decompressed or has a row longer than MAX_ROW_BYTES is still damaged.
    """
    if size == 0 and compression_of(relative):
        raise DamagedFile(name, "the file is empty (0 bytes), so it is truncated")
    rows, sizes, offsets, lines, checksums = (array("q") for _ in range(5))
    content = hashlib.sha256()
    offset = line = 0
    with reading(name, secrets_in(fs)), closing(_opened(fs, path, size, relative, name)) as file:
        for block in _blocks(syntax, file, name):
            count = 0
            for number, row in syntax.rows(block, line):
                if isinstance(row, BadRow) and not keep_bad:
                    raise DamagedFile(f"{name}:{number}", str(row))
                if not isinstance(row, BadRow):
                    add(number, row)
                count += 1
            for noted, value in ((rows, count), (sizes, len(block)), (offsets, offset), (lines, line)):
                noted.append(value)
            checksums.append(zlib.crc32(block))
            content.update(block)
            offset, line = offset + len(block), line + block.count(b"\n")
    return SourceFile(
        relative=relative,
        size=size,
        digest=content.hexdigest(),
        num_rows=sum(rows),
        group_rows=rows,
        group_bytes=sizes,
        blocks=Blocks(offsets, checksums, lines, syntax.header),
    )


def whole_rows(syntax: RowSyntax, fs: Any, path: str, relative: str, size: int, name: str) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, row) for each valid row."""
    line = 0
    with reading(name, secrets_in(fs)), closing(_opened(fs, path, size, relative, name)) as file:
        for block in _blocks(syntax, file, name):
            yield from ((n, row) for n, row in syntax.rows(block, line) if not isinstance(row, BadRow))
            line += block.count(b"\n")


def read_blocks(
    syntax: RowSyntax,
    fs: Any,
    root: str,
    shown: str,
    file: SourceFile,
    slices: list[Slice],
    schema: pa.Schema,
    row_of: Callable[[Row], Mapping[str, Any]] = lambda row: row,
) -> Iterator[SliceRead]:
    """Yield the columns of `schema` for each slice. row_of: converts a row as it is written.

    Raises InputError if the file changed since planning.
    """
    path, name = posixpath.join(root, file.relative), posixpath.join(shown, file.relative)
    blocks = file.blocks
    assert blocks is not None
    with reading(name, secrets_in(fs)):
        if int(fs.info(path)["size"]) != file.size:
            raise changed(name)
        with closing(_opened(fs, path, file.size, file.relative, name)) as opened:
            for piece in slices:
                i = piece.group - file.first_group
                try:
                    opened.move_to(blocks.offsets[i])
                    block = opened.read(file.group_bytes[i])
                except DamagedFile:  # it was intact at planning
                    raise changed(name) from None
                if zlib.crc32(block) != blocks.checksums[i]:
                    raise changed(name)
                yield _slice(syntax.rows(block, blocks.first_lines[i]), piece, schema, row_of)


def _slice(
    found: Iterator[tuple[int, Row | BadRow]],
    piece: Slice,
    schema: pa.Schema,
    row_of: Callable[[Row], Mapping[str, Any]],
) -> SliceRead:
    rows: list[Mapping[str, Any]] = []
    damaged = []
    for at, (number, row) in enumerate(found):
        if at >= piece.stop:
            break
        if at < piece.start:
            continue
        if isinstance(row, BadRow):
            damaged.append((at - piece.start, at - piece.start + 1, f"line {number}: {row}"))
            rows.append({})
        else:
            rows.append(row_of(row))
    columns = [column_of([row.get(f.name) for row in rows], f) for f in schema]
    return SliceRead(pa.Table.from_arrays(columns, schema=schema), damaged)


def _blocks(syntax: RowSyntax, file: "_Opened", name: str) -> Iterator[bytes]:
    """Yield blocks of whole rows, about BLOCK_BYTES each, the same in each run."""
    rest = b""
    while chunk := file.read(BLOCK_BYTES):
        text = rest + chunk
        end = syntax.end(text)
        if end:
            yield text[:end]
        rest = text[end:]
        if len(rest) > MAX_ROW_BYTES:
            raise DamagedFile(
                name,
                f"a row of more than {MAX_ROW_BYTES >> 20} MiB: another format, or in CSV a quote that is not closed",
            )
    if rest:
        yield rest


class _Opened:
    """Decompressed bytes of a file. Compressed files can only be read forwards."""

    def __init__(self, read: Callable[[int], bytes], seek: Callable[[int], Any] | None, close: Callable[[], Any]):
        self._read, self._seek, self.close = read, seek, close
        self._offset = 0

    def read(self, size: int) -> bytes:
        """Read `size` bytes; fewer only at the end."""
        pieces, missing = [], size
        while missing and (piece := self._read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        self._offset += size - missing
        return b"".join(pieces)

    def move_to(self, offset: int) -> None:
        if self._seek is not None:
            self._seek(offset)
        while self._seek is None and self._offset < offset and self.read(min(BLOCK_BYTES, offset - self._offset)):
            pass


def _opened(fs: Any, path: str, size: int, relative: str, name: str) -> _Opened:
    compression = compression_of(relative)
    raw = open_file(fs, path, size, name)
    if compression is None:
        return _Opened(raw.read, raw.seek, raw.close)
    stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), compression)

    def read(count: int) -> bytes:
        with decoding(name):
            return stream.read(count)

    return _Opened(read, None, raw.close)
