"""Which files a path stands for: a file, a folder read whole, or a glob, on a local disk or in a store.

Nothing is left out silently: names that start with `_` or `.` are skipped, as every Parquet reader does, but for the
folders of a column whose name does (`_day=1`, as Spark has it); links are followed, and whatever else is there is
returned or refused.
"""

import glob
import os
import posixpath
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pipeline.data.files.footer import reading
from pipeline.errors import InputError
from pipeline.stores.filesystem import filesystem, protocols
from pipeline.stores.redaction import said, secrets_of, shown_url
from pipeline.stores.retries import RetryCounts

_MAGIC = "*?["  # what makes a path a glob
_DESCRIPTOR = re.compile(r"/dev/(stdin|fd/\d+)|/proc/[^/]+/fd/\d+")  # names another file in each process
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a disk"),
)


@dataclass(frozen=True)
class Found:
    """The fsspec filesystem, the root on it, and (path relative to the root, size) of each file, sorted. is_named: the
    only file is the one that the path names."""

    fs: Any
    root: str
    files: list[tuple[str, int]]
    is_named: bool = False


def find_files(path: str, storage: dict[str, Any], retries: RetryCounts | None = None) -> Found:
    """List what `path` stands for.

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
            root, sizes = _local(full, path, name) if is_local(fs) else _remote(fs, full, name, path.endswith("/"))
    except (ImportError, ValueError, TypeError) as e:  # no such protocol, or options it does not take
        raise InputError(f"{name}: cannot be opened with these storage options: {said(e, secrets)}") from None
    if [posixpath.join(root, f) for f in sizes] == [full]:
        return Found(fs, root, list(sizes.items()), is_named=True)  # whatever its name
    found = sorted((f, n) for f, n in sizes.items() if not is_passed_by(f))
    if not found:
        raise InputError(f"{name}: no files there (names that start with _ or . are passed by)")
    for relative, _ in found:
        if (shown := relative.encode(errors="backslashreplace").decode()) != relative:
            raise InputError(f"{name}: {shown}: a name that is not UTF-8 cannot stand in source_file; rename it")
    return Found(fs, root, found)


def would_find(path: str, storage: dict[str, Any], folder: str, folder_storage: dict[str, Any]) -> bool:
    """Whether a file that is written into `folder` would be one of those at `path`; no request is made. Both are local
    paths or fsspec urls that can be opened."""
    fs, full = filesystem(path, storage)
    there, place = filesystem(folder, folder_storage)
    if is_local(fs) != is_local(there):
        return False
    if is_local(fs):
        full, place = os.path.realpath(full), os.path.realpath(place)
    elif not set(protocols(fs)) & set(protocols(there)) or _endpoint(storage) != _endpoint(folder_storage):
        return False
    pattern, names = full.strip("/").split("/"), [*place.strip("/").split("/"), "part.parquet"]
    if names[: len(pattern)] == pattern:
        below = names[len(pattern) :]
    elif any(_matches(names[:i], pattern) for i in range(1, len(names) + 1)):
        below = names[len(_fixed(full).strip("/").split("/")) :]
    else:
        return False
    return bool(below) and not is_passed_by("/".join(below))


def _endpoint(storage: dict[str, Any]) -> Any:
    """Which store a url's bucket is in, where its options say so."""
    client = storage.get("client_kwargs")
    return storage.get("endpoint_url") or (client.get("endpoint_url") if isinstance(client, dict) else None)


def _matches(names: list[str], pattern: list[str]) -> bool:
    """Whether a glob, in pieces, stands for a path."""
    if not pattern or not names:
        return not names and all(piece == "**" for piece in pattern)
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or _matches(names[1:], pattern)
    return fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def is_local(fs: Any) -> bool:
    return "file" in protocols(fs)


def is_passed_by(relative: str) -> bool:
    """Whether a file below the root is not of the input, by its name or that of a folder on the way."""
    *folders, name = relative.split("/")
    return name.startswith(("_", ".")) or any(map(_is_hidden, folders))


def _is_hidden(folder: str) -> bool:
    return folder.startswith(".") or (folder.startswith("_") and "=" not in folder)


def _fixed(full: str) -> str:
    """The folder of a glob before its first pattern."""
    parts = full.split("/")
    first = next(i for i, part in enumerate(parts) if any(c in part for c in _MAGIC))
    return "/".join(parts[:first]) or "/"


def _local(full: str, path: str, name: str) -> tuple[str, dict[str, int]]:
    """The root, and the size of each file by its path relative to it."""
    if no_file := _no_file("/dev/stdin" if path == "-" else full):
        raise InputError(f"{name}: {no_file}")
    if os.path.isfile(full):
        root, paths = os.path.split(full)[0], [full]
    elif os.path.isdir(full):
        root, paths = full, list(_walk(full))
    elif os.path.lexists(full) or not any(c in full for c in _MAGIC):
        raise InputError(f"{name}: does not exist{_looked_for(path, full)}")
    else:
        root, paths = _fixed(full), []
        for match in glob.glob(full, recursive=True, include_hidden=True):
            paths += _walk(match) if os.path.isdir(match) else [match]
    for p in paths:
        if no_file := _no_file(p):
            raise InputError(f"{p}: {no_file}")
    return root, {os.path.relpath(p, root): os.stat(p).st_size for p in paths}


def _no_file(path: str) -> str | None:
    """Why a path that exists cannot be read as a file, and what to do; None for files, folders and missing names."""
    if _DESCRIPTOR.fullmatch(path):
        kind = "a file descriptor of one process"
    elif os.path.islink(path) and not os.path.exists(path):
        return f"is a link to {os.readlink(path)}, which does not exist; mend or remove the link"
    else:
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), None)
    return kind and (
        f"is {kind}, and an input is read more than once: when the job is planned, and by each run that resumes it; "
        "save it to a file and give that (.parquet, .jsonl, .jsonl.gz and .jsonl.zst are read directly)"
    )


def _looked_for(path: str, full: str) -> str:
    """Where a local path was looked for, where that is not plain from how the user wrote it."""
    if path != path.strip():
        return "; the path begins or ends with white space"
    if path.endswith(full):
        return ""
    return f"; it was looked for at {full}" + (", below the working directory" if path[0] != "~" else "")


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
            if os.path.isdir(path):
                if _is_hidden(entry):
                    continue
                waiting.append((path, above | {real}))
            elif entry[0] not in "_.":
                yield path


def _remote(fs: Any, full: str, name: str, as_folder: bool) -> tuple[str, dict[str, int]]:
    """As `_local`, through fsspec. `as_folder`: the path ends with a slash, so where a file and a folder have this
    name, as a store allows, the folder is meant."""
    try:
        info = fs.info(full)
    except FileNotFoundError:
        if not any(c in full for c in _MAGIC):
            raise InputError(f"{name}: does not exist") from None
        root, entries = _fixed(full), fs.glob(full, detail=True)
        folders = [n for n, entry in entries.items() if entry["type"] == "directory"]
        for parent in {
            n.rpartition("/")[0] for n in folders
        }:  # fsspec's glob lists a key that is both as the folder alone
            entries |= {e["name"]: e for e in fs.ls(parent) if e["type"] == "file" and e["name"] in entries}
        for folder in folders:
            entries |= fs.find(folder, detail=True)
    else:
        is_file = info["type"] == "file"
        root, entries = full.rstrip("/"), fs.find(full, detail=True) if as_folder or not is_file else {}
        if is_file and entries.keys() <= {full}:
            root, entries = full.rpartition("/")[0], {full: info}
    files = {n: entry for n, entry in entries.items() if not _is_folder(n, entry)}
    return root, {_below(fs, root, n): _size(fs, n, entry) for n, entry in files.items()}


def _size(fs: Any, name: str, entry: dict[str, Any]) -> int:
    """The file's bytes. The listing of a web server tells none, and a server may not know them."""
    size = fs.info(name)["size"] if entry["size"] is None else entry["size"]
    if size is None:
        shown = shown_url(fs.unstrip_protocol(name))
        raise InputError(f"{shown}: the server does not say how large it is; download it")
    return int(size)


def _below(fs: Any, root: str, name: str) -> str:
    """The name relative to the root, to the letter: in a store `a//b` and `a/../b` are other files than `a/b` and `b`.
    Raises InputError where the two cannot be put together again."""
    relative = name.lstrip("/").removeprefix(root.strip("/")).removeprefix("/")
    same = posixpath.join(root, relative).lstrip("/") == name.lstrip("/") and not relative.endswith("/")
    if not same and not is_passed_by(relative):
        raise InputError(
            f"{shown_url(fs.unstrip_protocol(name))}: an empty name stands between or after its slashes, so it cannot "
            "be an input; copy it to another name, or leave it out by naming the others in input.path"
        )
    return relative


def _is_folder(name: str, entry: dict[str, Any]) -> bool:
    """Also an empty object by which consoles and Hadoop mark a folder in a store that has none."""
    marks = int(entry["size"] or 0) == 0 and name.endswith(("/", "_$folder$"))
    return entry["type"] == "directory" or marks
