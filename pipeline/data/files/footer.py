"""The footer of one Parquet file: read once, checked against the file, digested.

The digest is what identifies a file of the input: it covers every row group's place, size and statistics,
costs one small read, and is the same for a copy of the file.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import EnvironmentFailed, InputError
from pipeline.stores.filesystem import secrets_in
from pipeline.stores.ranged_file import RangedFile
from pipeline.stores.redaction import redacted, said
from pipeline.stores.store_errors import SET_CREDENTIALS, Failure, client_error, failure_of

_TAIL_BYTES = 64 * 1024  # holds most footers, so that most files cost one read
_MAGIC, _MAGIC_ENCRYPTED = b"PAR1", b"PARE"
_COMPRESSED = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".lz4", ".snappy")


class DamagedFile(InputError):
    """A file's bytes are not what a Parquet file's are; `input.on_corrupt: skip` can do without them.

    Never what a store or a disk said: giving rows up for a failure that passes would lose them.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, " ".join(reason.split())  # Arrow's are of several lines

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class Footer:
    digest: str
    metadata: pq.FileMetaData
    schema: pa.Schema  # as stored, with Arrow's own notes applied


def read_footer(fs: Any, path: str, size: int, name: str) -> Footer:
    """Read and check the footer of `path` (of `size` bytes) on the fsspec filesystem `fs`; `name` is for
    messages.

    Raises DamagedFile when the file is not a whole Parquet file, InputError when it is encrypted or gone,
    EnvironmentFailed when it cannot be read.
    """
    tail = footer_bytes(fs, path, size, name)
    handle = _FooterAlone(size, tail, name)
    try:
        file = pq.ParquetFile(pa.PythonFile(handle, "r"), pre_buffer=False)
        metadata, schema = file.metadata, file.schema_arrow
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
            raise DamagedFile(name, "the Parquet footer is damaged: its row counts do not add up")
        data_end = _data_end(file, handle) if rows and rows[-1] and len(schema) else 0
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
        raise DamagedFile(name, f"the Parquet footer is damaged: {redacted(str(e))}") from e
    if data_end > size - len(tail):
        raise DamagedFile(
            name, f"truncated: its footer speaks of {data_end} bytes of data, it holds {size - len(tail)}"
        )
    return Footer(digest(tail), metadata, schema)


def metadata_of(footer: bytes) -> pq.FileMetaData:
    """What a footer says that was read before and is known to be good."""
    return pq.read_metadata(pa.BufferReader(_MAGIC + footer))


def digest(footer: bytes) -> str:
    return hashlib.sha256(footer).hexdigest()


def begins_like_parquet(fs: Any, path: str, size: int) -> bool:
    """Return whether a file of `size` bytes begins as Parquet does, encrypted or not."""
    head = fs.cat_file(path, start=0, end=min(size, len(_MAGIC)))
    return head in (_MAGIC, _MAGIC_ENCRYPTED)


def footer_bytes(fs: Any, path: str, size: int, name: str) -> bytes:
    """The footer with its length and magic, the last bytes of the file. Raises as `read_footer`."""
    if size == 0:
        raise DamagedFile(name, "the file is empty (0 bytes), not even a Parquet footer")
    tail = _read_tail(fs, path, size, min(size, _TAIL_BYTES), name)
    if tail[-4:] == _MAGIC_ENCRYPTED:
        raise InputError(f"{name}: encrypted Parquet is not supported")
    if size < 12 or tail[-4:] != _MAGIC:
        if name.lower().endswith(_COMPRESSED):
            raise DamagedFile(name, "no Parquet, but a file compressed as a whole by its name; decompress it")
        raise DamagedFile(name, "not a Parquet file, or a truncated one (it does not end in PAR1)")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length + 4 > size:
        raise DamagedFile(name, f"truncated: its footer should be {length} bytes long, the file has {size}")
    if length > len(tail):
        tail = _read_tail(fs, path, size, length, name)
    return tail[-length:]


def _read_tail(fs: Any, path: str, size: int, length: int, name: str) -> bytes:
    with reading(name, secrets_in(fs)):
        data = fs.cat_file(path, start=size - length, end=size)
    if len(data) != length:
        raise EnvironmentFailed(f"{name}: short read: {len(data)} of {length} bytes; has the file changed?")
    return data


@contextmanager
def reading(name: str, secrets: frozenset[str] = frozenset()) -> Iterator[None]:
    """Turn what disks and stores say while `name` is read into InputError or EnvironmentFailed, without `secrets`.

    What they said is not kept as the cause: a log would show it whole.
    """

    try:
        yield
    except Exception as e:
        failure = failure_of(e)
        if failure is None:
            raise
        if failure is Failure.ABSENT:
            raise InputError(f"{name}: does not exist, or does no longer") from None
        told = said(client_error(e) or e, secrets)
        if failure is Failure.CREDENTIALS:
            raise InputError(f"{name}: {told}; {SET_CREDENTIALS}") from None
        if failure is Failure.DENIED:
            raise InputError(f"{name}: permission denied: {told}") from None
        if failure is Failure.MALFORMED:
            raise InputError(f"{name}: no place in a store: {told}") from None
        raise EnvironmentFailed(f"{name}: cannot be read: {told}") from None


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turn what Arrow says of the bytes of `name` into DamagedFile; the rest as `reading` does."""
    with reading(name):
        try:
            yield
        except pa.ArrowMemoryError as e:
            raise EnvironmentFailed(
                f"{name}: too little memory to decode it ({redacted(str(e))}); lower run.window_rows or take a larger "
                "machine"
            ) from e
        except pa.ArrowException as e:
            raise DamagedFile(name, f"damaged, or not as its schema says: {redacted(str(e))}") from e
        except OSError as e:
            if e.errno is not None:  # the system's
                raise
            raise DamagedFile(name, f"damaged: {redacted(str(e))}") from e  # so Arrow reports a damaged page


class _FooterAlone(RangedFile):
    """A Parquet file of which only the footer is at hand. Reads of data are `_Asked`, once it is open."""

    def __init__(self, size: int, footer: bytes, name: str) -> None:
        first = size - len(footer)

        def read(start: int, stop: int) -> bytes:
            zeros = bytes(max(0, min(stop, first) - start))  # Arrow reads more than the footer and passes it by
            return zeros + footer[max(0, start - first) : max(0, stop - first)]

        super().__init__(read, size, name)
        self.is_open = False

    def readinto(self, buffer: Any) -> int:
        if self.is_open:
            raise _Asked(self._at + len(memoryview(buffer)))
        return super().readinto(buffer)


class _Asked(Exception):
    """Data was asked for, up to byte `stop`."""

    def __init__(self, stop: int) -> None:
        super().__init__(stop)
        self.stop = stop


def _data_end(file: pq.ParquetFile, handle: _FooterAlone) -> int:
    """Where the last column's data in the last row group ends: how far Arrow would read.

    Not asked of the metadata's column chunks: where a damaged footer says contradictory things of one, pyarrow
    ends the process.
    """
    handle.is_open = True
    try:
        file.read_row_group(file.metadata.num_row_groups - 1, columns=[file.schema_arrow.names[-1]], use_threads=False)
    except _Asked as asked:
        return asked.stop
    return 0
