"""Formats of input files, and the selection of those files of a folder or glob that have the input's format.

Others are skipped and reported once: model hubs and Spark leave README.md, dataset_infos.json, .arrow files and empty
markers next to the data. The extension decides. A file without a known extension is Parquet if it begins like Parquet,
since Spark and Hive may omit extensions. A damaged .parquet is still an input.
"""

import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from pipeline.data.files import arrow_batches, csv_rows, json_lines, parquet_file
from pipeline.data.files.footer import DamagedFile, begins_like_parquet, reading
from pipeline.data.files.pdf_pages import ENDING as PDF
from pipeline.data.files.source_file import Slice, SliceRead, SourceFile
from pipeline.data.files.text_blocks import COMPRESSED, uncompressed
from pipeline.errors import InputError
from pipeline.stores.filesystem import secrets_in

_DATASETS_NOTES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # metadata of Hugging Face datasets
_DATASETS_STATE = "state.json"  # next to dataset_info.json
_AT_ONCE = 32  # files whose first bytes are read concurrently
_MAX_SHOWN = 6  # extensions in one message

Files = list[tuple[str, int]]


class FilePlanner(Protocol):
    """Module or object that reads the planning metadata of a format."""

    def plan(self, fs: Any, path: str, relative: str, size: int, name: str, keep_bad: bool) -> tuple[SourceFile, Any]:
        """Return the planning metadata and the columns of the file `path`, of `size` bytes. name: for messages.
        keep_bad: whether rows that are not valid are rows without values. The columns are a `pa.Schema`, except for
        JSON Lines, whose `JsonTypes` are merged over all files. Raises DamagedFile."""
        ...


class FileReader(FilePlanner, Protocol):
    """Module that reads a format."""

    def read_slices(
        self, fs: Any, root: str, shown: str, file: SourceFile, slices: list[Slice], schema: pa.Schema
    ) -> Iterator[SliceRead | DamagedFile]:
        """Yield the columns of `schema` for each slice of a file below `root`, or a DamagedFile if none of its rows can
        be read. shown: the root, for messages. Raises InputError if the file changed since planning."""
        ...


@dataclass(frozen=True)
class Format:
    """File format. endings: of its files' names. codecs: endings that may follow, of compressed files."""

    name: str
    reader: FileReader
    endings: tuple[str, ...]
    codecs: tuple[str, ...] = ()

    def has_name(self, name: str) -> bool:
        """Return whether a file name is of this format."""
        stem, ending = posixpath.splitext(name.lower())
        return (stem if ending in self.codecs else name.lower()).endswith(self.endings)


_HIVE_CODECS = (".snappy", ".gz", ".gzip", ".zst", ".zstd", ".lz4", ".br", ".bz2")  # in names only
PARQUET = Format("Parquet", parquet_file, (".parquet", ".parq", ".pq"), _HIVE_CODECS)
JSON_LINES = Format("JSON Lines", json_lines, (".jsonl", ".ndjson", ".json"), COMPRESSED)
CSV = Format("CSV", csv_rows, (".csv", ".tsv"), COMPRESSED)
ARROW = Format("Arrow", arrow_batches, (".arrow", ".feather", ".ipc"))
FORMATS = (PARQUET, JSON_LINES, CSV, ARROW)
NAMES = "Parquet, JSON Lines, CSV or Arrow"


def format_by_name(name: str) -> Format | None:
    """Return the format of a file's name, or None."""
    return next((known for known in FORMATS if known.has_name(name)), None)


def format_of(name: str) -> Format:
    """Return the format of an input file: by its name, or else Parquet."""
    return format_by_name(name) or PARQUET


def of_one_format(fs: Any, root: str, found: Files, name: str, shown: Sequence[str]) -> tuple[Files, Files]:
    """Split files below `root`, given as (relative path, size), into input files and files of other formats.

    name: the job file's key and path, and shown: the files' names, both for messages. JSON Lines next to Parquet count
    as input, and the job is then refused, since both hold rows. Next to either, files of other formats are skipped, as
    is a .json next to Parquet: these are often metadata or copies. Reads the first bytes of files without a known
    extension. Raises InputError if no file has a supported format.
    """
    kinds = [format_by_name(relative) for relative, _ in found]
    unknown = [i for i, kind in enumerate(kinds) if kind is None and found[i][1] > 0]

    def looks_like_parquet(i: int) -> bool:
        with reading(shown[i], secrets_in(fs)):
            return begins_like_parquet(fs, posixpath.join(root, found[i][0]), found[i][1])

    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        for i, is_parquet in zip(unknown, pool.map(looks_like_parquet, unknown)):
            kinds[i] = PARQUET if is_parquet else None
    notes = _datasets_notes([relative for relative, _ in found])
    data = [(file, kind) for (file, _), kind in zip(found, kinds) if kind is not None and file not in notes]
    if not data and len(notes) < len(found):
        raise InputError(
            f"{name}: contains no {NAMES}; found {_counted([r for r, _ in found])}; expected "
            f"{', '.join(ending for known in FORMATS for ending in known.endings)}; text files also with .gz or .zst"
            + "; for the pages of PDFs set input.format: pdf"
            * any(file.lower().endswith(PDF) for file, _ in found)
        )
    sure = {kind for file, kind in data if kind is PARQUET or (kind is JSON_LINES and not _is_json(file))}
    wanted = sure or {kind for _, kind in data} or {JSON_LINES}  # notes alone
    chosen, others = [], []
    for file, kind in zip(found, kinds):
        is_note = (bool(data) and file[0] in notes) or (PARQUET in wanted and _is_json(file[0]))
        (chosen if kind in wanted and not is_note else others).append(file)
    return chosen, others


def _is_json(relative: str) -> bool:
    return uncompressed(relative).endswith(".json")


def _datasets_notes(relatives: list[str]) -> set[str]:
    """Return the files among `relatives` that Hugging Face datasets keeps next to its data: metadata, and results of
    `map` and `filter` that it caches."""
    notes = {relative for relative in relatives if posixpath.basename(relative) in _DATASETS_NOTES}
    folders = {posixpath.dirname(relative) for relative in notes}
    return notes | {
        relative
        for folder, name, relative in ((*posixpath.split(relative), relative) for relative in relatives)
        if folder in folders and (name == _DATASETS_STATE or (name.startswith("cache-") and name.endswith(".arrow")))
    }


def _counted(relatives: list[str]) -> str:
    """Return a text with the number of files of each extension and an example."""
    endings = Counter(posixpath.splitext(relative)[1].lower() for relative in relatives)
    parts = []
    for ending, count in endings.most_common(_MAX_SHOWN):
        first = next(relative for relative in relatives if posixpath.splitext(relative)[1].lower() == ending)
        parts.append(f"{count:,} {ending or 'without an extension'} ({first}{', ...' if count > 1 else ''})")
    return ", ".join(parts) + (", ..." if len(endings) > _MAX_SHOWN else "")
