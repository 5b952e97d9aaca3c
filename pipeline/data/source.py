"""The input: which files there are, how their rows are cut into windows, and the reading of one window.

A window is the unit of reading: some slices of row groups, in (sorted path, row) order. Windows follow from
the file list and three numbers alone, so every run of a job cuts the same ones. Rendering and units are
`units`'s work.
"""

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.columns import did_you_mean, merge_types, plain_schema
from pipeline.data.footer import digest, footer_bytes, read_footer, reading
from pipeline.data.listing import find_files, is_local
from pipeline.errors import InputError

WINDOW_KEY = b"pipeline.window"  # schema metadata of a read window: its index


@dataclass(frozen=True)
class RowGroup:
    num_rows: int
    num_bytes: int  # uncompressed, of all columns


@dataclass(frozen=True)
class SourceFile:
    relative: str  # to the root, "/"-separated
    size: int
    digest: str  # sha256 of the footer
    num_rows: int
    row_groups: tuple[RowGroup, ...]


@dataclass(frozen=True)
class Slice:
    """Rows start <= i < stop of one row group; `file` indexes `Source.files`."""

    file: int
    row_group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Window:
    index: int
    slices: tuple[Slice, ...]

    @property
    def num_rows(self) -> int:
        return sum(s.stop - s.start for s in self.slices)


@dataclass(frozen=True)
class Source:
    """A dataset as found at planning. Picklable; `storage` may hold secrets and is never shown."""

    root: str  # with the protocol, where it is not local
    files: tuple[SourceFile, ...]  # sorted by relative path
    schema: pa.Schema  # plain types, of all columns that all files agree on
    missing: Mapping[str, str] = field(default_factory=dict, repr=False)  # column: first file without it
    conflicts: Mapping[str, str] = field(default_factory=dict, repr=False)  # column: which file, and why
    storage: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        return sum(f.num_rows for f in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(f.size for f in self.files)

    def check_columns(self, names: Iterable[str]) -> None:
        """Raise InputError unless every file has each of these columns, with types that fit together."""
        known = [*self.schema.names]
        for name in names:
            if name in self.conflicts:
                raise InputError(f"column {name!r}: {self.conflicts[name]}")
            if name in self.missing:
                raise InputError(f"{self.missing[name]}: has no column {name!r}, other files of {self.root} have it")
            if name not in known:
                first = posixpath.join(self.root, self.files[0].relative)
                raise InputError(f"{first}: has no column {name!r}{did_you_mean(name, known)}")


def open_source(path: str, storage: Mapping[str, Any] | None = None) -> Source:
    """Find the Parquet files of a file, folder (read whole, recursively) or glob, local or an fsspec url.

    In folders and globs, names that start with `_` or `.` are passed by. Reads every file's footer, in
    parallel. Raises InputError naming what is missing, empty, damaged or no Parquet file.
    """
    storage = dict(storage or {})
    fs, root, found = find_files(path, storage)
    shown = fs.unstrip_protocol(root) if not is_local(fs) else root

    def footer(item: tuple[str, int]) -> tuple[SourceFile, pa.Schema]:
        relative, size = item
        got = read_footer(fs, posixpath.join(root, relative), size, posixpath.join(shown, relative))
        groups = [got.metadata.row_group(i) for i in range(got.metadata.num_row_groups)]
        row_groups = tuple(RowGroup(g.num_rows, max(0, g.total_byte_size)) for g in groups)
        return SourceFile(relative, size, got.digest, got.metadata.num_rows, row_groups), got.schema

    with ThreadPoolExecutor(max_workers=min(16, len(found))) as pool:
        read = list(pool.map(footer, found))
    files = tuple(f for f, _ in read)
    schema, missing, conflicts = _merge_schemas(shown, read)
    return Source(shown, files, schema, missing, conflicts, storage)


def _merge_schemas(
    root: str, read: list[tuple[SourceFile, pa.Schema]]
) -> tuple[pa.Schema, dict[str, str], dict[str, str]]:
    """One plain schema over all files; columns that some file lacks; columns that cannot be one."""
    types: dict[str, pa.DataType] = {}
    conflicts: dict[str, str] = {}
    seen: dict[bytes, str] = {}  # distinct stored schemas (few) -> the first file with it
    schemas: list[tuple[str, pa.Schema]] = []
    for file, schema in read:
        key = schema.serialize().to_pybytes()
        if key not in seen:
            seen[key] = posixpath.join(root, file.relative)
            schemas.append((seen[key], plain_schema(schema)))
    for name, schema in schemas:
        for f in schema:
            if schema.names.count(f.name) > 1:
                conflicts.setdefault(f.name, f"{name} has more than one column of this name")
                continue
            merged = merge_types(types.get(f.name, f.type), f.type)
            if merged is None:
                conflicts.setdefault(f.name, f"{name} has it as {f.type}, files before it as {types[f.name]}")
            else:
                types[f.name] = merged
    missing = {
        column: name
        for column in [*types, *conflicts]
        for name, schema in reversed(schemas)
        if column not in schema.names
    }
    return pa.schema([(n, t) for n, t in types.items() if n not in conflicts]), missing, conflicts


def cut_windows(source: Source, max_rows: int, max_bytes: int, limit: int | None = None) -> tuple[Window, ...]:
    """Cut the first `limit` rows (None: all) into windows of at most `max_rows` rows and about `max_bytes`
    bytes.

    A window holds consecutive row groups; a row group that is larger than a window is cut into even slices.
    """
    assert min(max_rows, max_bytes) >= 1
    windows: list[Window] = []
    slices: list[Slice] = []
    rows = num_bytes = 0
    left = source.num_rows if limit is None else limit
    for piece, piece_bytes in _pieces(source, max_rows, max_bytes):
        if left <= 0:
            break
        piece_rows = piece.stop - piece.start
        if slices and (rows + piece_rows > max_rows or num_bytes + piece_bytes > max_bytes):
            windows.append(Window(len(windows), tuple(slices)))
            slices, rows, num_bytes = [], 0, 0
        if piece_rows > left:
            piece = Slice(piece.file, piece.row_group, piece.start, piece.start + left)
        slices.append(piece)
        rows += piece_rows
        num_bytes += piece_bytes
        left -= piece_rows
    if slices:
        windows.append(Window(len(windows), tuple(slices)))
    return tuple(windows)


def _pieces(source: Source, max_rows: int, max_bytes: int) -> Iterator[tuple[Slice, int]]:
    """Every row once, in order, as slices no larger than a window, with their bytes."""
    for i, file in enumerate(source.files):
        for j, group in enumerate(file.row_groups):
            if group.num_rows == 0:
                continue
            wanted = max(-(-group.num_rows // max_rows), -(-group.num_bytes // max_bytes), 1)
            step = -(-group.num_rows // wanted)
            for start in range(0, group.num_rows, step):
                stop = min(start + step, group.num_rows)
                yield Slice(i, j, start, stop), group.num_bytes * (stop - start) // group.num_rows


def read_window(source: Source, window: Window, columns: Iterable[str]) -> pa.Table:
    """Those columns of the window's rows, in order, and then `source_file` (string) and `source_row` (int64).

    Page checksums are verified where the file has them. Raises InputError when a file is damaged or is no
    longer the one that was planned, EnvironmentFailed when it cannot be read. A slice of a large row group
    decodes the rows before it too, and drops them batch by batch.
    """
    import fsspec.core

    names = list(dict.fromkeys(columns))
    schema = pa.schema([source.schema.field(name) for name in names])
    fs, root = fsspec.core.url_to_fs(source.root, **source.storage)
    tables: list[pa.Table] = []
    files: list[pa.Array] = []
    rows: list[pa.Array] = []
    for index, slices in groupby(window.slices, key=lambda s: s.file):
        file = source.files[index]
        first_rows = [0, *accumulate(g.num_rows for g in file.row_groups)]
        for piece, table in _read_slices(fs, root, source, file, list(slices), schema):
            tables.append(table)
            count = piece.stop - piece.start
            start = first_rows[piece.row_group] + piece.start
            files.append(pa.repeat(pa.scalar(file.relative, pa.string()), count))
            rows.append(pa.array(range(start, start + count), pa.int64()))
    table = pa.concat_tables(tables) if tables else schema.empty_table()
    where = [pa.chunked_array(files, pa.string()), pa.chunked_array(rows, pa.int64())]
    return pa.Table.from_arrays(
        [*table.columns, *where],
        schema=pa.schema(
            [*schema, ("source_file", pa.string()), ("source_row", pa.int64())],
            metadata={WINDOW_KEY: str(window.index).encode()},
        ),
    )


def _read_slices(
    fs: Any, root: str, source: Source, file: SourceFile, slices: list[Slice], schema: pa.Schema
) -> Iterator[tuple[Slice, pa.Table]]:
    path, shown = posixpath.join(root, file.relative), posixpath.join(source.root, file.relative)
    whole = all(s.start == 0 and s.stop == file.row_groups[s.row_group].num_rows for s in slices)
    with reading(shown):
        size = int(fs.info(path)["size"])
        if size != file.size or digest(footer_bytes(fs, path, size, shown)) != file.digest:
            raise InputError(f"{shown}: the file has changed since the job was planned")
        with pa.OSFile(path) if is_local(fs) else fs.open(path, "rb") as handle:
            parquet = pq.ParquetFile(
                handle,
                page_checksum_verification=True,
                # whole row groups: fetch their ranges at once; slices: stream, never hold a huge group
                pre_buffer=whole,
                buffer_size=0 if whole else 1 << 20,
            )
            for piece in slices:
                table = _read_slice(parquet, piece, file.row_groups[piece.row_group].num_rows, schema)
                if table.num_rows != piece.stop - piece.start:
                    raise InputError(f"{shown}: row group {piece.row_group} holds fewer rows than its footer says")
                yield piece, table


def _read_slice(parquet: pq.ParquetFile, piece: Slice, group_rows: int, schema: pa.Schema) -> pa.Table:
    if not schema.names:
        return pa.table([pa.nulls(piece.stop - piece.start)], names=["none"]).select([])
    if piece.stop - piece.start == group_rows:
        read = parquet.read_row_group(piece.row_group, columns=schema.names, use_threads=False)
        return read.select(schema.names).cast(schema)
    position, batches = 0, []
    for batch in parquet.iter_batches(4096, row_groups=[piece.row_group], columns=schema.names, use_threads=False):
        start, stop = max(piece.start - position, 0), min(piece.stop - position, batch.num_rows)
        if start < stop:
            batches.append(pa.Table.from_batches([batch.slice(start, stop - start)]).select(schema.names).cast(schema))
        position += batch.num_rows
        if position >= piece.stop:
            break
    return pa.concat_tables(batches) if batches else schema.empty_table()
