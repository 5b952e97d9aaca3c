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

from pipeline.errors import EnvironmentFailed, InputError, PipelineError

_TAIL_BYTES = 64 * 1024  # holds most footers, so that most files cost one read
_MAGIC, _MAGIC_ENCRYPTED = b"PAR1", b"PARE"


class DamagedFile(InputError):
    """A file's bytes are not what a Parquet file's are; `input.on_corrupt: skip` can do without them.

    Never what a store or a disk said: giving rows up for a failure that passes would lose them.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

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
    try:
        file = pq.ParquetFile(pa.BufferReader(_MAGIC + tail))
        metadata, schema = file.metadata, file.schema_arrow
    except (pa.ArrowException, OSError) as e:
        raise DamagedFile(name, f"the Parquet footer is damaged: {e}") from e
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    if any(g.num_rows < 0 for g in groups) or sum(g.num_rows for g in groups) != metadata.num_rows:
        raise DamagedFile(name, "the Parquet footer is damaged: its row counts do not add up")
    data_end = max((_end(g) for g in groups), default=0)
    if data_end > size - len(tail):
        raise DamagedFile(
            name, f"truncated: its footer speaks of {data_end} bytes of data, it holds {size - len(tail)}"
        )
    return Footer(digest(tail), metadata, schema)


def digest(footer: bytes) -> str:
    return hashlib.sha256(footer).hexdigest()


def footer_bytes(fs: Any, path: str, size: int, name: str) -> bytes:
    """The footer with its length and magic, the last bytes of the file. Raises as `read_footer`."""
    if size == 0:
        raise DamagedFile(name, "the file is empty (0 bytes), not even a Parquet footer")
    tail = _read_tail(fs, path, size, min(size, _TAIL_BYTES), name)
    if tail[-4:] == _MAGIC_ENCRYPTED:
        raise InputError(f"{name}: encrypted Parquet is not supported")
    if size < 12 or tail[-4:] != _MAGIC:
        raise DamagedFile(name, "not a Parquet file, or a truncated one (it does not end in PAR1)")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length + 4 > size:
        raise DamagedFile(name, f"truncated: its footer should be {length} bytes long, the file has {size}")
    if length > len(tail):
        tail = _read_tail(fs, path, size, length, name)
    return tail[-length:]


def _read_tail(fs: Any, path: str, size: int, length: int, name: str) -> bytes:
    with reading(name):
        data = fs.cat_file(path, start=size - length, end=size)
    if len(data) != length:
        raise EnvironmentFailed(f"{name}: short read: {len(data)} of {length} bytes; has the file changed?")
    return data


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn what disks and stores say while `name` is read into InputError or EnvironmentFailed."""
    try:
        yield
    except FileNotFoundError as e:
        raise InputError(f"{name}: does not exist, or does no longer") from e
    except PermissionError as e:
        raise InputError(f"{name}: permission denied: {e}") from e
    except OSError as e:
        raise EnvironmentFailed(f"{name}: cannot be read: {e}") from e
    except Exception as e:
        # the libraries behind fsspec have their own exceptions and no common base; a builtin is a defect
        if isinstance(e, PipelineError) or type(e).__module__ == "builtins":
            raise
        raise EnvironmentFailed(f"{name}: cannot be read: {type(e).__name__}: {e}") from e


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turn what Arrow says of the bytes of `name` into DamagedFile; the rest as `reading` does."""
    with reading(name):
        try:
            yield
        except pa.ArrowMemoryError as e:
            raise EnvironmentFailed(
                f"{name}: too little memory to decode it ({e}); lower run.window_bytes or take a larger machine"
            ) from e
        except pa.ArrowException as e:
            raise DamagedFile(name, f"damaged, or not as its schema says: {e}") from e
        except OSError as e:
            if e.errno is not None:  # the system's
                raise
            raise DamagedFile(name, f"damaged: {e}") from e  # so Arrow reports a damaged page


def _end(group: pq.RowGroupMetaData) -> int:
    """Where the row group's last column chunk ends, from its first and last column (chunks lie in order)."""
    if group.num_columns == 0 or group.num_rows == 0:
        return 0
    ends = []
    for i in {0, group.num_columns - 1}:
        chunk = group.column(i)
        start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
        ends.append(start + chunk.total_compressed_size)
    return max(ends)
