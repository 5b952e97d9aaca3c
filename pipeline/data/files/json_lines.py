"""JSON Lines files, plain or compressed: found by name, cut into blocks of whole lines, and read block by block.

Planning reads a file once from end to end. It checks each line, finds the types of the keys (`json_types`), and notes
where blocks begin; so later a window is read by itself, and its bytes are seen to be those that were planned. Plain
files are read at a block's place. Gzip and zstd have no places: they are decompressed from their beginning each time.

Lines are read with the json module, not with `pyarrow.json`: that one takes texts like "2026-01-31" for times,
refuses a whole block for one line without its number, and has no room for values of several kinds.
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
from pipeline.stores.filesystem import secrets_in

BLOCK_BYTES = 1 << 20  # windows are cut at blocks: with another number an output that was begun has other windows
MAX_LINE_BYTES = 64 << 20
_REQUEST_BYTES = 8 << 20  # of a plain or compressed file in a store
_ENDINGS = (".jsonl", ".ndjson", ".json")
_COMPRESSIONS: dict[str, Literal["gzip", "zstd"]] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_BOM = b"\xef\xbb\xbf"


def compression_of(name: str) -> Literal["gzip", "zstd"] | None:
    return _COMPRESSIONS.get(posixpath.splitext(name.lower())[1])


def is_json_lines(name: str) -> bool:
    """Whether a file is called like one of JSON Lines: .jsonl, .ndjson, .json, each also with .gz, .zst or .zstd."""
    name = name.lower()
    if compression_of(name) is not None:
        name = posixpath.splitext(name)[0]
    return name.endswith(_ENDINGS)


class BadLine(ValueError):
    """A line that is no row; the text says why."""


@dataclass(frozen=True, slots=True)
class LinesRead:
    """The rows of a slice. Those that are `damaged` (start, stop, reason) are null."""

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
    """What planning has to know of a file, by reading all of it; `name` is for messages. `add` is given the number of
    each line and its row.

    Raises DamagedFile, naming the line, where a line is no JSON object. With `keep_bad` such a line is a row without
    values; a file that cannot be decompressed, or has a line of more than MAX_LINE_BYTES, is damaged all the same.
    """
    if size == 0 and compression_of(relative):
        raise DamagedFile(name, "the file is empty (0 bytes), so it is cut off")
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
    """The number of each line that is an object, from 1, and the object."""
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
    """Of each slice the columns of `schema`. `row_of`: the row of a line's object.

    Raises InputError when the file is not the one that was planned.
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
                except DamagedFile:  # it was whole when it was planned
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
    """The number of each line that is not empty, from 1, and its object or why it has none."""
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
    """The object in a line. Raises BadLine."""
    try:
        row = json.loads(line.decode("utf-8"))
        if b"\\u" in line:  # half of a surrogate pair is no text
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise BadLine(f"byte {error.start + 1} of it is not UTF-8") from None
    except UnicodeEncodeError:
        raise BadLine("a text with half of a surrogate pair (\\ud800 to \\udfff)") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        hint = "; a file that is one array is no JSON Lines: write an object a line" if isinstance(row, list) else ""
        raise BadLine(f'expected an object such as {{"text": "..."}}{hint}')
    return row


def _blocks(file: "_Opened", name: str) -> Iterator[bytes]:
    """Whole lines, about BLOCK_BYTES at a time, the same ones on each run."""
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
    """The text of a file from one place on; forwards only where it is compressed."""

    def __init__(self, read: Callable[[int], bytes], seek: Callable[[int], Any] | None, close: Callable[[], Any]):
        self._read, self._seek, self.close = read, seek, close
        self._at = 0

    def read(self, size: int) -> bytes:
        """So many bytes; fewer only at the end."""
        pieces, missing = [], size
        while missing and (piece := self._read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        self._at += size - missing
        return b"".join(pieces)

    def move_to(self, offset: int) -> None:
        if self._seek is not None:
            self._seek(offset)
        while self._seek is None and self._at < offset and self.read(min(BLOCK_BYTES, offset - self._at)):
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
