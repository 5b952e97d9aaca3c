"""The input: finding its files, cutting their rows into windows, and reading a window.

A window is the unit of reading: consecutive rows in (sorted path, row) order, cut at row groups of Parquet or blocks of
other formats if these are small enough. Windows depend only on the file list and three numbers, so every run of a job
cuts the same ones. Memory grows with files and windows, not with rows. `units` renders prompts and makes units.
"""

import json
import posixpath
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import accumulate, chain
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from pipeline.data.columns import UnifiedColumn, decoded_bytes, did_you_mean, empty_table, plain_array, plain_schema
from pipeline.data.dataset_files import InputFormat, SkippedFile, dataset_columns, files_of
from pipeline.data.files.footer import DamagedFile, decoding
from pipeline.data.files.formats import format_by_name, format_of, of_one_format
from pipeline.data.files.hub_splits import hub_input
from pipeline.data.files.json_lines import read_slices as read_lines
from pipeline.data.files.listing import find_files, has_magic, is_local
from pipeline.data.files.partitions import partition_array
from pipeline.data.files.pdf_pages import pdfs_of
from pipeline.data.files.pdf_pages import read_slices as read_pages
from pipeline.data.files.source_file import Slice, SourceFile
from pipeline.data.files.text_blocks import compression_of
from pipeline.data.requests.input_checks import Requests
from pipeline.data.row_checksum import MODULUS, range_checksum
from pipeline.errors import InputError
from pipeline.stores.filesystem import filesystem
from pipeline.stores.redaction import redacted, shown_url
from pipeline.stores.retries import RetryCounts

WINDOW_KEY = b"pipeline.window"  # schema metadata of a read window: its index
DAMAGED_KEY = b"pipeline.damaged"  # schema metadata: its unreadable rows, a JSON list of [start, stop, reason]
GROUPS_KEY = b"pipeline.damaged_groups"  # schema metadata: its damaged row groups, a JSON list of DamagedGroup
WINDOW_BYTES = 256 * 2**20  # approximate max size of a window
IMAGE_WINDOW_BYTES = 64 * 2**20  # of a window whose rows hold images: a reader holds each several times
LARGE_COMPRESSED_BYTES = 10**9
FOOTERS_AT_ONCE = 16  # doubled for stores, where latency dominates
FILES_AT_ONCE = 8  # of a window, from a store

OnCorrupt = Literal["fail", "skip"]


@dataclass(frozen=True, slots=True)
class InputWindow:
    """Rows start <= i < stop of the dataset, numbered across its files in order."""

    index: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class DamagedGroup:
    """Damaged row group of a Parquet file, or the slice of it in one window. first_row: its first row in the file.

    Damaged rows of text are not listed: a digest covers the whole file, so a repaired row makes another input. The
    digest of a Parquet file covers its footer only.
    """

    file: str
    row_group: int
    first_row: int
    rows: int
    reason: str


@dataclass(frozen=True)
class KnownDamage:
    """Damaged row groups by which a window is cut. They are not read, and other damage raises InputError with `advice`.

    The cut depends on the damage, since an unreadable row has no prompt.
    """

    groups: tuple[DamagedGroup, ...]
    advice: str = "it was damaged while it was read; restore it and run again"

    def of_file(self, file: str) -> dict[int, DamagedGroup]:
        """Return the file's damaged row groups by their number."""
        return {group.row_group: group for group in self.groups if group.file == file}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Dataset found at planning. Picklable; `url` and `storage` may hold secrets and are never shown."""

    root: str  # for messages; with the protocol, unless local
    url: str = field(repr=False)  # as in the job file; may contain a host and a password
    base: str  # the root on the url's filesystem
    files: tuple[SourceFile, ...]  # sorted by relative path; appended batches come last
    schema: pa.Schema  # plain types of the columns that all files agree on; columns of folder names come last
    kept: pa.Schema  # the same columns with their output types
    missing: Mapping[str, str] = field(default_factory=dict, repr=False)  # column -> first file without it
    conflicts: Mapping[str, str] = field(default_factory=dict, repr=False)  # column -> file and reason
    storage: Mapping[str, Any] = field(default_factory=dict, repr=False)
    partitions: frozenset[str] = frozenset()  # the columns that come from folder names
    on_corrupt: OnCorrupt = "fail"
    skipped: tuple[SkippedFile, ...] = ()  # sorted by relative path
    passed_over: tuple[str, ...] = ()  # files of other formats, sorted
    batches: tuple[int, ...] = ()  # indices in `files` at which an appended batch starts
    requests: Requests | None = None  # set if the lines are requests
    has_pages: bool = False  # rows are pages of PDFs
    unified: Mapping[str, UnifiedColumn] = field(default_factory=dict, repr=False)  # columns stored in several types

    @property
    def unified_texts(self) -> list[str]:
        """Descriptions of the columns that files store in several types, such as `x: int32 in a.parquet, ...`."""
        return [column.to_text(name) for name, column in self.unified.items()]

    @property
    def large_compressed(self) -> list[str]:
        """Text files of which each window decompresses gigabytes again."""
        files = (f for f in self.files if f.blocks is not None and f.size > LARGE_COMPRESSED_BYTES)
        return [f.relative for f in files if compression_of(f.relative) is not None]

    @property
    def empty(self) -> list[str]:
        """All files if none has rows, else none."""
        return [] if self.num_rows else [f.relative for f in self.files]

    @property
    def num_rows(self) -> int:
        return sum(f.num_rows for f in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def every_column(self) -> tuple[str, ...]:
        """All columns, the default of `input.columns`. Includes conflicting columns, which are then refused."""
        return (*self.schema.names, *self.conflicts)

    def check_columns(self, names: Iterable[str]) -> None:
        """Raise InputError unless every file has each of these columns with compatible types."""
        known = [*self.schema.names]
        for name in names:
            if name in self.conflicts:
                raise InputError(f"column {name!r}: {self.conflicts[name]}")
            if name in self.missing and name in self.partitions:
                raise InputError(
                    f"{self.missing[name]}: is not in a folder {name}=..., but other files of {self.root} are; move "
                    f"it, or leave {name!r} out of input.columns and the prompt"
                )
            if name in self.missing:
                raise InputError(
                    f"{self.missing[name]}: has no column {name!r}, but other files of {self.root} have it; leave "
                    f"{name!r} out of input.columns (default: all columns) and the prompt, or move the file"
                )
            if name not in known:
                first = posixpath.join(self.root, self.files[0].relative)
                hint = did_you_mean(name, known) or ": it and all other files have no rows" * (not self.num_rows)
                raise InputError(f"{first}: has no column {name!r}{hint}")


def open_source(
    path: str,
    storage: Mapping[str, Any] | None = None,
    on_corrupt: OnCorrupt = "fail",
    retries: RetryCounts | None = None,
    is_later: Callable[[str], bool] | None = None,
    kind: InputFormat = "rows",
) -> Source:
    """Find the files of a path: a file, a folder (recursively) or a glob, local or an fsspec url.
    A url of the Hugging Face Hub is read at one commit, which is in `Source.url`.

    Folders and globs skip names that start with `_` or `.`, and files of other formats (`files/formats.py`, listed in
    `Source.passed_over`). Folders named `column=value` below the root (for a glob: below the part before its first
    pattern) are columns, unless every file stores a column of that name. Reads every Parquet footer, in parallel, and
    the whole content of other files.

    retries: counts retried requests to a store. is_later: returns whether a file, by its relative path, was appended to
    an existing output; it must then match the columns of the other files. kind: what rows are.
    Raises InputError for files that are missing, empty, damaged or in another format; with `on_corrupt` "skip", such
    files are in `Source.skipped`.
    """
    storage = dict(storage or {})
    hub = hub_input(path, storage, retries)
    path = path if hub is None else hub.url
    listed = find_files(path, storage, retries)
    fs, root, found = listed.fs, listed.root, listed.files
    shown = shown_url(fs.unstrip_protocol(root)) if not is_local(fs) else root
    names = [posixpath.join(shown, relative) for relative, _ in found]
    others: list[tuple[str, int]] = []
    if not listed.is_named or (kind == "rows" and found[0][1] and format_by_name(names[0]) is None):
        name = f"input.path {shown_url(path)}"
        found, others = pdfs_of(found, name) if kind == "pdf" else of_one_format(fs, root, found, name, names)
        names = [posixpath.join(shown, relative) for relative, _ in found]
        if hub is not None and not has_magic(path):
            hub.check_choice([relative for relative, _ in found])
    dataset = files_of(fs, root, names, on_corrupt == "skip", kind)

    def look(index: int) -> SourceFile | SkippedFile:
        relative, size = found[index]
        try:
            return dataset.look(index, relative, size)
        except DamagedFile as damage:
            if on_corrupt == "fail":
                raise InputError(f"{damage}; repair or remove it, or set input.on_corrupt: skip") from damage
            return SkippedFile(relative, size, damage.reason)

    at_once = FOOTERS_AT_ONCE if is_local(fs) else 2 * FOOTERS_AT_ONCE
    with ThreadPoolExecutor(max_workers=min(at_once, len(found))) as pool:
        read = list(pool.map(look, range(len(found))))
    files = tuple(f for f in read if isinstance(f, SourceFile))
    skipped = tuple(f for f in read if isinstance(f, SkippedFile))
    if not files:
        first = skipped[0]
        raise InputError(
            f"input.path {shown_url(path)}: none of its {len(skipped)} files can be read; the first, "
            f"{posixpath.join(shown, first.relative)}: {first.reason}"
        )
    paths_by_index = {i: found[i][0] for i, f in enumerate(read) if isinstance(f, SourceFile)}
    later = {i: relative for i, relative in paths_by_index.items() if is_later is not None and is_later(relative)}
    first = {i: relative for i, relative in paths_by_index.items() if i not in later}
    columns = dataset_columns(dataset, (first, later), shown)
    return Source(
        root=shown,
        url=path,
        base=root,
        files=files,
        schema=plain_schema(columns.kept),
        kept=columns.kept,
        missing=columns.missing,
        conflicts=columns.conflicts,
        storage=storage,
        partitions=columns.partitions,
        on_corrupt=on_corrupt,
        skipped=skipped,
        passed_over=tuple(relative for relative, _ in others),
        requests=dataset.requests(),
        has_pages=kind == "pdf",
        unified=columns.unified,
    )


def cut_windows(source: Source, max_rows: int, max_bytes: int, limit: int | None = None) -> tuple[InputWindow, ...]:
    """Cut the first `limit` rows (None: all) into windows of at most `max_rows` rows and about `max_bytes` bytes.

    A window holds consecutive row groups; a row group larger than a window is cut into even slices. An appended batch
    of files starts a new window, so that earlier windows do not change. If the files before the first batch have no
    rows, window 0 is reserved for their empty part.
    """
    assert min(max_rows, max_bytes) >= 1
    windows: list[InputWindow] = []
    start = stop = num_bytes = 0
    first = _first_rows(source)
    ends_of_batches = {first[i] for i in source.batches}
    index = 1 if 0 in ends_of_batches else 0
    end = source.num_rows if limit is None else min(limit, source.num_rows)
    for rows, size in _pieces(source, max_rows, max_bytes):
        if stop >= end:
            break
        is_full = stop + rows - start > max_rows or num_bytes + size > max_bytes
        if stop > start and (is_full or stop in ends_of_batches):
            windows.append(InputWindow(index + len(windows), start, stop))
            start, num_bytes = stop, 0
        stop = min(stop + rows, end)
        num_bytes += size
    if stop > start:
        windows.append(InputWindow(index + len(windows), start, stop))
    return tuple(windows)


def _pieces(source: Source, max_rows: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (rows, bytes) of the row groups in order; those larger than a window as slices."""
    for file in source.files:
        for rows, size in zip(file.group_rows, file.group_bytes, strict=True):
            if rows == 0:
                continue
            if rows <= max_rows and size <= max_bytes:
                yield rows, size
                continue
            wanted = max(-(-rows // max_rows), -(-size // max_bytes))
            step = -(-rows // wanted)
            for start in range(0, rows, step):
                count = min(step, rows - start)
                yield count, size * count // rows


def read_window(source: Source, window: InputWindow, columns: Iterable[str]) -> pa.Table:
    """Read the window's rows as one table; otherwise like `read_stretches`."""
    (table,) = read_stretches(source, window, columns)
    return table


def read_stretches(
    source: Source,
    window: InputWindow,
    columns: Iterable[str],
    max_bytes: int | None = None,
    known: KnownDamage | None = None,
) -> Iterator[pa.Table]:
    """Yield these columns of the window's rows in order, followed by `source_file` (string) and `source_row` (int64).

    Each table has at most `max_bytes` (None: one table for all), or one row. Decoded values may take many times their
    size in the file, where rows share them.

    Page checksums are verified if the file has them. Raises InputError if a file changed since planning or is damaged;
    with `on_corrupt` "skip", damaged rows are null and listed in the schema's metadata. known: the damage, if the
    window was cut before. Raises EnvironmentFailed if a file cannot be read.
    """
    schema = pa.schema([source.schema.field(name) for name in dict.fromkeys(columns)])
    stretch = _StretchReader(source, window, schema)
    for file, piece, read in _read_files(source, window, schema, known):
        sizes = np.zeros(piece.num_rows, np.int64) if max_bytes is None else read.row_bytes(piece.num_rows)
        ends, start = np.concatenate([[0], np.cumsum(sizes)]), 0
        while start < piece.num_rows:
            stop = piece.num_rows
            if max_bytes is not None:
                room = max_bytes - stretch.num_bytes
                stop = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1
            if stop <= start and stretch.num_rows:
                yield stretch.table()
                stretch = _StretchReader(source, window, schema)
                continue
            stop = max(stop, start + 1)
            stretch.add(file, piece, read, start, stop)
            stretch.num_bytes += int(ends[stop] - ends[start])
            start = stop
    yield stretch.table()


class _StretchReader:
    """Consecutive rows of a window, collected while reading."""

    def __init__(self, source: Source, window: InputWindow, schema: pa.Schema) -> None:
        self._source, self._window, self._schema = source, window, schema
        self._tables, self._files, self._rows = [], [], []
        self._damaged: list[tuple[int, int, str]] = []
        self._groups: list[DamagedGroup] = []
        self.num_rows = self.num_bytes = 0

    def add(self, file: SourceFile, piece: Slice, read: "_Read", start: int, stop: int) -> None:
        """Append rows start <= i < stop of a file's slice."""
        for first, last, reason in read.damaged:
            if max(first, start) < min(last, stop):
                moved = self.num_rows - start
                self._damaged.append((max(first, start) + moved, min(last, stop) + moved, reason))
        self._groups += read.groups
        count, name = stop - start, posixpath.join(self._source.root, file.relative)
        stored = None if read.table is None else _plain(read.table, start, stop, self._schema, name)
        arrays = [_column(f, file, stored, count, f.name in self._source.partitions) for f in self._schema]
        self._tables.append(pa.Table.from_arrays(arrays, schema=self._schema))
        self._files.append(pa.repeat(pa.scalar(file.relative, pa.string()), count))
        first = piece.first_row + start
        self._rows.append(pa.array(range(first, first + count), pa.int64()))
        self.num_rows += count

    def table(self) -> pa.Table:
        positions = [pa.chunked_array(self._files, pa.string()), pa.chunked_array(self._rows, pa.int64())]
        notes = {WINDOW_KEY: str(self._window.index).encode()}
        if self._damaged:
            notes[DAMAGED_KEY] = json.dumps(self._damaged).encode()
        if self._groups:
            notes[GROUPS_KEY] = json.dumps([asdict(group) for group in self._groups]).encode()
        fields = [*self._schema, ("source_file", pa.string()), ("source_row", pa.int64())]
        columns = [*pa.concat_tables(self._tables or [empty_table(self._schema)]).columns, *positions]
        return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=notes))


def _plain(table: pa.Table, start: int, stop: int, schema: pa.Schema, name: str) -> pa.Table:
    """Return rows start <= i < stop, cast to the types of `schema`. Raises InputError with the file `name` and the
    column whose values do not fit."""
    batches = table.slice(start, stop - start).to_batches()
    if stop - start < table.num_rows:  # `take` drops the list and dictionary values of other rows
        batches = [batch.take(pa.array(range(batch.num_rows))) for batch in batches]
    columns = []
    for i, f in enumerate(table.schema):
        kind = schema.field(f.name).type
        with decoding(name):
            try:
                columns.append(pa.chunked_array([plain_array(batch.column(i), kind) for batch in batches], kind))
            except pa.ArrowInvalid as e:
                raise InputError(
                    f"{name}: column {f.name!r}: its type {f.type} was merged to {kind} across files, which cannot "
                    f"hold all its values ({redacted(str(e))}); store it in one type in all files, or leave it out of "
                    "input.columns and the prompt"
                ) from e
    return pa.table(columns, names=table.schema.names)


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows of a slice (None if unreadable), its damaged rows as (start, stop, reason), and its damaged row group."""

    table: pa.Table | None
    damaged: list[tuple[int, int, str]]
    groups: tuple[DamagedGroup, ...] = ()

    def row_bytes(self, num_rows: int) -> np.ndarray:
        """Return the decoded size of each row's values."""
        sizes = np.zeros(num_rows, np.int64)
        for column in () if self.table is None else self.table.columns:
            sizes += np.concatenate([decoded_bytes(chunk) for chunk in column.chunks])
        return sizes


def _read_files(
    source: Source, window: InputWindow, schema: pa.Schema, known: KnownDamage | None
) -> Iterator[tuple[SourceFile, Slice, "_Read"]]:
    """Yield the window's slices in order with the stored columns of `schema`. Damaged rows occur only with skip.

    Reads several files of a store concurrently, since a window may consist of many small ones, each with a few
    requests.
    """
    fs, _ = filesystem(source.url, source.storage)
    stored = pa.schema([f for f in schema if f.name not in source.partitions])

    def read_file(stretch: tuple[int, int, int]) -> list[tuple[SourceFile, Slice, _Read]]:
        i, start, stop = stretch
        file = source.files[i]
        slices = list(file.slices(file.first_row + start, file.first_row + stop))
        damaged = {} if known is None else known.of_file(file.relative)
        intact = [piece for piece in slices if piece.group not in damaged]
        read_args = (fs, source.base, source.root, file, intact, stored)
        if source.requests is not None:
            found = read_lines(*read_args, source.requests.row)
        elif source.has_pages:
            found = read_pages(*read_args)
        else:
            found = format_of(file.relative).reader.read_slices(*read_args)
        reads: dict[int, _Read] = {}
        for piece, read in zip(intact, found, strict=True):
            if isinstance(read, DamagedFile):
                if known is not None:
                    raise InputError(f"{read}; {known.advice}") from read
                if source.on_corrupt == "fail":
                    advice = "repair the file, or set input.on_corrupt: skip to turn these rows into error rows"
                    raise InputError(f"{read}; {advice}") from read
                damaged[piece.group] = DamagedGroup(
                    file=file.relative,
                    row_group=piece.group,
                    first_row=piece.first_row,
                    rows=piece.num_rows,
                    reason=read.reason,
                )
            else:
                reads[piece.group] = _Read(read.table, read.damaged)
        return [(file, piece, reads.get(piece.group) or _unreadable(piece, damaged[piece.group])) for piece in slices]

    with ThreadPoolExecutor(max_workers=1 if is_local(fs) else FILES_AT_ONCE) as pool:
        yield from chain.from_iterable(pool.map(read_file, _stretches(_first_rows(source), window)))


def _unreadable(piece: Slice, damage: DamagedGroup) -> _Read:
    return _Read(None, [(0, piece.num_rows, f"row group {piece.group}: {damage.reason}")], (damage,))


def group_window(source: Source, window: InputWindow, group: DamagedGroup) -> InputWindow:
    """Return the part of a window that consists of a damaged row group."""
    index = next(i for i, file in enumerate(source.files) if file.relative == group.file)
    start = _first_rows(source)[index] + group.first_row - source.files[index].first_row
    return InputWindow(window.index, start, start + group.rows)


def window_checksums(source: Source, windows: Iterable[InputWindow]) -> dict[int, int]:
    """Return the checksum of each window's rows, by the window's index. Reads nothing."""
    first, found = _first_rows(source), {}
    for window in windows:
        checksum = 0
        for i, start, stop in _stretches(first, window):
            file = source.files[i]
            checksum += range_checksum(file.relative, file.first_row + start, file.first_row + stop)
        found[window.index] = checksum % MODULUS
    return found


def narrowed(source: Source, windows: Iterable[InputWindow]) -> Iterator[tuple[tuple[SourceFile, ...], InputWindow]]:
    """Yield for each window the files and row groups that contain it, and the window renumbered over these rows.

    `read_window` with these files returns the same table as with the whole source.
    """
    first = _first_rows(source)
    for window in windows:
        files, before = [], window.start
        for i, start, stop in _stretches(first, window):
            files.append(source.files[i].only(start, stop))
            if len(files) == 1:
                before = first[i] + files[0].first_row - source.files[i].first_row
        yield tuple(files), InputWindow(window.index, window.start - before, window.stop - before)


def _first_rows(source: Source) -> list[int]:
    """Return the dataset row at which each file starts, followed by the total number of rows."""
    return [0, *accumulate(f.num_rows for f in source.files)]


def _stretches(first: list[int], window: InputWindow) -> Iterator[tuple[int, int, int]]:
    """Yield (file index, start, stop) for each file of the window, numbered over the rows of the file that the source
    knows. first: from `_first_rows`."""
    for i in range(bisect_right(first, window.start) - 1, len(first) - 1):
        if first[i] >= window.stop:
            break
        start, stop = max(window.start, first[i]), min(window.stop, first[i + 1])
        if start < stop:
            yield i, start - first[i], stop - first[i]


def _column(
    field: pa.Field, file: SourceFile, table: pa.Table | None, count: int, from_folder: bool
) -> pa.Array | pa.ChunkedArray:
    if table is None:
        return pa.nulls(count, field.type)
    return partition_array(file.relative, field, count) if from_folder else table.column(field.name)
