"""The columns of a dataset: those that its files store, and those in the names of folders.

The files of the output's first run say which columns there are and of which type. Files that were appended later must
fit: the prompts and parts that are there were made of these types.
"""

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline.data.columns import UnifiedColumn, plain_type
from pipeline.data.dataset_files import DatasetFiles
from pipeline.data.files.partitions import partition_columns

_ADVICE = "leave it out of the new files, or choose a new output.path for all files"


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
