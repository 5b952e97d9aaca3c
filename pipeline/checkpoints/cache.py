"""A model folder at an fsspec url: downloaded once per machine into a cache, and checked.

An entry is named for the url and for every file's name, size and tag in the store, so a model that was replaced there
is another entry. It appears whole or not at all: files are written below a temporary name, synced, and the folder
renamed. Of processes that want the same model at once one downloads, the others wait for it. Its manifest has each
file's sha256, size and mtime: a start compares the last two, `check_copy` reads the files.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
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
NUM_RANGES = 8  # read at once, so that much memory
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Remote:
    """A file as the store lists it."""

    name: str
    path: str
    size: int
    tag: str  # changes with the file


@dataclass(frozen=True)
class _Stored:
    """A file of an entry, as it was downloaded."""

    size: int
    mtime_ns: int
    sha256: str


def cache_folder(environ: Mapping[str, str] = os.environ, say: Say = lambda text: None) -> Path:
    """Return the folder of downloaded models, below the root of all caches. Raises EnvironmentFailed."""
    return cache_root(environ, say) / "models"


def fetch_model(
    url: str,
    storage: Mapping[str, Any],
    cache: Path,
    say: Say,
    retries: RetryCounts | None = None,
    key: str = "model.path",
) -> Path:
    """The local folder with the model's files: from the cache where they are whole there, else downloaded.

    key: of the job file, for messages. Raises ModelError when the url holds no model that can be served,
    EnvironmentFailed when the store or the disk fails.
    """
    model = _opened(url, storage, retries, key)
    if isinstance(model, Path):
        return model
    files = model.files()
    entry = cache / model.entry_of(files)
    if _whole(entry):
        return entry
    with _disk(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{entry.name}.lock") as alone:
            if not _whole(entry):  # no other process has made it while this one waited
                if alone:
                    _remove(cache, entry)
                _download(model, files, entry, say)
    return entry


def check_copy(url: str, storage: Mapping[str, Any], cache: Path) -> tuple[Path, bool] | None:
    """Return the folder of the model's copy in the cache, and whether its files are as they were downloaded: all bytes
    are read. None where there is no copy. Raises as `fetch_model`."""
    model = _opened(url, storage, None, "model.path")
    if isinstance(model, Path):
        return None
    entry = cache / model.entry_of(model.files())
    return (entry, _whole(entry, read_all=True)) if entry.exists() else None


def _opened(url: str, storage: Mapping[str, Any], retries: RetryCounts | None, key: str) -> "_StoredModel | Path":
    """Return the model in its store, or the folder that a url such as file:// names."""
    shown = shown_url(url)
    try:
        fs, root = filesystem(url, storage, retries=retries)
    except (ImportError, ValueError, TypeError) as e:
        raise ModelError(f"{key} {shown}: {open_problem(url, storage, e)}") from None
    return _StoredModel(fs, root, shown, key) if isinstance(fs, RemoteFilesystem) else Path(root)


@dataclass(frozen=True)
class _StoredModel:
    """The model's folder in the store. `shown`: its url, and `key`: of the job file, for messages."""

    fs: RemoteFilesystem
    root: str
    shown: str
    key: str

    def files(self) -> list[_Remote]:
        with self.asking():
            listed = self.fs.ls(self.root)
            there = _files_of(listed)
            if "modules.json" in [f.name for f in there]:  # sentence-transformers': modules have folders (`pooling`)
                for folder in [e["name"].rstrip("/") for e in listed if e["type"] == "directory"]:
                    below = folder.rpartition("/")[2]
                    there += [f for f in _files_of(self.fs.ls(folder), f"{below}/") if f.name == f"{below}/config.json"]
        files = sorted((f for f in there if any(fnmatch(f.name, p) for p in PATTERNS)), key=lambda f: f.name)
        names = [f.name for f in files]
        if "config.json" not in names:
            raise ModelError(f"{self.key} {self.shown}: has no config.json; it must be the folder of one model")
        if not any(fnmatch(n, "*.safetensors") for n in names):
            pickles = [f.name for f in there if any(fnmatch(f.name, p) for p in _PICKLES)]
            why = f"only pickles ({pickles[0]}), which can run code and are never read" if pickles else "no weights"
            raise ModelError(f"{self.key} {self.shown}: {why}; it needs *.safetensors files")
        return files

    def entry_of(self, files: list[_Remote]) -> str:
        """Return the name of these files' folder in the cache."""
        identity = [self.shown, *(f"{f.name} {f.size} {f.tag}" for f in files)]
        return hashlib.sha256("\n".join(identity).encode()).hexdigest()[:32]

    def replaced(self, file: _Remote) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self.shown}/{file.name}: was replaced while it was downloaded; run again")

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Turn what the store's library raises into errors of the model, without secrets."""
        place = f"{self.key} {self.shown}"
        try:
            yield
        except Exception as e:
            failure = failure_of(e)
            if failure is None:
                raise
            if failure is Failure.ABSENT:
                raise ModelError(f"{place}: no such folder in the store") from None
            told = self.fs.said(e)
            if failure is Failure.CREDENTIALS:
                raise ModelError(f"{place}: {told}; {SET_CREDENTIALS}") from None
            if failure is Failure.DENIED:
                needed = "it needs the rights to list and read below it"
                raise ModelError(f"{place}: the store denies it ({told}); {needed}") from None
            if failure is Failure.MALFORMED:
                raise ModelError(f"{place}: no place in a store ({told})") from None
            raise EnvironmentFailed(f"{place}: {told}; fix it, then run again") from None


def _files_of(listed: list[dict[str, Any]], below: str = "") -> list[_Remote]:
    """The files of a listing. `below`: the listed folder as names begin with it, where it is not the model's own."""
    files = [e for e in listed if e["type"] == "file" and not e["name"].endswith("/")]
    return [_Remote(below + e["name"].rpartition("/")[2], e["name"], int(e["size"]), _tag_of(e)) for e in files]


def _tag_of(entry: Mapping[str, Any]) -> str:
    for key in ("ETag", "etag", "md5", "LastModified", "last_modified", "mtime", "created"):
        if entry.get(key):
            return str(entry[key]).strip('"')
    return ""


def _whole(entry: Path, read_all: bool = False) -> bool:
    """Return whether every file of the entry is as it was downloaded: by size and mtime, or with `read_all`, and of a
    file that was touched since, by its sha256."""
    try:
        manifest = {name: _Stored(**stored) for name, stored in json.loads((entry / MANIFEST).read_bytes()).items()}
        return all(_same(entry / name, stored, read_all) for name, stored in manifest.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _same(path: Path, stored: _Stored, read_all: bool) -> bool:
    status = path.stat()
    if status.st_size != stored.size:
        return False
    is_touched = status.st_mtime_ns != stored.mtime_ns
    if (is_touched or read_all) and _sha256(path) != stored.sha256:
        return False
    if is_touched:  # as by a copy of the cache: its next check is by mtime again
        with suppress(OSError):
            os.utime(path, ns=(status.st_atime_ns, stored.mtime_ns))
    return True


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(model: _StoredModel, files: list[_Remote], entry: Path, say: Say) -> None:
    total = sum(f.size for f in files)
    free = shutil.disk_usage(entry.parent).free
    if total > free:
        raise EnvironmentFailed(
            f"{entry.parent}: the model {model.shown} needs {total / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; "
            "make room, or set PIPELINE_CACHE to a folder on a larger disk"
        )
    temporary = entry.parent / f".{entry.name}.{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        done, manifest = 0, {}
        for file in files:
            (temporary / file.name).parent.mkdir(exist_ok=True)
            say(f"downloading the model: {file.name}, {done / 1e9:.2f} of {total / 1e9:.2f} GB")
            path = temporary / file.name
            _read_ranges(model, file, path)
            manifest[file.name] = asdict(_Stored(file.size, path.stat().st_mtime_ns, _sha256(path)))
            done += file.size
        now = model.files()
        if changed := [file for file in files if file not in now]:  # so its ranges may be of two files
            raise model.replaced(changed[0])
        with open(temporary / MANIFEST, "w") as out:
            json.dump(manifest, out)
            out.flush()
            os.fsync(out.fileno())
        for folder in {(temporary / f.name).parent for f in files}:
            sync_folder(folder)
        try:
            os.rename(temporary, entry)
        except OSError:
            if not _whole(entry):  # a disk without locks let another process make it
                raise
        sync_folder(entry.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_ranges(model: _StoredModel, file: _Remote, path: Path) -> None:
    with open(path, "wb") as out, ThreadPoolExecutor(NUM_RANGES) as pool:

        def read(start: int) -> None:
            stop = min(start + RANGE_BYTES, file.size)
            with model.asking():
                data = model.fs.cat_file(file.path, start, stop)
            if len(data) != stop - start:
                raise model.replaced(file)
            view = memoryview(data)
            while view:
                written = os.pwrite(out.fileno(), view, start)
                view, start = view[written:], start + written

        for _ in pool.map(read, range(0, file.size, RANGE_BYTES)):
            pass
        os.fsync(out.fileno())


def _remove(cache: Path, entry: Path) -> None:
    """Remove what is left of a damaged entry and of writers that died. The caller is alone with this entry."""
    if entry.exists():
        entry.rename(cache / f".{entry.name}.{secrets.token_hex(8)}")
    for leftover in cache.glob(f".{entry.name}.*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Wait for other processes that make the same entry; the lock ends with its holder.

    False on a disk without locks: then two may download, and one rename wins.
    """
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone


@contextmanager
def _disk(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise EnvironmentFailed(
            f"{e.filename or cache}: {e.strerror or e}; make room or fix the disk, or set PIPELINE_CACHE to another "
            "folder, then run again"
        ) from e
