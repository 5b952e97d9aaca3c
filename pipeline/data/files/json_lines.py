"""JSON Lines files, plain or compressed: recognized by name, and read in blocks of whole lines.

Planning reads a file once from start to end. It checks each line, finds the types of the keys (`json_types`) and
records the offset and checksum of each block. A window is later read on its own and verified. Plain files are read from
the offset of a block; gzip and zstd files are decompressed from the start each time.

Lines are parsed with the json module because `pyarrow.json` turns texts like "2026-01-31" into times, refuses a whole
block for one bad line without its number, and cannot represent values of mixed types.
"""

import hashlib
import io
import json
import posixpath
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from pipeline.data.files.footer import DamagedFile, decoding, reading
from pipeline.data.files.json_types import column_of
from pipeline.data.files.listing import is_local
from pipeline.data.files.source_file import LineBlocks, Slice, SourceFile, StoredRanges, changed
from pipeline.data.json_text import BadJson, parse_json
from pipeline.stores.filesystem import secrets_in

BLOCK_BYTES = 1 << 20  # windows are cut at blocks: another value changes the windows of existing outputs
MAX_LINE_BYTES = 64 << 20
_REQUEST_BYTES = 8 << 20  # per request to a store
_ENDINGS = (".jsonl", ".ndjson", ".json")
_COMPRESSIONS: dict[str, Literal["gzip", "zstd"]] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_BOM = b"\xef\xbb\xbf"


def compression_of(name: str) -> Literal["gzip", "zstd"] | None:
    return _COMPRESSIONS.get(posixpath.splitext(name.lower())[1])


def is_json_lines(name: str) -> bool:
    """Return whether a name is of JSON Lines: .jsonl, .ndjson, .json, each optionally with .gz, .zst or .zstd."""
    name = name.lower()
    if compression_of(name) is not None:
        name = posixpath.splitext(name)[0]
    return name.endswith(_ENDINGS)


class BadLine(ValueError):
    """The line is not a valid row."""


@dataclass(frozen=True, slots=True)
class LinesRead:
    """Rows of a slice. The `damaged` ones (start, stop, reason) are null."""

    table: pa.Table
    damaged: list[tuple[int, int, str]]


def scan(
    fs: Any,
    path: str,
    relative: str,
    size: int,
    name: str,
    keep_bad: bool,
    add: Callable[[int, dict[str, Any]], None],
) -> SourceFile:
    """Read a whole file and return its planning metadata. name: for messages. add: called with each line number and
    row.

    Raises DamagedFile with the line number if a line is not a JSON object. With `keep_bad`, such a line is a row
    without values, but a file that cannot be decompressed or has a line longer than MAX_LINE_BYTES is still damaged.
    """
    if size == 0 and compression_of(relative):
        raise DamagedFile(name, "the file is empty (0 bytes), so it is truncated")
    rows, sizes, offsets, lines, checksums = (array("q") for _ in range(5))
    content = hashlib.sha256()
    offset = line = 0
    with reading(name, secrets_in(fs)), closing(_opened(fs, path, size, relative, name)) as file:
        for block in _blocks(file, name):
            count = 0
            for number, row in _rows(block, line):
                if isinstance(row, BadLine) and not keep_bad:
                    raise DamagedFile(f"{name}:{number}", str(row))
                if not isinstance(row, BadLine):
                    add(number, row)
                count += 1
            for noted, value in ((rows, count), (sizes, len(block)), (offsets, offset), (lines, line)):
                noted.append(value)
            checksums.append(zlib.crc32(block))
            content.update(block)
            offset, line = offset + len(block), line + block.count(b"\n")
    blocks = LineBlocks(offsets, lines, checksums)
    return SourceFile(
        relative=relative,
        size=size,
        digest=content.hexdigest(),
        num_rows=sum(rows),
        group_rows=rows,
        group_bytes=sizes,
        blocks=blocks,
    )


def whole_lines(fs: Any, path: str, relative: str, size: int, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each line that is a JSON object."""
    line = 0
    with reading(name, secrets_in(fs)), closing(_opened(fs, path, size, relative, name)) as file:
        for block in _blocks(file, name):
            yield from ((n, row) for n, row in _rows(block, line) if not isinstance(row, BadLine))
            line += block.count(b"\n")


def read_slices(
    fs: Any,
    root: str,
    shown: str,
    file: SourceFile,
    slices: list[Slice],
    schema: pa.Schema,
    row_of: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda line: line,
) -> Iterator[LinesRead]:
    """Yield the columns of `schema` for each slice. row_of: converts a line's object to a row.

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
                yield _slice(block, blocks.first_lines[i], piece, schema, row_of)


def _slice(
    block: bytes,
    first_line: int,
    piece: Slice,
    schema: pa.Schema,
    row_of: Callable[[dict[str, Any]], Mapping[str, Any]],
) -> LinesRead:
    rows: list[Mapping[str, Any]] = []
    damaged = []
    for at, (number, row) in enumerate(_rows(block, first_line)):
        if at >= piece.stop:
            break
        if at < piece.start:
            continue
        if isinstance(row, BadLine):
            damaged.append((at - piece.start, at - piece.start + 1, f"line {number}: {row}"))
            rows.append({})
        else:
            rows.append(row_of(row))
    columns = [column_of([row.get(f.name) for row in rows], f) for f in schema]
    return LinesRead(pa.Table.from_arrays(columns, schema=schema), damaged)


def _rows(block: bytes, first_line: int) -> Iterator[tuple[int, dict[str, Any] | BadLine]]:
    """Yield (line number from 1, object or BadLine) for each nonempty line."""
    for number, line in enumerate(block.split(b"\n"), first_line + 1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        try:
            yield number, parse_line(line)
        except BadLine as bad:
            yield number, bad


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse the JSON object of a line. Raises BadLine."""
    try:
        row = parse_json(line.decode("utf-8"))
        if b"\\u" in line:  # a lone surrogate is not valid text
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise BadLine(f"byte {error.start + 1} is not UTF-8") from None
    except UnicodeEncodeError:
        raise BadLine("contains a lone surrogate (\\ud800 to \\udfff)") from None
    except BadJson as error:
        raise BadLine(str(error)) from None
    except RecursionError as error:
        raise BadLine(f"nested too deeply: {error}") from None
    if not isinstance(row, dict):
        hint = "; JSON Lines has one object per line, not an array" if isinstance(row, list) else ""
        raise BadLine(f'expected an object such as {{"text": "..."}}{hint}')
    return row


def _blocks(file: "_Opened", name: str) -> Iterator[bytes]:
    """Yield blocks of whole lines, about BLOCK_BYTES each, the same in each run."""
    carry: list[bytes] = []
    while chunk := file.read(BLOCK_BYTES):
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join([*carry, chunk[:end]])
            carry = []
        carry.append(chunk[end:])
        if sum(map(len, carry)) > MAX_LINE_BYTES:
            raise DamagedFile(name, f"a line of more than {MAX_LINE_BYTES >> 20} MiB; is it JSON Lines?")
    if rest := b"".join(carry):
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
    if is_local(fs):
        raw: Any = io.FileIO(path)
    else:
        raw = io.BufferedReader(StoredRanges(fs, path, name, size), _REQUEST_BYTES)
    if compression is None:
        return _Opened(raw.read, raw.seek, raw.close)
    stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), compression)

    def read(count: int) -> bytes:
        with decoding(name):
            return stream.read(count)

    return _Opened(read, None, raw.close)
