"""Which files a path stands for: a file, a folder read whole, or a glob, on a local disk or in a store.

Nothing is left out silently: names that start with `_` or `.` are skipped, as every Parquet reader does,
links are followed, and whatever else is there is returned or refused.
"""

import glob
import os
import posixpath
from collections.abc import Iterator
from typing import Any

from pipeline.data.files.footer import reading
from pipeline.errors import InputError
from pipeline.stores.filesystem import filesystem, protocols
from pipeline.stores.redaction import said, secrets_of, shown_url
from pipeline.stores.retries import RetryCounts

_MAGIC = "*?["  # what makes a path a glob


def find_files(
    path: str, storage: dict[str, Any], retries: RetryCounts | None = None
) -> tuple[Any, str, list[tuple[str, int]]]:
    """The fsspec filesystem, the root on it, and (path relative to the root, size) of each file, sorted.

    Raises InputError when there is nothing to read, EnvironmentFailed when it cannot be listed.
    """
    name = f"input.path {shown_url(path)}"
    if path.startswith(("http://", "https://")) and "?" in path:
        raise InputError(
            f"{name}: a web address with a ? cannot be an input: what follows may be a signature, and the files' names "
            "stand in the output; download the file, or give the store's own url"
        )
    secrets = secrets_of(storage)
    try:
        with reading(name, secrets):
            fs, full = filesystem(path, storage, retries=retries)
            root, sizes = _local(full, name) if is_local(fs) else _remote(fs, full, name)
    except (ImportError, ValueError, TypeError) as e:  # no such protocol, or options it does not take
        raise InputError(f"{name}: cannot be opened with these input.storage options: {said(e, secrets)}") from None
    if [posixpath.join(root, f) for f in sizes] == [full]:
        return fs, root, list(sizes.items())  # a file named by the user, whatever its name
    found = sorted((f, n) for f, n in sizes.items() if not any(part[0] in "_." for part in f.split("/")))
    if not found:
        raise InputError(f"{name}: no files there (names that start with _ or . are passed by)")
    return fs, root, found


def is_local(fs: Any) -> bool:
    return "file" in protocols(fs)


def _fixed(full: str) -> str:
    """The folder of a glob before its first pattern."""
    parts = full.split("/")
    first = next(i for i, part in enumerate(parts) if any(c in part for c in _MAGIC))
    return "/".join(parts[:first]) or "/"


def _local(full: str, name: str) -> tuple[str, dict[str, int]]:
    """The root, and the size of each file by its path relative to it."""
    if os.path.isfile(full):
        root, paths = os.path.split(full)[0], [full]
    elif os.path.isdir(full):
        root, paths = full, list(_walk(full))
    elif os.path.lexists(full) or not any(c in full for c in _MAGIC):
        looked = "" if name.endswith(full) else f"; it was looked for at {full}, below the working directory"
        raise InputError(f"{name}: does not exist{looked}")
    else:
        root, paths = _fixed(full), []
        for match in glob.glob(full, recursive=True, include_hidden=True):
            paths += _walk(match) if os.path.isdir(match) else [match]
    for p in paths:
        if not os.path.isfile(p):
            raise InputError(f"{p}: neither a file nor a folder (a broken link?)")
    return root, {os.path.relpath(p, root): os.stat(p).st_size for p in paths}


def _walk(folder: str) -> Iterator[str]:
    """Everything below but folders, through links to folders too, each real folder at most once along the way
    down."""
    waiting = [(folder, frozenset[str]())]
    while waiting:
        here, above = waiting.pop()
        real = os.path.realpath(here)
        if real in above:
            raise InputError(f"{here}: a link that leads back to a folder it lies in")
        for entry in sorted(os.listdir(here)):
            path = os.path.join(here, entry)
            if entry[0] in "_.":
                continue
            if os.path.isdir(path):
                waiting.append((path, above | {real}))
            else:
                yield path


def _remote(fs: Any, full: str, name: str) -> tuple[str, dict[str, int]]:
    """As `_local`, through fsspec."""
    try:
        info = fs.info(full)
    except FileNotFoundError:
        if not any(c in full for c in _MAGIC):
            raise InputError(f"{name}: does not exist") from None
        root, entries = _fixed(full), fs.glob(full, detail=True)
        for folder in [n for n, entry in entries.items() if entry["type"] == "directory"]:
            entries |= fs.find(folder, detail=True)
    else:
        if info["type"] == "file":
            return posixpath.dirname(full), {posixpath.basename(full): int(info["size"])}
        root, entries = full.rstrip("/"), fs.find(full, detail=True)
    files = {n: int(entry["size"]) for n, entry in entries.items() if not _is_folder(n, entry)}
    return root, {posixpath.relpath(n, root or "/"): size for n, size in files.items()}


def _is_folder(name: str, entry: dict[str, Any]) -> bool:
    """Also an empty object by which consoles and Hadoop mark a folder in a store that has none."""
    marks = int(entry["size"] or 0) == 0 and name.endswith(("/", "_$folder$"))
    return entry["type"] == "directory" or marks
