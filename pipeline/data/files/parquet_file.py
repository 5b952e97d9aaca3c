"""Planning metadata of Parquet files, and reading of slices of their row groups.

Texts are read as dictionaries at every depth, so that a text shared by many rows is in memory once.

The file is first checked against its planned footer. Damaged data is distinguished from a failing disk or store by
reading the same rows again through a new handle.
"""

import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.files.footer import (
    INT96_UNIT,
    DamagedFile,
    decoding,
    digest,
    footer_bytes,
    metadata_of,
    read_footer,
    reading,
)
from pipeline.data.files.listing import is_local
from pipeline.data.files.source_file import Slice, SliceRead, SourceFile, StoredRanges, changed
from pipeline.stores.filesystem import secrets_in

_BATCH_ROWS = 4096  # rows per batch when decoding a row group that is larger than a window


def plan(fs: Any, path: str, relative: str, size: int, name: str, keep_bad: bool) -> tuple[SourceFile, pa.Schema]:
    """Return the planning metadata and the schema of a file from its footer. Raises the errors of `read_footer`."""
    footer = read_footer(fs, path, size, name)
    return SourceFile.from_footer(relative, size, footer), footer.schema


def read_slices(
    fs: Any, root: str, shown: str, file: SourceFile, slices: list[Slice], schema: pa.Schema
) -> Iterator[SliceRead | DamagedFile]:
    """Yield the columns of `schema` for each slice, or a DamagedFile. shown: the root, for messages.

    Page checksums are verified if the file has them; otherwise a bit flip that still decodes is not detected. A slice
    of a large row group also decodes the rows before it, and drops them batch by batch. Raises InputError if the file
    changed since planning, EnvironmentFailed if it cannot be read.
    """
    path, name = posixpath.join(root, file.relative), posixpath.join(shown, file.relative)
    whole = all(s.num_rows == file.rows_of(s.group) for s in slices)
    with _open(fs, path, name, file, whole) as parquet:
        for piece in slices:
            try:
                yield SliceRead(_decode(parquet, piece, file, name, schema), [])
            except DamagedFile:
                yield _read_again(fs, path, name, file, piece, schema)


def _read_again(
    fs: Any, path: str, name: str, file: SourceFile, piece: Slice, schema: pa.Schema
) -> SliceRead | DamagedFile:
    try:
        with _open(fs, path, name, file, piece.num_rows == file.rows_of(piece.group)) as parquet:
            return SliceRead(_decode(parquet, piece, file, name, schema), [])
    except DamagedFile as damage:
        return damage


@contextmanager
def _open(fs: Any, path: str, name: str, file: SourceFile, whole: bool) -> Iterator[pq.ParquetFile]:
    with reading(name, secrets_in(fs)):
        size = int(fs.info(path)["size"])
        try:
            footer = footer_bytes(fs, path, size, name)
        except DamagedFile:  # it was intact at planning
            footer = b""
        if size != file.size or digest(footer) != file.digest:
            raise changed(name)
        with pa.OSFile(path) if is_local(fs) else pa.PythonFile(StoredRanges(fs, path, name, size), "r") as handle:
            with decoding(name):
                metadata = metadata_of(footer)
                parquet = pq.ParquetFile(
                    handle,
                    metadata=metadata,  # saves a second request to a store
                    read_dictionary=_texts(metadata.schema),
                    arrow_extensions_enabled=False,  # the JSON extension type cannot be read as a dictionary
                    page_checksum_verification=True,
                    coerce_int96_timestamp_unit=INT96_UNIT,
                    # whole row groups: fetch all ranges together; slices: stream, to never hold a huge group
                    pre_buffer=whole,
                    buffer_size=0 if whole else 1 << 20,
                )
            yield parquet


def _decode(parquet: pq.ParquetFile, piece: Slice, file: SourceFile, name: str, schema: pa.Schema) -> pa.Table:
    if not schema.names:
        return pa.table([pa.nulls(piece.num_rows)], names=["none"]).select([])
    group_name = f"{name}: row group {piece.group}"
    with decoding(group_name):
        if piece.num_rows == file.rows_of(piece.group):
            read = parquet.read_row_group(piece.group, columns=schema.names, use_threads=False).select(schema.names)
        else:
            read = _decode_part(parquet, piece, schema.names)
    if read.num_rows != piece.num_rows:
        raise DamagedFile(group_name, "damaged: it holds fewer rows than its footer states")
    return read


def _decode_part(parquet: pq.ParquetFile, piece: Slice, names: list[str]) -> pa.Table:
    position, batches = 0, []
    for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[piece.group], columns=names, use_threads=False):
        start, stop = max(piece.start - position, 0), min(piece.stop - position, batch.num_rows)
        if start < stop:
            batches.append(pa.Table.from_batches([batch.slice(start, stop - start)]).select(names))
        position += batch.num_rows
        if position >= piece.stop:
            break
    return pa.concat_tables(batches) if batches else pa.table({name: [] for name in names})


def _texts(schema: pq.ParquetSchema) -> list[str]:
    """Return the paths of text and bytes columns, including nested ones."""
    columns = [schema.column(i) for i in range(len(schema))]
    return [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and c.logical_type.type != "DECIMAL"]
