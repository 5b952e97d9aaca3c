"""Which files of a folder or glob are the input: those of its format. Others are passed over, and named once.

Hubs and Spark leave more in a folder than data: README.md, dataset_infos.json, .arrow files, markers without bytes. The
name says what a file is; one whose name says nothing is Parquet where it begins like that, as Spark and Hive leave out
endings. So nothing that holds rows is left out: a damaged .parquet is still an input.
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
_CODEC_ENDINGS = (".snappy", ".gz", ".gzip", ".zst", ".zstd", ".lz4", ".br", ".bz2")  # after .parquet, as Hive has it
_DATASETS_NOTES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # of Hugging Face's datasets
_DATASETS_STATE = "state.json"  # next to dataset_info.json
_AT_ONCE = 32  # files whose first bytes are read
_MAX_SHOWN = 6  # endings in one message

Files = list[tuple[str, int]]


def of_one_format(fs: Any, root: str, found: Files, place: str, shown: Sequence[str]) -> tuple[Files, Files]:
    """Split files below `root`, by relative path and size, into those of the input and those of other formats.

    `place`: what the job names, and `shown` the files' names, for messages. Files of JSON Lines next to Parquet are of
    the input, to be refused: both hold rows. A .json next to Parquet describes it. Reads the first bytes of each file
    whose name says nothing. Raises InputError where there is no file of a format that can be read.
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
            f"{place}: no Parquet or JSON Lines there; found {_counted([r for r, _ in found])}; expected .parquet, or "
            ".jsonl, .ndjson or .json, these also .gz or .zst"
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
    """The files that Hugging Face's datasets keeps next to the data."""
    notes = {relative for relative in relatives if posixpath.basename(relative) in _DATASETS_NOTES}
    folders = {posixpath.dirname(relative) for relative in notes}
    return notes | {posixpath.join(folder, _DATASETS_STATE) for folder in folders} & set(relatives)


def _counted(relatives: list[str]) -> str:
    """Return the number of files of each ending, with the first of each."""
    endings = Counter(posixpath.splitext(relative)[1].lower() for relative in relatives)
    parts = []
    for ending, count in endings.most_common(_MAX_SHOWN):
        first = next(relative for relative in relatives if posixpath.splitext(relative)[1].lower() == ending)
        parts.append(f"{count:,} {ending or 'without an ending'} ({first}{', ...' if count > 1 else ''})")
    return ", ".join(parts) + (", ..." if len(endings) > _MAX_SHOWN else "")
