"""Refusal of tables whose log names the current files: Delta Lake, Iceberg, Hudi and the output of Spark's streams.

Files with deleted, replaced and uncommitted rows stay next to the current ones, so reading every file of the folder
would return these rows too. Even the list of current files is not enough where a table marks deleted rows in others.
"""

import glob
import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError
from pipeline.stores.redaction import shown_url
from pipeline.stores.store_errors import Failure, failure_of

_MAX_STORE_FOLDERS = 16  # of a glob that are searched for logs, at a few requests each
_METADATA = "metadata/*.metadata.json"
_SPARK = "with Spark, write the current rows to a folder of Parquet files, and read that one"


@dataclass(frozen=True)
class _Format:
    name: str
    export: str  # how to write the current rows as plain Parquet; {} is the table's folder


_FORMATS: Mapping[str, _Format] = {
    "_delta_log": _Format(
        "a Delta Lake table",
        'write its current rows to a folder, and read that one: python -c "import deltalake, pyarrow.dataset as d; '
        "d.write_dataset(deltalake.DeltaTable('{}').to_pyarrow_dataset(), 'rows', format='parquet')\"",
    ),
    _METADATA: _Format(
        "an Iceberg table",
        'write its current rows to a folder, and read that one: python -c "from pyiceberg.table import StaticTable as '
        "T; import pyarrow.dataset as d; d.write_dataset(T.from_metadata('{}/metadata/NEWEST.metadata.json').scan()"
        ".to_arrow_batch_reader(), 'rows', format='parquet')\"",
    ),
    ".hoodie": _Format("a Hudi table", _SPARK),
    "_spark_metadata": _Format("the output of a Spark stream", _SPARK),
}
_LISTED = re.compile(r"(?:(.*)/)?(?:(_delta_log|\.hoodie|_spark_metadata)/.*|metadata/[^/]+\.metadata\.json)")


def refuse_tables(
    fs: Any, root: str, found: Iterable[str], listed: Iterable[str] | None, local: bool, name: str
) -> None:
    """Raise InputError if files to read are those of a table.

    found: paths of the files, relative to `root`. listed: every path below `root` in a store, if they were all listed,
    so that only folders above `root` cost requests. name: of the input, for messages.
    """
    found = [file for file in found if _LISTED.fullmatch(file) is None]
    matches = map(_LISTED.fullmatch, listed or ())
    for below, log in {(match[1] or "", match[2] or _METADATA) for match in matches if match}:
        if any(file.startswith(below and f"{below}/") for file in found):
            raise _refusal(fs, posixpath.join(root, below).rstrip("/"), log, local, name)
    inside = () if listed is not None else (posixpath.join(root, posixpath.dirname(file)) for file in found)
    folders = sorted(_possible_tables(root, inside, listed is not None), key=len)
    pairs = [(folder, log) for folder in (folders if local else folders[:_MAX_STORE_FOLDERS]) for log in _FORMATS]
    with ThreadPoolExecutor(_MAX_STORE_FOLDERS) as pool:
        exists = map if local else pool.map
        for (folder, log), has_log in zip(pairs, exists(lambda pair: _has_log(fs, pair[0], pair[1], local), pairs)):
            if has_log:
                raise _refusal(fs, folder, log, local, name)


def _possible_tables(root: str, inside: Iterable[str], is_listed: bool) -> set[str]:
    """Return the folders that may be a table's: those between the files and `root`, and those above it if `root` is a
    partition, or the folder in which Iceberg keeps data files. The folder of a partition is no table."""
    folders = set() if is_listed else {root}
    for folder in set(inside):
        while len(folder) > len(root) and folder not in folders:
            folders.add(folder)
            folder = posixpath.dirname(folder)
    top = root
    while "=" in posixpath.basename(top) or posixpath.basename(top) == "data":
        top = posixpath.dirname(top)
        folders.add(top)
    return {folder for folder in folders if "=" not in posixpath.basename(folder)}


def _has_log(fs: Any, folder: str, log: str, local: bool) -> bool:
    """Return whether a folder has this log; False if the user may not see it."""
    path = posixpath.join(glob.escape(folder), log) if log == _METADATA else posixpath.join(folder, log)
    if local:
        return bool(glob.glob(path)) if log == _METADATA else os.path.lexists(path)
    try:
        return bool(fs.glob(path)) if log == _METADATA else fs.exists(path)
    except Exception as error:
        if failure_of(error) in (Failure.ABSENT, Failure.DENIED):
            return False
        raise


def _refusal(fs: Any, folder: str, log: str, local: bool, name: str) -> InputError:
    shown = folder if local else shown_url(fs.unstrip_protocol(folder))
    return InputError(
        f"{name}: {shown} is {_FORMATS[log].name} (it has {log}), whose files also hold rows that are not current, "
        f"such as deleted ones; {_FORMATS[log].export.replace('{}', shown)}"
    )
