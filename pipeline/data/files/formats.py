"""Selection of the files of a folder or glob that have the input's format. Others are skipped and reported once.

Model hubs and Spark leave other files next to the data: README.md, dataset_infos.json, .arrow files, empty markers. The
extension decides. A file without a known extension is Parquet if it begins like Parquet, since Spark and Hive may omit
extensions. No file with rows is skipped: a damaged .parquet is still an input.
"""

import posixpath
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from pipeline.data.files.footer import begins_like_parquet, reading
from pipeline.data.files.json_lines import is_json_lines
from pipeline.errors import InputError
from pipeline.stores.filesystem import secrets_in

_PARQUET_ENDINGS = (".parquet", ".parq", ".pq")
_CODEC_ENDINGS = (".snappy", ".gz", ".gzip", ".zst", ".zstd", ".lz4", ".br", ".bz2")  # after .parquet, in Hive
_DATASETS_NOTES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # metadata of Hugging Face datasets
_DATASETS_STATE = "state.json"  # next to dataset_info.json
_AT_ONCE = 32  # files whose first bytes are read concurrently
_MAX_SHOWN = 6  # extensions in one message

Files = list[tuple[str, int]]


def of_one_format(fs: Any, root: str, found: Files, name: str, shown: Sequence[str]) -> tuple[Files, Files]:
    """Split files below `root`, given as (relative path, size), into input files and files of other formats.

    name: the job file's key and path, and shown: the files' names, both for messages. JSON Lines next to Parquet count
    as input, and the job is then refused, since both hold rows. A .json next to Parquet counts as metadata. Reads the
    first bytes of files without a known extension. Raises InputError if no file has a supported format.
    """
    kinds = [_by_name(relative) for relative, _ in found]
    unknown = [i for i, kind in enumerate(kinds) if kind is None and found[i][1] > 0]

    def looks_like_parquet(i: int) -> bool:
        with reading(shown[i], secrets_in(fs)):
            return begins_like_parquet(fs, posixpath.join(root, found[i][0]), found[i][1])

    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        for i, is_parquet in zip(unknown, pool.map(looks_like_parquet, unknown)):
            kinds[i] = "parquet" if is_parquet else None
    notes = _datasets_notes([relative for relative, _ in found])
    data = {kind for (relative, _), kind in zip(found, kinds) if relative not in notes} - {None}
    if not data and len(notes) < len(found):
        raise InputError(
            f"{name}: contains no Parquet or JSON Lines; found {_counted([r for r, _ in found])}; expected .parquet, "
            ".jsonl, .ndjson or .json; the last three also with .gz or .zst"
        )
    chosen, others = [], []
    for file, kind in zip(found, kinds):
        is_note = bool(data) and file[0] in notes
        is_data = kind is not None and not is_note and not (kind == "json" and "parquet" in data)
        (chosen if is_data else others).append(file)
    return chosen, others


def _by_name(relative: str) -> Literal["parquet", "lines", "json"] | None:
    name = relative.lower()
    if is_json_lines(name):
        return "json" if name.endswith(".json") else "lines"
    stem, ending = posixpath.splitext(name)
    return "parquet" if (stem if ending in _CODEC_ENDINGS else name).endswith(_PARQUET_ENDINGS) else None


def _datasets_notes(relatives: list[str]) -> set[str]:
    """Return the metadata files of Hugging Face datasets among `relatives`."""
    notes = {relative for relative in relatives if posixpath.basename(relative) in _DATASETS_NOTES}
    folders = {posixpath.dirname(relative) for relative in notes}
    return notes | {posixpath.join(folder, _DATASETS_STATE) for folder in folders} & set(relatives)


def _counted(relatives: list[str]) -> str:
    """Return a text with the number of files of each extension and an example."""
    endings = Counter(posixpath.splitext(relative)[1].lower() for relative in relatives)
    parts = []
    for ending, count in endings.most_common(_MAX_SHOWN):
        first = next(relative for relative in relatives if posixpath.splitext(relative)[1].lower() == ending)
        parts.append(f"{count:,} {ending or 'without an extension'} ({first}{', ...' if count > 1 else ''})")
    return ", ".join(parts) + (", ..." if len(endings) > _MAX_SHOWN else "")
