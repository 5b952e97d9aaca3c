"""Results of scanning large JSON Lines files, so that a command need not parse a file that an earlier one has scanned.

Owns `$PIPELINE_CACHE/scans/`. An entry holds the last scan of a path and belongs to one version of the file, of the
options and of this package's code. It is a cache: missing, damaged or unwritable entries only cost another scan.
"""

import hashlib
import os
import pickle
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pipeline.data.files.listing import is_local
from pipeline.errors import EnvironmentFailed
from pipeline.machine.caches import cache_root
from pipeline.stores.filesystem import etag
from pipeline.stores.store_errors import failure_of

T = TypeVar("T")

MIN_BYTES = 1 << 20  # of a file; a smaller one is scanned in milliseconds
MAX_ENTRY_BYTES = 64 << 20  # the ids of 8 million requests
MAX_BYTES = 512 << 20  # of all entries
MAX_ENTRIES = 5000
_MIN_AGE_NS = 2 * 10**9  # a file may change once more within one tick of its disk's clock
_DIGEST_BYTES = 32


def scanned(fs: Any, path: str, size: int, options: tuple[Any, ...], scan: Callable[[], T]) -> T:
    """Return the cached result of `scan` for a file of `size` bytes, or call it and save its result. options: what the
    result depends on besides the file."""
    version = _version(fs, path) if size >= MIN_BYTES else None
    if version is None:
        return scan()
    located = fs.unstrip_protocol(path), options
    name = _digest(repr(located).encode()).hex()[:32]
    key = repr((located, version, _code())).encode()
    with suppress(OSError, EnvironmentFailed):
        saved = (_folder() / name).read_bytes()
        own_digest, content = saved[:_DIGEST_BYTES], saved[_DIGEST_BYTES:]
        if own_digest == _digest(key + content):  # the content is whole, and of this key
            return pickle.loads(content)
    result = scan()
    if _version(fs, path) == version:
        content = pickle.dumps(result)
        with suppress(OSError, EnvironmentFailed):
            _save(name, _digest(key + content) + content)
    return result


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _version(fs: Any, path: str) -> tuple[Any, ...] | None:
    """Return what identifies the content of a file without reading it; None if nothing does, as for a file that may
    still be written, or in a store without entity tags."""
    try:
        if not is_local(fs):
            info = fs.info(path)
            tag = etag(info)
            changed = str(info.get("LastModified") or info.get("last_modified"))
            return (tag, int(info["size"]), changed) if tag else None
        status = os.stat(path)
    except Exception as error:
        if failure_of(error) is None:
            raise
        return None  # the scan reports it
    if time.time_ns() - status.st_mtime_ns < _MIN_AGE_NS:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@cache
def _code() -> str:
    """Return a digest of the code that scans."""
    return _digest(b"".join(source.read_bytes() for source in sorted(Path(__file__).parents[1].rglob("*.py")))).hex()


def _folder() -> Path:
    return cache_root() / "scans"


def _save(name: str, content: bytes) -> None:
    if len(content) > MAX_ENTRY_BYTES:
        return
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{secrets.token_hex(4)}"
    temporary.write_bytes(content)
    os.replace(temporary, folder / name)
    kept = 0
    newest_first = sorted(((entry.stat(), entry) for entry in folder.iterdir()), key=lambda each: -each[0].st_mtime_ns)
    for rank, (status, entry) in enumerate(newest_first):
        kept += status.st_size
        if rank >= MAX_ENTRIES or kept > MAX_BYTES:
            entry.unlink(missing_ok=True)
