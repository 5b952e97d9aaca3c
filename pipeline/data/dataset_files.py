"""All files of an input together: their format, what planning finds in each, and the columns of all of them."""

import hashlib
import posixpath
import threading
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.data import json_lines
from pipeline.data.columns import kept_schema, merge_schemas
from pipeline.data.footer import DamagedFile, read_footer
from pipeline.data.json_types import JsonTypes
from pipeline.data.source_file import SourceFile
from pipeline.errors import InputError


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A damaged file, left out because `input.on_corrupt` is skip."""

    relative: str
    size: int
    reason: str


def files_of(fs: Any, root: str, names: list[str], keep_bad: bool) -> "_Footers | _Lines":
    """What looks at the files, called `names` in messages, that lie below `root`. With `keep_bad` lines that are no
    rows are rows without values. Raises InputError where files are of two formats."""
    lines = [name for name in names if json_lines.is_json_lines(name)]
    if lines and len(lines) < len(names):
        other = next(name for name in names if not json_lines.is_json_lines(name))
        raise InputError(
            f"{lines[0]} is JSON Lines by its name, {other} is not; a job reads one format: name the files of one, "
            "as in input.path: data/*.jsonl"
        )
    return _Lines(fs, root, names, keep_bad) if lines else _Footers(fs, root, names)


class _Footers:
    """Looks at Parquet files. Of their schemas the distinct ones are kept, few however many files there are, each with
    the first file that has it."""

    def __init__(self, fs: Any, root: str, names: list[str]) -> None:
        self._fs, self._root, self._names = fs, root, names
        self._lock = threading.Lock()
        self._kept: dict[bytes, pa.Schema] = {}  # by a digest of what is stored
        self._first: dict[bytes, int] = {}

    def look(self, index: int, relative: str, size: int) -> SourceFile:
        name = self._names[index]
        got = read_footer(self._fs, posixpath.join(self._root, relative), size, name)
        key = hashlib.sha256(got.schema.remove_metadata().serialize()).digest()
        with self._lock:
            if key not in self._kept:
                try:
                    self._kept[key] = kept_schema(got.schema)
                except UnicodeDecodeError as e:
                    raise DamagedFile(name, "the Parquet footer is damaged: a column's name is not UTF-8") from e
            self._first[key] = min(index, self._first.get(key, index))
        return SourceFile.of(relative, size, got)

    def columns(self) -> tuple[pa.Schema, dict[str, str], dict[str, str]]:
        """As `merge_schemas`, in the files' order, whatever the order in which they were read."""
        in_order = sorted(self._first.items(), key=lambda item: item[1])
        return merge_schemas([(self._names[i], self._kept[key]) for key, i in in_order])


class _Lines:
    """Looks at JSON Lines. A key that a line, or a whole file, does not have is null there."""

    def __init__(self, fs: Any, root: str, names: list[str], keep_bad: bool) -> None:
        self._fs, self._root, self._names, self._keep_bad = fs, root, names, keep_bad
        self._types: dict[int, JsonTypes] = {}

    def look(self, index: int, relative: str, size: int) -> SourceFile:
        path, name = posixpath.join(self._root, relative), self._names[index]
        file, self._types[index] = json_lines.scan(self._fs, path, relative, size, name, self._keep_bad)
        return file

    def columns(self) -> tuple[pa.Schema, dict[str, str], dict[str, str]]:
        types = JsonTypes()
        for _, of_file in sorted(self._types.items()):
            types.add_all(of_file)
        return types.schema(), {}, {}
