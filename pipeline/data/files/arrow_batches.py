"""Arrow IPC: files (Feather V2), and streams, in which Hugging Face datasets are saved. A record batch is a group.

Both are a sequence of messages: the schema, dictionaries, record batches. Planning decodes and checks all of them, and
records the offset and checksum of each batch. A batch is always read as a whole.
"""

import hashlib
import posixpath
import zlib
from array import array
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.columns import empty_table, plain_array, plain_type
from pipeline.data.files.footer import DamagedFile, decoding, reading
from pipeline.data.files.scan_cache import scanned
from pipeline.data.files.source_file import Blocks, Slice, SliceRead, SourceFile, changed, open_file
from pipeline.errors import InputError
from pipeline.stores.filesystem import secrets_in

_MAGIC = b"ARROW1\0\0"  # at the beginning of a file; the first six bytes also end it
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream


def plan(fs: Any, path: str, relative: str, size: int, name: str, keep_bad: bool) -> tuple[SourceFile, pa.Schema]:
    """Return the planning metadata and the schema of a file. Raises DamagedFile, and InputError for a file that is not
    damaged but cannot be read."""
    return scanned(fs, path, size, ("batches",), lambda: _scan(fs, path, relative, size, name))


def _scan(fs: Any, path: str, relative: str, size: int, name: str) -> tuple[SourceFile, pa.Schema]:
    rows, sizes, offsets, checksums = (array("q") for _ in range(4))
    content = hashlib.sha256()
    with reading(name, secrets_in(fs)), closing(open_file(fs, path, size, name)) as raw, decoding(name):
        file = pa.PythonFile(raw, "r")
        _check_ends(file, size, name)
        head: list[pa.Message] = []
        for offset, message in _messages(file):
            for part in _parts(message):
                content.update(part)
            if message.type == "record batch" and head:
                batch = _batch(head, message)
                batch.validate(full=True)
                rows.append(batch.num_rows)
                sizes.append(sum(getattr(column, "indices", column).nbytes for column in batch.columns))
                offsets.append(offset)
                checksums.append(_checksum(head, message))
            elif offsets:
                raise InputError(f"{name}: a dictionary changes between record batches; write the file as Parquet")
            else:
                head.append(message)
        if not head:
            raise DamagedFile(name, "holds no schema")
        schema = pa.ipc.read_schema(head[0])
    _check_types(schema, name)
    return SourceFile(
        relative=relative,
        size=size,
        digest=content.hexdigest(),
        num_rows=sum(rows),
        group_rows=rows,
        group_bytes=sizes,
        blocks=Blocks(offsets, checksums, array("q"), num_before=len(head)),
    ), schema


def read_slices(
    fs: Any, root: str, shown: str, file: SourceFile, slices: list[Slice], schema: pa.Schema
) -> Iterator[SliceRead]:
    """Yield the columns of `schema` for each slice. Raises InputError if the file changed since planning."""
    path, name = posixpath.join(root, file.relative), posixpath.join(shown, file.relative)
    blocks = file.blocks
    assert blocks is not None
    with reading(name, secrets_in(fs)):
        if int(fs.info(path)["size"]) != file.size:
            raise changed(name)
        with closing(open_file(fs, path, file.size, name)) as raw:
            opened = pa.PythonFile(raw, "r")
            messages = _messages(opened)
            head: list[pa.Message] = []
            for piece in slices:
                i = piece.group - file.first_group
                try:
                    with decoding(name):
                        head = head or [next(messages)[1] for _ in range(blocks.num_before)]
                        opened.seek(blocks.offsets[i])
                        message = pa.ipc.read_message(opened)
                        if _checksum(head, message) != blocks.checksums[i]:
                            raise changed(name)
                        batch = _batch(head, message)
                except (DamagedFile, EOFError, StopIteration):  # it was intact at planning
                    raise changed(name) from None
                columns = [_without_views(batch.column(column)) for column in schema.names]
                table = pa.table(columns, names=schema.names)
                if piece.num_rows < batch.num_rows:  # a slice would keep the memory of the whole batch
                    table = table.take(pa.array(range(piece.start, piece.stop)))
                yield SliceRead(table, [])


def _messages(file: pa.NativeFile) -> Iterator[tuple[int, pa.Message]]:
    """Yield each message from the first on with its offset."""
    offset = 0
    file.seek(0)
    while file.read(8) in (_MAGIC, bytes(8)):  # some writers align the first message to 64 bytes
        offset += 8
    file.seek(offset)
    while True:
        offset = file.tell()
        try:
            message = pa.ipc.read_message(file)
        except EOFError:
            return
        yield offset, message


def _check_ends(file: pa.NativeFile, size: int, name: str) -> None:
    """Raise DamagedFile unless the file ends as it begins."""
    begin = file.read(8)
    file.seek(max(0, size - 8))
    end = file.read(8)
    if begin.startswith(b"FEA1"):
        raise InputError(f"{name}: Feather V1 is not supported; write it with pyarrow.feather.write_feather")
    if end[2:] != _MAGIC[:6] if begin == _MAGIC else end != _END:
        raise DamagedFile(name, "not an Arrow file or stream, or a truncated one")


def _check_types(schema: pa.Schema, name: str) -> None:
    for column in schema:
        try:
            pq.write_table(empty_table(pa.schema([column])), pa.BufferOutputStream())
        except pa.ArrowNotImplementedError:
            raise InputError(
                f"{name}: column {column.name!r}: its type {column.type} cannot be kept in Parquet; remove it from the "
                "file, or store it as another type"
            ) from None


def _batch(head: list[pa.Message], message: pa.Message) -> pa.RecordBatch:
    """Decode a record batch. head: the messages before the first batch: the schema, and dictionaries if any."""
    if len(head) == 1:
        return pa.ipc.read_record_batch(message, pa.ipc.read_schema(head[0]))
    return pa.ipc.open_stream(b"".join(each.serialize() for each in (*head, message))).read_next_batch()


def _without_views(array: pa.Array) -> pa.Array:
    """Return the values in a type whose rows Arrow can take, with the same dictionary if there is one."""
    if isinstance(array, pa.DictionaryArray):
        return pa.DictionaryArray.from_arrays(array.indices, _without_views(array.dictionary))
    return plain_array(array, plain_type(array.type))


def _parts(message: pa.Message) -> list[pa.Buffer]:
    return [part for part in (message.metadata, message.body) if part is not None]


def _checksum(head: list[pa.Message], message: pa.Message) -> int:
    """Return the CRC-32 of a record batch and of what its values depend on."""
    checksum = 0
    for part in (part for each in (*head, message) for part in _parts(each)):
        checksum = zlib.crc32(part, checksum)
    return checksum
