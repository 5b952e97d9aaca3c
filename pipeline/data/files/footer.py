"""Parquet footers: reading, checking against the file, and digesting.

The digest identifies an input file. It covers the offset, size and statistics of every row group, costs one small read,
and is the same for a copy of the file.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import EnvironmentFailed, InputError
from pipeline.stores.filesystem import secrets_in
from pipeline.stores.ranged_file import RangedFile
from pipeline.stores.redaction import error_text, redacted
from pipeline.stores.store_errors import SET_CREDENTIALS, Failure, client_error, failure_of

# Unit in which INT96 times are read. Arrow's default, ns, wraps silently outside of the years 1678 to 2261.
INT96_UNIT: Literal["us"] = "us"
_TAIL_BYTES = 64 * 1024  # fits most footers, so that most files need one read
_MAGIC, _MAGIC_ENCRYPTED = b"PAR1", b"PARE"
_COMPRESSED = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".lz4", ".snappy")


class DamagedFile(InputError):
    """The file's content is invalid; `input.on_corrupt: skip` skips it.

    Never raised for errors of a store or disk: skipping rows because of a transient error would lose them.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, " ".join(reason.split())  # Arrow's messages span several lines

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class Footer:
    digest: str
    metadata: pq.FileMetaData
    schema: pa.Schema  # stored schema, with Arrow's own metadata applied


def read_footer(fs: Any, path: str, size: int, name: str) -> Footer:
    """Read and check the footer of `path`, a file of `size` bytes on the fsspec filesystem `fs`. name: for messages.

    Raises DamagedFile if the file is not a complete Parquet file, InputError if it is encrypted or missing,
    EnvironmentFailed if it cannot be read.
    """
    tail = footer_bytes(fs, path, size, name)
    handle = _FooterOnlyFile(size, tail, name)
    try:
        file = pq.ParquetFile(pa.PythonFile(handle, "r"), pre_buffer=False, coerce_int96_timestamp_unit=INT96_UNIT)
        metadata, schema = file.metadata, file.schema_arrow
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
            raise DamagedFile(name, "the Parquet footer is damaged: its row counts do not add up")
        data_end = _data_end(file, handle) if rows and rows[-1] and len(schema) else 0
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
        raise DamagedFile(name, f"the Parquet footer is damaged: {redacted(str(e))}") from e
    if data_end > size - len(tail):
        raise DamagedFile(
            name, f"truncated: its footer states {data_end} bytes of data, but it holds {size - len(tail)}"
        )
    return Footer(digest(tail), metadata, schema)


def metadata_of(footer: bytes) -> pq.FileMetaData:
    """Parse a footer that was read and checked before."""
    return pq.read_metadata(pa.BufferReader(_MAGIC + footer))


def digest(footer: bytes) -> str:
    return hashlib.sha256(footer).hexdigest()


def begins_like_parquet(fs: Any, path: str, size: int) -> bool:
    """Return whether a file of `size` bytes begins like Parquet, encrypted or not."""
    head = fs.cat_file(path, start=0, end=min(size, len(_MAGIC)))
    return head in (_MAGIC, _MAGIC_ENCRYPTED)


def footer_bytes(fs: Any, path: str, size: int, name: str) -> bytes:
    """Read the footer with its length and magic bytes, the end of the file. Raises the errors of `read_footer`."""
    if size == 0:
        raise DamagedFile(name, "the file is empty (0 bytes)")
    tail = _read_tail(fs, path, size, min(size, _TAIL_BYTES), name)
    if tail[-4:] == _MAGIC_ENCRYPTED:
        raise InputError(f"{name}: encrypted Parquet is not supported")
    if size < 12 or tail[-4:] != _MAGIC:
        if name.lower().endswith(_COMPRESSED):
            raise DamagedFile(name, "not a Parquet file, but a compressed one by its name; decompress it")
        raise DamagedFile(name, "not a Parquet file, or a truncated one (it does not end with PAR1)")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length + 4 > size:
        raise DamagedFile(name, f"truncated: its footer states a length of {length} bytes, but the file has {size}")
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
    """Turn errors of disks and stores into InputError or EnvironmentFailed with `name`, without `secrets`.

    The original error is not kept as the cause, since logs would show it with its secrets.
    """

    try:
        yield
    except Exception as e:
        failure = failure_of(e)
        if failure is None:
            raise
        if failure is Failure.ABSENT:
            raise InputError(f"{name}: does not exist or was removed") from None
        message = error_text(client_error(e) or e, secrets)
        if failure is Failure.CREDENTIALS:
            raise InputError(f"{name}: {message}; {SET_CREDENTIALS}") from None
        if failure is Failure.DENIED:
            raise InputError(f"{name}: permission denied: {message}") from None
        if failure is Failure.MALFORMED:
            raise InputError(f"{name}: not a valid path in a store: {message}") from None
        raise EnvironmentFailed(f"{name}: cannot be read: {message}") from None


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turn Arrow's errors for the content of `name` into DamagedFile, and other errors as in `reading`."""
    with reading(name):
        try:
            yield
        except pa.ArrowMemoryError as e:
            raise EnvironmentFailed(
                f"{name}: not enough memory to decode it ({redacted(str(e))}); lower run.window_rows, or use a machine "
                "with more memory"
            ) from e
        except pa.ArrowException as e:
            raise DamagedFile(name, f"damaged, or different from its schema: {redacted(str(e))}") from e
        except OSError as e:
            if e.errno is not None:  # from the operating system
                raise
            raise DamagedFile(name, f"damaged: {redacted(str(e))}") from e  # Arrow reports damaged pages without errno


class _FooterOnlyFile(RangedFile):
    """Parquet file with zeros instead of data. After `is_open` is set, reads raise `_DataRead`."""

    def __init__(self, size: int, footer: bytes, name: str) -> None:
        first = size - len(footer)

        def read(start: int, stop: int) -> bytes:
            zeros = bytes(max(0, min(stop, first) - start))  # Arrow reads more than the footer and ignores the rest
            return zeros + footer[max(0, start - first) : max(0, stop - first)]

        super().__init__(read, size, name)
        self.is_open = False

    def readinto(self, buffer: Any) -> int:
        if self.is_open:
            raise _DataRead(self._offset + len(memoryview(buffer)))
        return super().readinto(buffer)


class _DataRead(Exception):
    """Data was requested, up to byte `stop`."""

    def __init__(self, stop: int) -> None:
        super().__init__(stop)
        self.stop = stop


def _data_end(file: pq.ParquetFile, handle: _FooterOnlyFile) -> int:
    """Return where the data of the last column in the last row group ends: how far Arrow would read.

    The metadata's column chunks cannot be used: if a damaged footer contradicts itself, pyarrow aborts the process.
    """
    handle.is_open = True
    try:
        file.read_row_group(file.metadata.num_row_groups - 1, columns=[file.schema_arrow.names[-1]], use_threads=False)
    except _DataRead as data_read:
        return data_read.stop
    return 0
