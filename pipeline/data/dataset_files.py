"""All files of an input together: their format, what planning finds in each, and the columns of the dataset.

Columns are stored in files or in the names of folders. The files of the output's first run say which columns there are
and of which type. Files that were appended later must fit: the existing prompts and parts were made of these types.
"""

import hashlib
import posixpath
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
from pipeline.data.files import json_lines
from pipeline.data.files.footer import DamagedFile, read_footer
from pipeline.data.files.json_types import MAX_KEYS, JsonTypes
from pipeline.data.files.partitions import partition_columns
from pipeline.data.files.source_file import SourceFile
from pipeline.data.requests.input_checks import FileNotes, Requests, requests_of
from pipeline.data.requests.request_row import FORMAT, request_schema
from pipeline.errors import InputError

_FOOTERS_AT_ONCE = 16
_ADVICE = "leave it out of the new files, or choose a new output.path for all files"


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A damaged file, left out because `input.on_corrupt` is skip."""

    relative: str
    size: int
    reason: str


class DatasetFiles(Protocol):
    def look(self, index: int, relative: str, size: int) -> SourceFile:
        """What planning needs of a file. Raises DamagedFile."""
        ...

    def columns(self, indices: Iterable[int]) -> MergedSchemas:
        """As `merge_schemas`, of these files that were looked at, in their order."""
        ...

    def requests(self) -> Requests | None:
        """What the files that were looked at are together, where they hold requests. Raises InputError where lines
        contradict each other."""
        ...


def files_of(fs: Any, root: str, names: list[str], keep_bad: bool, of_requests: bool = False) -> DatasetFiles:
    """What looks at the files, called `names` in messages, that lie below `root`. With `keep_bad` lines that are no
    rows are rows without values. `of_requests`: whether their lines are requests. Raises InputError where files are of
    two formats."""
    lines = [name for name in names if json_lines.is_json_lines(name)]
    if lines and len(lines) < len(names):
        other = next(name for name in names if not json_lines.is_json_lines(name))
        raise InputError(
            f"{lines[0]} is JSON Lines by its name, {other} is not; a job reads one format: name the files of one, "
            "as in input.path: data/*.jsonl"
        )
    if not of_requests:
        return _Lines(fs, root, names, keep_bad) if lines else _Footers(fs, root, names)
    if not lines:
        raise InputError(
            f"{names[0]}: input.format: {FORMAT} is of JSON Lines, and this is none by its name; expected .jsonl, "
            "also with .gz or .zst"
        )
    return _RequestLines(fs, root, names, keep_bad)


class _Footers:
    """Looks at Parquet files. Of their schemas the distinct ones are kept, few however many files there are."""

    def __init__(self, fs: Any, root: str, names: list[str]) -> None:
        self._fs, self._root, self._names = fs, root, names
        self._lock = threading.Lock()
        self._number: dict[bytes, int] = {}  # of each distinct schema, by a digest of what is stored
        self._kept: list[pa.Schema] = []
        self._schema_of: dict[int, int] = {}  # file -> number
        self._files: dict[int, tuple[str, int]] = {}  # path and size

    def look(self, index: int, relative: str, size: int) -> SourceFile:
        name, path = self._names[index], posixpath.join(self._root, relative)
        self._files[index] = path, size
        got = read_footer(self._fs, path, size, name)
        key = hashlib.sha256(got.schema.remove_metadata().serialize()).digest()
        with self._lock:
            if key not in self._number:
                try:
                    self._kept.append(kept_schema(got.schema))
                except UnicodeDecodeError as e:
                    raise DamagedFile(name, "the Parquet footer is damaged: a column's name is not UTF-8") from e
                self._number[key] = len(self._kept) - 1
            self._schema_of[index] = self._number[key]
        return SourceFile.of(relative, size, got)

    def columns(self, indices: Iterable[int]) -> MergedSchemas:
        first: dict[int, int] = {}  # file by schema
        files = sorted(indices)
        for index in files:
            first.setdefault(self._schema_of[index], index)
        merged = merge_schemas([(self._names[i], self._kept[number]) for number, i in first.items()])
        lost = {name: why for name, column in merged.unified.items() if (why := self._lost_times(name, column, files))}
        schema = pa.schema([f for f in merged.schema if f.name not in lost])
        return replace(merged, schema=schema, conflicts={**merged.conflicts, **lost})

    def _lost_times(self, name: str, column: UnifiedColumn, files: list[int]) -> str | None:
        """The first file with times that the unit of `column` cannot hold, by its statistics."""
        factors: dict[int, dict[int, int]] = {}  # of each schema by leaf
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
            f"{self._names[bad]} has it as {own}, with times that {column.type} cannot hold, which files such as "
            f"{other} need; store it in one unit in all files, or leave it out of input.columns and the prompt"
        )

    def _fits(self, index: int, factors: dict[int, int]) -> bool:
        """Whether the numbers of these leaves of a file stay 64-bit integers when they are multiplied. Without
        statistics that is seen when they are read."""
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

    def requests(self) -> None:
        return None


class _Lines:
    """Looks at JSON Lines. A key that a line, or a whole file, does not have is null there."""

    def __init__(self, fs: Any, root: str, names: list[str], keep_bad: bool) -> None:
        self._fs, self._root, self._names, self._keep_bad = fs, root, names, keep_bad
        self._types: dict[int, JsonTypes] = {}

    def look(self, index: int, relative: str, size: int) -> SourceFile:
        path, name, types = posixpath.join(self._root, relative), self._names[index], JsonTypes()

        def add(number: int, row: dict[str, Any]) -> None:
            types.add(row)
            if len(types) > MAX_KEYS:
                raise DamagedFile(name, f"more than {MAX_KEYS:,} different keys by line {number}; are keys data here?")

        file = json_lines.scan(self._fs, path, relative, size, name, self._keep_bad, add)
        self._types[index] = types
        return file

    def columns(self, indices: Iterable[int]) -> MergedSchemas:
        types = JsonTypes()
        for index in sorted(indices):
            types.add_all(self._types[index])
        return MergedSchemas(types.schema())

    def requests(self) -> None:
        return None


class _RequestLines:
    """Looks at JSON Lines whose lines are requests. Their columns are the API's, whatever the lines hold."""

    def __init__(self, fs: Any, root: str, names: list[str], keep_bad: bool) -> None:
        self._fs, self._root, self._names, self._keep_bad = fs, root, names, keep_bad
        self._notes: dict[int, FileNotes] = {}
        self._files: dict[int, tuple[str, int]] = {}  # relative path and size
        self._found: Requests | None = None

    def look(self, index: int, relative: str, size: int) -> SourceFile:
        notes = FileNotes(self._names[index])

        def add(number: int, line: dict[str, Any]) -> None:
            notes.add(line, number)

        path = posixpath.join(self._root, relative)
        file = json_lines.scan(self._fs, path, relative, size, notes.name, self._keep_bad, add)
        self._notes[index], self._files[index] = notes, (relative, size)
        return file

    def requests(self) -> Requests:
        if self._found is None:
            order = sorted(self._notes)

            def lines_of(at: int) -> Iterator[tuple[int, dict[str, Any]]]:
                relative, size = self._files[order[at]]
                path = posixpath.join(self._root, relative)
                return json_lines.whole_lines(self._fs, path, relative, size, self._names[order[at]])

            self._found = requests_of([self._notes[i] for i in order], lines_of)
            self._notes.clear()
        return self._found

    def columns(self, indices: Iterable[int]) -> MergedSchemas:
        return MergedSchemas(request_schema(self.requests().endpoint))


@dataclass(frozen=True)
class DatasetColumns:
    """`kept`: all columns that all files agree on, with the types that they have in the output, those of folder names
    last. `missing`: the first file without a column. `conflicts`: which file, and why. `unified`: those of `kept` that
    files store in different types."""

    kept: pa.Schema
    missing: Mapping[str, str]
    conflicts: Mapping[str, str]
    partitions: frozenset[str]
    unified: Mapping[str, UnifiedColumn]


def dataset_columns(dataset: DatasetFiles, batches: Sequence[Mapping[int, str]], shown: str) -> DatasetColumns:
    """The columns of files in batches, given as path by index in `dataset`. `shown`: the root, as messages name it.

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
            conflicts[name] = _why_not(dataset, name, columns, first, later, shown)
    kept = pa.schema([f for f in columns.kept if f.name not in conflicts])
    return DatasetColumns(kept, every.missing, conflicts, columns.partitions, _those(every.unified, kept))


def _of_files(dataset: DatasetFiles, files: Mapping[int, str], shown: str) -> DatasetColumns:
    merged = dataset.columns(files)
    schema, missing, conflicts = merged.schema, dict(merged.missing), dict(merged.conflicts)
    partitions, outside = partition_columns(files[index] for index in sorted(files))
    for column in [f for f in partitions if f.name in (*schema.names, *conflicts)]:
        partitions.remove(column)
        if column.name in missing:
            conflicts[column.name] = (
                f"some files hold it, {missing[column.name]} does not, and folders are named {column.name}=...; "
                "which is meant cannot be told"
            )
            schema = schema.remove(schema.get_field_index(column.name))
    missing |= {f.name: posixpath.join(shown, outside[f.name]) for f in partitions if f.name in outside}
    kept = pa.schema([*schema, *partitions])
    names = frozenset(f.name for f in partitions)
    return DatasetColumns(kept, missing, conflicts, names, _those(merged.unified, schema))


def _those(unified: Mapping[str, UnifiedColumn], schema: pa.Schema) -> dict[str, UnifiedColumn]:
    return {name: column for name, column in unified.items() if name in schema.names}


def _fits(name: str, first: DatasetColumns, every: DatasetColumns) -> bool:
    """Whether the column stays what it was with more files. How its values are stored may differ."""
    if name not in first.kept.names or name not in every.kept.names:
        return False
    one, all_ = (columns.kept.field(name).type for columns in (first, every))
    return plain_type(one).equals(plain_type(all_)) and (name in first.partitions) == (name in every.partitions)


def _why_not(
    dataset: DatasetFiles,
    name: str,
    columns: DatasetColumns,
    first: Mapping[int, str],
    later: Mapping[int, str],
    shown: str,
) -> str:
    """Of a column that some appended file changes: the first such file, and how."""
    for index, relative in sorted(later.items()):
        own = _of_files(dataset, {index: relative}, shown)
        if name not in (*own.kept.names, *own.conflicts):
            continue
        if not _fits(name, columns, _of_files(dataset, {**first, index: relative}, shown)):
            file = posixpath.join(shown, relative)
            if name not in columns.kept.names:
                return f"the appended file {file} has it, the files that the output was begun with do not; {_ADVICE}"
            kind = own.kept.field(name).type if name in own.kept.names else "two columns of this name"
            return (
                f"the appended file {file} has it as {kind}, the files that the output was begun with as "
                f"{columns.kept.field(name).type}; store it so in the new files, or choose a new output.path for all"
            )
    return f"the appended files give it another type together; {_ADVICE}"
