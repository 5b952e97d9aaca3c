"""Listing of the files of a path: a file, a folder (recursively), or a glob, on a local disk or in a store.

Names that start with `_` or `.` are skipped, as in every Parquet reader, except folders of a partition column such as
`_day=1`. Links are followed. Everything else is returned or refused, never dropped silently.
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

from pipeline.data.columns import same_characters
from pipeline.data.files.footer import reading
from pipeline.data.files.table_logs import refuse_tables
from pipeline.errors import InputError
from pipeline.stores.filesystem import filesystem, protocols
from pipeline.stores.redaction import error_text, secrets_of, shown_url
from pipeline.stores.retries import RetryCounts

_MAGIC = "*?["  # glob characters
_DESCRIPTOR = re.compile(r"/dev/(stdin|fd/\d+)|/proc/[^/]+/fd/\d+")  # refers to another file in each process
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a disk"),
)


@dataclass(frozen=True)
class Found:
    """Listed files: fsspec filesystem, root on it, and sorted (path relative to the root, size). is_named: the path is
    that of a single file."""

    fs: Any
    root: str
    files: list[tuple[str, int]]
    is_named: bool = False


def find_files(path: str, storage: dict[str, Any], retries: RetryCounts | None = None) -> Found:
    """List the files of `path`.

    Raises InputError if there is nothing to read, or the files are those of a table with a log (`table_logs`), and
    EnvironmentFailed if the listing fails.
    """
    name = f"input.path {shown_url(path)}"
    if path.startswith(("http://", "https://")) and "?" in path:
        raise InputError(
            f"{name}: a web address with a ? cannot be an input: the query may be a signature, and file names are "
            "written to the output; download the file, or use the store's own url"
        )
    secrets = secrets_of(storage)
    try:
        with reading(name, secrets):
            fs, full = filesystem(path, storage, retries=retries)
            root, sizes = _local(full, path, name) if is_local(fs) else _remote(fs, full, name, path.endswith("/"))
    except (ImportError, ValueError, TypeError) as e:  # unknown protocol or invalid options
        raise InputError(f"{name}: cannot be opened with these storage options: {error_text(e, secrets)}") from None
    if [posixpath.join(root, f) for f in sizes] == [full]:
        return Found(fs, root, list(sizes.items()), is_named=True)  # any name is allowed
    found = sorted((f, n) for f, n in sizes.items() if not is_passed_by(f))
    with reading(name, secrets):
        is_folder = not has_magic(full)
        listed = sizes if is_folder and not is_local(fs) else None
        refuse_tables(fs, root, [relative for relative, _ in found], listed, is_local(fs), name)
    if not found:
        raise InputError(f"{name}: contains no files (names that start with _ or . are skipped)")
    for relative, _ in found:
        if (shown := relative.encode(errors="backslashreplace").decode()) != relative:
            raise InputError(
                f"{name}: {shown}: the name is not UTF-8, so it cannot be stored in source_file; rename it"
            )
    return Found(fs, root, found)


def would_find(path: str, storage: dict[str, Any], folder: str, folder_storage: dict[str, Any]) -> bool:
    """Return whether a file written into `folder` would be listed by `path`, without a request. Both are local paths or
    valid fsspec urls."""
    fs, full = filesystem(path, storage)
    folder_fs, folder_path = filesystem(folder, folder_storage)
    if is_local(fs) != is_local(folder_fs):
        return False
    if is_local(fs):
        full, folder_path = os.path.realpath(full), os.path.realpath(folder_path)
    elif not set(protocols(fs)) & set(protocols(folder_fs)) or _endpoint(storage) != _endpoint(folder_storage):
        return False
    pattern, names = full.strip("/").split("/"), [*folder_path.strip("/").split("/"), "part.parquet"]
    if names[: len(pattern)] == pattern:
        below = names[len(pattern) :]
    elif any(_matches(names[:i], pattern) for i in range(1, len(names) + 1)):
        below = names[len(_fixed(full).strip("/").split("/")) :]
    else:
        return False
    return bool(below) and not is_passed_by("/".join(below))


def _endpoint(storage: dict[str, Any]) -> Any:
    """Return the endpoint url in storage options, or None."""
    client = storage.get("client_kwargs")
    return storage.get("endpoint_url") or (client.get("endpoint_url") if isinstance(client, dict) else None)


def _matches(names: list[str], pattern: list[str]) -> bool:
    """Return whether a glob matches a path, both split at slashes."""
    if not pattern or not names:
        return not names and all(piece == "**" for piece in pattern)
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or _matches(names[1:], pattern)
    return fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def has_magic(path: str) -> bool:
    """Return whether a path has characters of a glob."""
    return any(c in path for c in _MAGIC)


def is_local(fs: Any) -> bool:
    return "file" in protocols(fs)


def is_passed_by(relative: str) -> bool:
    """Return whether a file below the root is skipped because of its name or that of a folder in its path."""
    *folders, name = relative.split("/")
    return name.startswith(("_", ".")) or any(map(_is_hidden, folders))


def _is_hidden(folder: str) -> bool:
    return folder.startswith(".") or (folder.startswith("_") and "=" not in folder)


def _fixed(full: str) -> str:
    """Return the part of a glob before its first pattern."""
    parts = full.split("/")
    first = next(i for i, part in enumerate(parts) if has_magic(part))
    return "/".join(parts[:first]) or "/"


def _local(full: str, path: str, name: str) -> tuple[str, dict[str, int]]:
    """Return the root and relative path -> size of each file."""
    if no_file := _no_file("/dev/stdin" if path == "-" else full):
        raise InputError(f"{name}: {no_file}")
    if os.path.isfile(full):
        root, paths = os.path.split(full)[0], [full]
    elif os.path.isdir(full):
        root, paths = full, list(_walk(full))
    elif os.path.lexists(full) or not has_magic(full):
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
    """Return why an existing path cannot be read as a file, with advice; None for files, folders and missing paths."""
    if _DESCRIPTOR.fullmatch(path):
        kind = "a file descriptor of one process"
    elif os.path.islink(path) and not os.path.exists(path):
        return f"is a link to {os.readlink(path)}, which does not exist; repair or remove the link"
    else:
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), None)
    return kind and (
        f"is {kind}, but an input is read more than once: when the job is planned, and by each run that resumes it; "
        "save it to a file, such as x.jsonl.gz or x.csv"
    )


def _looked_for(path: str, full: str) -> str:
    """Return a note on the resolved local path, unless it is obvious from what the user wrote."""
    folder, base = os.path.split(full)
    if os.path.isdir(folder) and (same := same_characters(base, os.listdir(folder))):
        escaped = same.encode("unicode_escape").decode()
        return f'; {same!r} in {folder} differs only in its Unicode form; write it in double quotes as "{escaped}"'
    if path != path.strip():
        return "; the path begins or ends with whitespace"
    if path.endswith(full):
        return ""
    return f"; looked for {full}" + (", in the working directory" if path[0] != "~" else "")


def _walk(folder: str) -> Iterator[str]:
    """Yield all files below a folder. Follow links to folders; raise InputError for a link to a parent folder."""
    waiting = [(folder, frozenset[str]())]
    while waiting:
        current, above = waiting.pop()
        real = os.path.realpath(current)
        if real in above:
            raise InputError(f"{current}: is a link to one of its parent folders; remove it")
        for entry in sorted(os.listdir(current)):
            path = os.path.join(current, entry)
            if os.path.isdir(path):
                if _is_hidden(entry):
                    continue
                waiting.append((path, above | {real}))
            elif entry[0] not in "_.":
                yield path


def _remote(fs: Any, full: str, name: str, as_folder: bool) -> tuple[str, dict[str, int]]:
    """Return the same as `_local`, through fsspec. as_folder: the path ends with a slash, so it means the folder if a
    store has both a file and a folder of this name."""
    try:
        info = fs.info(full)
    except FileNotFoundError:
        if not has_magic(full):
            raise InputError(f"{name}: does not exist") from None
        root, entries = _fixed(full), fs.glob(full, detail=True)
        folders = [n for n, entry in entries.items() if entry["type"] == "directory"]
        # fsspec's glob lists a key that is both a file and a folder only as a folder
        for parent in {n.rpartition("/")[0] for n in folders}:
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
    """Return the file's size in bytes. Listings of web servers lack sizes, and a server may not report one."""
    size = fs.info(name)["size"] if entry["size"] is None else entry["size"]
    if size is None:
        shown = shown_url(fs.unstrip_protocol(name))
        raise InputError(f"{shown}: the server does not report the file's size; download the file")
    return int(size)


def _below(fs: Any, root: str, name: str) -> str:
    """Return the name relative to the root, unnormalized: in a store, `a//b` and `a/../b` differ from `a/b` and `b`.
    Raises InputError if joining the two does not give the name again."""
    relative = name.lstrip("/").removeprefix(root.strip("/")).removeprefix("/")
    same = posixpath.join(root, relative).lstrip("/") == name.lstrip("/") and not relative.endswith("/")
    if not same and not is_passed_by(relative):
        raise InputError(
            f"{shown_url(fs.unstrip_protocol(name))}: its path has an empty component (// or a trailing slash), so it "
            "cannot be an input; copy it to another name, or exclude it with a pattern in input.path"
        )
    return relative


def _is_folder(name: str, entry: dict[str, Any]) -> bool:
    """Return whether an entry is a folder, or an empty object with which web consoles and Hadoop mark one."""
    marks = int(entry["size"] or 0) == 0 and name.endswith(("/", "_$folder$"))
    return entry["type"] == "directory" or marks
