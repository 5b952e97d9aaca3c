"""All files of an input: their format, their planning metadata, and the columns of the dataset.

Columns are stored in files or in folder names. The files of the output's first run define the columns and their types.
Files that are appended later must match, because existing prompts and parts were made from these types.
"""

import hashlib
import posixpath
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import pyarrow as pa

from pipeline.data.columns import (
    MergedSchemas,
    UnifiedColumn,
    kept_schema,
    leaves,
    merge_schemas,
    plain_type,
    times_made_finer,
)
from pipeline.data.files.footer import DamagedFile, read_footer
from pipeline.data.files.formats import JSON_LINES, PARQUET, FilePlanner, format_of
from pipeline.data.files.json_lines import JsonLines
from pipeline.data.files.json_types import JsonTypes
from pipeline.data.files.partitions import partition_columns
from pipeline.data.files.pdf_pages import PdfReader
from pipeline.data.files.scan_cache import scanned
from pipeline.data.files.source_file import SourceFile
from pipeline.data.files.text_blocks import scan, whole_rows
from pipeline.data.requests.input_checks import FileNotes, Requests, requests_of
from pipeline.data.requests.request_row import FORMAT, request_schema
from pipeline.errors import InputError

_FOOTERS_AT_ONCE = 16
_ADVICE = "leave it out of the new files, or choose a new output.path for all files"


InputFormat = Literal["rows", "openai", "pdf"]  # rows of data, requests of a batch API, pages


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """Damaged file, skipped because of `input.on_corrupt: skip`."""

    relative: str
    size: int
    reason: str


class DatasetFiles(Protocol):
    def look(self, index: int, relative: str, size: int) -> SourceFile:
        """Return the planning metadata of a file. Raises DamagedFile."""
        ...

    def columns(self, indices: Iterable[int]) -> MergedSchemas:
        """Merge the schemas of these files, in order; `look` must have run for each."""
        ...

    def requests(self) -> Requests | None:
        """Return the common properties of all requests, or None if lines are not requests. Raises InputError if lines
        contradict each other."""
        ...


def files_of(fs: Any, root: str, names: list[str], keep_bad: bool, kind: InputFormat = "rows") -> DatasetFiles:
    """Return the reader of the planning metadata of files below `root`, with `names` for messages.

    keep_bad: treat rows of text that are not valid as rows without values. Raises InputError if the files have two
    formats.
    """
    if kind == "pdf":
        return _Schemas(fs, root, names, keep_bad, PdfReader())
    first = {format_of(name): name for name in reversed(names)}  # format -> its first file
    own = next((each for each in first if each is not PARQUET), PARQUET)
    if other := next((name for each, name in first.items() if each is not own), None):
        raise InputError(
            f"{first[own]} is {own.name} by its name, but {other} is not; a job reads one format: select it with a "
            f"pattern such as input.path: data/*{own.endings[0]}"
        )
    if kind == "openai" and own is not JSON_LINES:
        raise InputError(
            f"{names[0]}: input.format: {FORMAT} requires JSON Lines, which this is not by its name; expected .jsonl, "
            ".jsonl.gz or .jsonl.zst"
        )
    if kind == "openai":
        return _RequestLines(fs, root, names, keep_bad)
    files = {PARQUET: _Footers, JSON_LINES: _Lines}.get(own, _Schemas)
    return files(fs, root, names, keep_bad, own.reader)


class _Schemas:
    """Planning metadata of files with a schema each. Only the distinct schemas are kept, which are few."""

    def __init__(self, fs: Any, root: str, names: list[str], keep_bad: bool, reader: FilePlanner) -> None:
        self._fs, self._root, self._names, self._keep_bad, self._reader = fs, root, names, keep_bad, reader
        self._lock = threading.Lock()
        self._number: dict[bytes, int] = {}  # number of each distinct schema, by its digest
        self._kept: list[pa.Schema] = []
        self._schema_of: dict[int, int] = {}  # file -> schema number

    def look(self, index: int, relative: str, size: int) -> SourceFile:
        name, path = self._names[index], posixpath.join(self._root, relative)
        try:
            file, schema = self._reader.plan(self._fs, path, relative, size, name, self._keep_bad)
            key = hashlib.sha256(schema.remove_metadata().serialize()).digest()
            with self._lock:
                if key not in self._number:
                    self._kept.append(kept_schema(schema))
                    self._number[key] = len(self._kept) - 1
                self._schema_of[index] = self._number[key]
        except UnicodeDecodeError as e:
            raise DamagedFile(name, "damaged: the name of a column is not UTF-8") from e
        return replace(file, relative=relative)

    def columns(self, indices: Iterable[int]) -> MergedSchemas:
        """Merge the schemas of these files, in order."""
        first: dict[int, int] = {}  # schema number -> first file
        for index in sorted(indices):
            first.setdefault(self._schema_of[index], index)
        return merge_schemas([(self._names[i], self._kept[number]) for number, i in first.items()])

    def requests(self) -> None:
        return None


class _Footers(_Schemas):
    """Planning metadata of Parquet files. Statistics of their footers show whether times fit a finer unit."""

    def __init__(self, fs: Any, root: str, names: list[str], keep_bad: bool, reader: FilePlanner) -> None:
        super().__init__(fs, root, names, keep_bad, reader)
        self._files: dict[int, tuple[str, int]] = {}  # file -> (path, size)

    def look(self, index: int, relative: str, size: int) -> SourceFile:
        self._files[index] = posixpath.join(self._root, relative), size
        return super().look(index, relative, size)

    def columns(self, indices: Iterable[int]) -> MergedSchemas:
        files = sorted(indices)
        merged = super().columns(files)
        lost = {
            name: conflict
            for name, column in merged.unified.items()
            if (conflict := self._lost_times(name, column, files))
        }
        schema = pa.schema([f for f in merged.schema if f.name not in lost])
        return replace(merged, schema=schema, conflicts={**merged.conflicts, **lost})

    def _lost_times(self, name: str, column: UnifiedColumn, files: list[int]) -> str | None:
        """Return the conflict of the first file whose statistics show times that the unit of `column` cannot hold."""
        factors: dict[int, dict[int, int]] = {}  # schema number -> leaf -> factor
        for number in {self._schema_of[i] for i in files}:
            own = self._kept[number]
            if name in own.names:
                at = own.names.index(name)
                before = sum(len(leaves(f.type)) for f in list(own)[:at])
                pairs = enumerate(leaves(own.field(at).type, column.type), before)
                factors[number] = {leaf: f for leaf, (a, b) in pairs if b is not None and (f := times_made_finer(a, b))}
        to_check = [i for i in files if factors.get(self._schema_of[i])]
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            fits = pool.map(lambda i: self._fits(i, factors[self._schema_of[i]]), to_check)
            bad = next((i for i, is_fine in zip(to_check, fits, strict=True) if not is_fine), None)
        if bad is None:
            return None
        own = self._kept[self._schema_of[bad]].field(name).type
        other = next(file for kind, file in column.stored.items() if kind != str(own))
        return (
            f"it is {own} in {self._names[bad]}, with times that overflow {column.type}, the unit of files such as "
            f"{other}; store it in one unit in all files, or leave it out of input.columns and the prompt"
        )

    def _fits(self, index: int, factors: dict[int, int]) -> bool:
        """Return whether the values of these leaves fit 64-bit integers after multiplication, by the file's statistics.
        Without statistics, an overflow is found on reading."""
        path, size = self._files[index]
        metadata = read_footer(self._fs, path, size, self._names[index]).metadata
        for group in range(metadata.num_row_groups):
            for leaf, factor in factors.items():
                found = metadata.row_group(group).column(leaf).statistics
                if found is not None and found.has_min_max:
                    ends = found.min_raw, found.max_raw
                    if max(abs(end) for end in ends) * factor >= 2**63:
                        return False
        return True


class _Lines:
    """Planning metadata of JSON Lines. A key that is missing in a line or a file is null there."""

    def __init__(self, fs: Any, root: str, names: list[str], keep_bad: bool, reader: FilePlanner) -> None:
        self._fs, self._root, self._names, self._keep_bad, self._reader = fs, root, names, keep_bad, reader
        self._types: dict[int, JsonTypes] = {}

    def look(self, index: int, relative: str, size: int) -> SourceFile:
        path, name = posixpath.join(self._root, relative), self._names[index]
        file, self._types[index] = self._reader.plan(self._fs, path, relative, size, name, self._keep_bad)
        return replace(file, relative=relative)

    def columns(self, indices: Iterable[int]) -> MergedSchemas:
        types = JsonTypes()
        for index in sorted(indices):
            types.add_all(self._types[index])
        return MergedSchemas(types.schema())

    def requests(self) -> None:
        return None


class _RequestLines:
    """Planning metadata of JSON Lines whose lines are requests. The columns are always those of the API."""

    def __init__(self, fs: Any, root: str, names: list[str], keep_bad: bool) -> None:
        self._fs, self._root, self._names, self._keep_bad = fs, root, names, keep_bad
        self._notes: dict[int, FileNotes] = {}
        self._files: dict[int, tuple[str, int]] = {}  # file -> (relative path, size)
        self._found: Requests | None = None

    def look(self, index: int, relative: str, size: int) -> SourceFile:
        path, name = posixpath.join(self._root, relative), self._names[index]

        def scan_notes() -> tuple[SourceFile, FileNotes]:
            notes = FileNotes(name)

            def add(number: int, line: dict[str, Any]) -> None:
                notes.add(line, number)

            return scan(JsonLines(), self._fs, path, relative, size, name, self._keep_bad, add), notes

        file, notes = scanned(self._fs, path, size, ("requests", self._keep_bad), scan_notes)
        self._notes[index], self._files[index] = replace(notes, name=name), (relative, size)
        return replace(file, relative=relative)

    def requests(self) -> Requests:
        if self._found is None:
            order = sorted(self._notes)

            def lines_of(at: int) -> Iterator[tuple[int, dict[str, Any]]]:
                relative, size = self._files[order[at]]
                path = posixpath.join(self._root, relative)
                return whole_rows(JsonLines(), self._fs, path, relative, size, self._names[order[at]])

            self._found = requests_of([self._notes[i] for i in order], lines_of)
            self._notes.clear()
        return self._found

    def columns(self, indices: Iterable[int]) -> MergedSchemas:
        return MergedSchemas(request_schema(self.requests().endpoint))


@dataclass(frozen=True)
class DatasetColumns:
    """Columns of a dataset.

    kept: the columns that all files agree on, with their output types; columns of folder names come last. missing:
    column -> first file without it. conflicts: column -> file and reason. unified: columns of `kept` that files store
    in different types.
    """

    kept: pa.Schema
    missing: Mapping[str, str]
    conflicts: Mapping[str, str]
    partitions: frozenset[str]
    unified: Mapping[str, UnifiedColumn]


def dataset_columns(dataset: DatasetFiles, batches: Sequence[Mapping[int, str]], shown: str) -> DatasetColumns:
    """Return the columns of batches of files, each given as index in `dataset` -> path. shown: the root, for messages.

    A column that an appended file would change is in `conflicts`.
    """
    first, *appended = [files for files in batches if files]
    columns = _of_files(dataset, first, shown)
    if not appended:
        return columns
    later = {index: relative for files in appended for index, relative in files.items()}
    every = _of_files(dataset, {**first, **later}, shown)
    conflicts = dict(columns.conflicts)
    for name in (*every.kept.names, *every.conflicts):
        if name not in conflicts and not _fits(name, columns, every):
            conflicts[name] = _appended_conflict(dataset, name, columns, first, later, shown)
    kept = pa.schema([f for f in columns.kept if f.name not in conflicts])
    return DatasetColumns(kept, every.missing, conflicts, columns.partitions, _restricted_to(every.unified, kept))


def _of_files(dataset: DatasetFiles, files: Mapping[int, str], shown: str) -> DatasetColumns:
    merged = dataset.columns(files)
    schema, missing, conflicts = merged.schema, dict(merged.missing), dict(merged.conflicts)
    partitions, outside = partition_columns(files[index] for index in sorted(files))
    for column in [f for f in partitions if f.name in (*schema.names, *conflicts)]:
        partitions.remove(column)
        if column.name in missing:
            conflicts[column.name] = (
                f"ambiguous: some files store it, {missing[column.name]} does not, and folders are named "
                f"{column.name}=...; rename the column in the files or the folders"
            )
            schema = schema.remove(schema.get_field_index(column.name))
    missing |= {f.name: posixpath.join(shown, outside[f.name]) for f in partitions if f.name in outside}
    kept = pa.schema([*schema, *partitions])
    names = frozenset(f.name for f in partitions)
    return DatasetColumns(kept, missing, conflicts, names, _restricted_to(merged.unified, schema))


def _restricted_to(unified: Mapping[str, UnifiedColumn], schema: pa.Schema) -> dict[str, UnifiedColumn]:
    return {name: column for name, column in unified.items() if name in schema.names}


def _fits(name: str, first: DatasetColumns, every: DatasetColumns) -> bool:
    """Return whether the column keeps its plain type with more files. The storage of its values may differ."""
    if name not in first.kept.names or name not in every.kept.names:
        return False
    one, all_ = (columns.kept.field(name).type for columns in (first, every))
    return plain_type(one).equals(plain_type(all_)) and (name in first.partitions) == (name in every.partitions)


def _appended_conflict(
    dataset: DatasetFiles,
    name: str,
    columns: DatasetColumns,
    first: Mapping[int, str],
    later: Mapping[int, str],
    shown: str,
) -> str:
    """Return the conflict of a column: the first appended file that changes it, and the difference."""
    for index, relative in sorted(later.items()):
        own = _of_files(dataset, {index: relative}, shown)
        if name not in (*own.kept.names, *own.conflicts):
            continue
        if not _fits(name, columns, _of_files(dataset, {**first, index: relative}, shown)):
            file = posixpath.join(shown, relative)
            if name not in columns.kept.names:
                return f"it is in the appended file {file}, but not in the files of the output's first run; {_ADVICE}"
            kind = own.kept.field(name).type if name in own.kept.names else "two columns of this name"
            return (
                f"it is {kind} in the appended file {file}, but {columns.kept.field(name).type} in the files of the "
                "output's first run; store it as that in the new files, or choose a new output.path for all"
            )
    return f"the appended files together change its type; {_ADVICE}"
