"""Machine-wide cache of model folders that are downloaded from fsspec urls.

The name of an entry hashes the url and every file's name, size and tag in the store, so a model that is replaced there
gets a new entry. An entry appears atomically: files are written under a temporary name and synced, then the folder is
renamed. If several processes need the same model, one downloads it and the others wait. The manifest holds each file's
sha256, size and mtime: a start compares size and mtime, `check_copy` compares the sha256.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.checkpoints.file_checks import PATTERNS
from pipeline.errors import EnvironmentFailed, ModelError
from pipeline.machine.caches import cache_root
from pipeline.stores.filesystem import RemoteFilesystem, filesystem, open_problem
from pipeline.stores.local_folder import sync_folder
from pipeline.stores.redaction import shown_url
from pipeline.stores.retries import RetryCounts
from pipeline.stores.store_errors import SET_CREDENTIALS, Failure, failure_of

MANIFEST = ".manifest.json"  # in an entry: file name -> `_Stored`
RANGE_BYTES = 16 * 2**20
NUM_RANGES = 8  # read concurrently; each holds RANGE_BYTES of memory
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

Log = Callable[[str], None]


@dataclass(frozen=True)
class _Remote:
    """File in the store's listing."""

    name: str
    path: str
    size: int
    tag: str  # changes with the file


@dataclass(frozen=True)
class _Stored:
    """Downloaded file in the manifest of an entry."""

    size: int
    mtime_ns: int
    sha256: str


def cache_folder(environ: Mapping[str, str] = os.environ, log: Log = lambda text: None) -> Path:
    """Return the folder of downloaded models, under the root of all caches. Raises EnvironmentFailed."""
    return cache_root(environ, log) / "models"


def fetch_model(
    url: str,
    storage: Mapping[str, Any],
    cache: Path,
    log: Log,
    retries: RetryCounts | None = None,
    key: str = "model.path",
    config: str = "config.json",
    files: Sequence[str] | None = None,
) -> Path:
    """Return the local folder with the model's files: the cached copy if it is intact, else a new download.

    key: the job file's key, for messages. config: the JSON file that the folder must have. files: names of the only
    files to download, instead. Raises ModelError if the url holds no supported model, EnvironmentFailed if the store or
    the disk fails.
    """
    model = _opened(url, storage, retries, key, config)
    if isinstance(model, Path):
        return model
    model = replace(model, only=None if files is None else tuple(files))
    listed = model.files()
    entry = cache / model.entry_of(listed)
    if _is_intact(entry):
        return entry
    with disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with entry_lock(cache / f".{entry.name}.lock") as is_locked:
            if not _is_intact(entry):  # no other process downloaded it while this one waited
                if is_locked:
                    _remove(cache, entry)
                _download(model, listed, entry, log)
    return entry


def check_copy(url: str, storage: Mapping[str, Any], cache: Path) -> tuple[Path, bool] | None:
    """Return the folder of the cached copy and whether its files are unchanged since the download, or None if there is
    no copy. Reads all bytes. Raises the same errors as `fetch_model`."""
    model = _opened(url, storage, None, "model.path")
    if isinstance(model, Path):
        return None
    entry = cache / model.entry_of(model.files())
    return (entry, _is_intact(entry, read_all=True)) if entry.exists() else None


def _opened(
    url: str, storage: Mapping[str, Any], retries: RetryCounts | None, key: str, config: str = "config.json"
) -> "_StoredModel | Path":
    """Return the model in its store, or the folder for a local url such as file://."""
    shown = shown_url(url)
    try:
        fs, root = filesystem(url, storage, retries=retries)
    except (ImportError, ValueError, TypeError) as e:
        raise ModelError(f"{key} {shown}: {open_problem(url, storage, e)}") from None
    return _StoredModel(fs, root, shown, key, config) if isinstance(fs, RemoteFilesystem) else Path(root)


@dataclass(frozen=True)
class _StoredModel:
    """Model folder in a store. `shown` (the url) and `key` (the job file's key) are for messages."""

    fs: RemoteFilesystem
    root: str
    shown: str
    key: str
    config: str
    only: tuple[str, ...] | None = None  # names of the wanted files; None: those of PATTERNS

    def files(self) -> list[_Remote]:
        with self.translated_errors():
            listed = self.fs.ls(self.root)
            found = _files_in(listed)
            if self.only is not None:
                return self.named(found, self.only)
            if "modules.json" in [f.name for f in found]:  # sentence-transformers: modules have folders (`pooling`)
                for folder in [e["name"].rstrip("/") for e in listed if e["type"] == "directory"]:
                    below = folder.rpartition("/")[2]
                    found += [f for f in _files_in(self.fs.ls(folder), f"{below}/") if f.name == f"{below}/config.json"]
        files = sorted((f for f in found if any(fnmatch(f.name, p) for p in PATTERNS)), key=lambda f: f.name)
        names = [f.name for f in files]
        if self.config not in names:
            raise ModelError(f"{self.key} {self.shown}: has no {self.config}; expected the folder of one model")
        if not any(fnmatch(n, "*.safetensors") for n in names):
            pickles = [f.name for f in found if any(fnmatch(f.name, p) for p in _PICKLES)]
            problem = "has no weights"
            if pickles:
                problem = f"has only pickles ({pickles[0]}), which can run code and are never read"
            raise ModelError(f"{self.key} {self.shown}: {problem}; expected *.safetensors files")
        return files

    def named(self, found: list[_Remote], names: Sequence[str]) -> list[_Remote]:
        by_name = {file.name: file for file in found}
        if absent := [name for name in names if name not in by_name]:
            raise ModelError(f"{self.key} {self.shown}: has no {absent[0]}")
        return [by_name[name] for name in names]

    def entry_of(self, files: list[_Remote]) -> str:
        """Return the name of the cache entry of these files."""
        identity = [self.shown, *(f"{f.name} {f.size} {f.tag}" for f in files)]
        return hashlib.sha256("\n".join(identity).encode()).hexdigest()[:32]

    def replaced_error(self, file: _Remote) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self.shown}/{file.name}: the file was replaced during the download; run again")

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Turn errors of the store's library into ModelError and EnvironmentFailed, without secrets."""
        model_name = f"{self.key} {self.shown}"
        try:
            yield
        except Exception as e:
            failure = failure_of(e)
            if failure is None:
                raise
            if failure is Failure.ABSENT:
                raise ModelError(f"{model_name}: no such folder in the store") from None
            message = self.fs.error_text(e)
            if failure is Failure.CREDENTIALS:
                raise ModelError(f"{model_name}: {message}; {SET_CREDENTIALS}") from None
            if failure is Failure.DENIED:
                raise ModelError(
                    f"{model_name}: access denied ({message}); grant the rights to list and read it"
                ) from None
            if failure is Failure.MALFORMED:
                raise ModelError(f"{model_name}: not a valid path in a store ({message})") from None
            raise EnvironmentFailed(f"{model_name}: {message}; fix it, then run again") from None


def _files_in(listed: list[dict[str, Any]], below: str = "") -> list[_Remote]:
    """Return the files of a listing. below: prefix of their names, for a folder inside the model folder."""
    files = [e for e in listed if e["type"] == "file" and not e["name"].endswith("/")]
    return [_Remote(below + e["name"].rpartition("/")[2], e["name"], int(e["size"]), _tag_of(e)) for e in files]


def _tag_of(entry: Mapping[str, Any]) -> str:
    for key in ("ETag", "etag", "md5", "LastModified", "last_modified", "mtime", "created"):
        if entry.get(key):
            return str(entry[key]).strip('"')
    return ""


def _is_intact(entry: Path, read_all: bool = False) -> bool:
    """Return whether every file of the entry is unchanged since the download. Compares size and mtime; also the sha256
    if the mtime changed, or with `read_all`."""
    try:
        manifest = {name: _Stored(**stored) for name, stored in json.loads((entry / MANIFEST).read_bytes()).items()}
        return all(_is_unchanged(entry / name, stored, read_all) for name, stored in manifest.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _is_unchanged(path: Path, stored: _Stored, read_all: bool) -> bool:
    status = path.stat()
    if status.st_size != stored.size:
        return False
    is_touched = status.st_mtime_ns != stored.mtime_ns
    if (is_touched or read_all) and _sha256(path) != stored.sha256:
        return False
    if is_touched:  # the cache was copied, for example: restore the mtime, so that the next check is cheap again
        with suppress(OSError):
            os.utime(path, ns=(status.st_atime_ns, stored.mtime_ns))
    return True


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(model: _StoredModel, files: list[_Remote], entry: Path, log: Log) -> None:
    total = sum(f.size for f in files)
    free = shutil.disk_usage(entry.parent).free
    if total > free:
        raise EnvironmentFailed(
            f"{entry.parent}: the model {model.shown} needs {total / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are "
            "free; free some space, or set PIPELINE_CACHE to a folder on a larger disk"
        )
    temporary = entry.parent / f".{entry.name}.{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        done, manifest = 0, {}
        for file in files:
            (temporary / file.name).parent.mkdir(exist_ok=True)
            log(f"downloading the model: {file.name}, {done / 1e9:.2f} of {total / 1e9:.2f} GB")
            path = temporary / file.name
            _read_ranges(model, file, path)
            manifest[file.name] = asdict(_Stored(file.size, path.stat().st_mtime_ns, _sha256(path)))
            done += file.size
        now = model.files()
        if changed := [file for file in files if file not in now]:  # the ranges may mix two versions of the file
            raise model.replaced_error(changed[0])
        with open(temporary / MANIFEST, "w") as out:
            json.dump(manifest, out)
            out.flush()
            os.fsync(out.fileno())
        for folder in {(temporary / f.name).parent for f in files}:
            sync_folder(folder)
        try:
            os.rename(temporary, entry)
        except OSError:
            if not _is_intact(entry):  # on a disk without locks, another process may have made the entry
                raise
        sync_folder(entry.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_ranges(model: _StoredModel, file: _Remote, path: Path) -> None:
    with open(path, "wb") as out, ThreadPoolExecutor(NUM_RANGES) as pool:

        def read(start: int) -> None:
            stop = min(start + RANGE_BYTES, file.size)
            with model.translated_errors():
                data = model.fs.cat_file(file.path, start, stop)
            if len(data) != stop - start:
                raise model.replaced_error(file)
            view = memoryview(data)
            while view:
                written = os.pwrite(out.fileno(), view, start)
                view, start = view[written:], start + written

        for _ in pool.map(read, range(0, file.size, RANGE_BYTES)):
            pass
        os.fsync(out.fileno())


def _remove(cache: Path, entry: Path) -> None:
    """Remove a damaged entry and the leftovers of dead writers. The caller must hold the entry's lock."""
    if entry.exists():
        entry.rename(cache / f".{entry.name}.{secrets.token_hex(8)}")
    for leftover in cache.glob(f".{entry.name}.*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def entry_lock(path: Path) -> Iterator[bool]:
    """Lock an entry against other processes; the lock is released if its holder dies.

    Yields False on a disk without locks: two processes may then download, and one rename wins.
    """
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            is_locked = True
        except OSError:
            is_locked = False
        yield is_locked


@contextmanager
def disk_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise EnvironmentFailed(
            f"{e.filename or cache}: {e.strerror or e}; free some space, fix the disk, or set PIPELINE_CACHE to "
            "another folder, then run again"
        ) from e
