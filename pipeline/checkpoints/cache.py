"""A model folder behind an fsspec url, downloaded once per machine into a cache and checked.

An entry is named for the url and for every file's name, size and tag in the store, so a model that was replaced there
is another entry. It appears whole or not at all: files are written below a temporary name, synced, and the folder
renamed. Of processes that want the same model at once one downloads, the others wait for it.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.checkpoints.locate import PATTERNS
from pipeline.errors import EnvironmentFailed, ModelError, PipelineError
from pipeline.stores.redaction import shown_url
from pipeline.stores.storage import RemoteFilesystem, RetryCounts, filesystem, md5
from pipeline.stores.store_errors import is_malformed

MANIFEST = ".manifest.json"  # in an entry: file name -> what `_Stored` says of it
RANGE_BYTES = 16 * 2**20
NUM_RANGES = 8  # read at once, so that much memory
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# part sizes of the usual uploaders: the AWS tools, s3fs and others
_PART_BYTES = [n * 2**20 for n in (5, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 256, 512, 1024)]

Digest = Callable[[Path], str]
Say = Callable[[str], None]


@dataclass(frozen=True)
class _Remote:
    """A file as the store lists it."""

    name: str
    path: str
    size: int
    tag: str  # changes with the file


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where downloaded models are kept: $PIPELINE_CACHE/models, or below the user's ~/.cache."""
    root = environ.get("PIPELINE_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "parquet-batch-inference") / "models"


def fetch_model(
    url: str,
    storage: Mapping[str, Any],
    cache: Path,
    digest: Digest,
    say: Say,
    retries: RetryCounts | None = None,
    key: str = "model.path",
) -> Path:
    """The local folder with the model's files: from the cache where they are whole there, else downloaded.

    digest: of one local file; it is recorded, and compared whenever the entry is used. key: of the job file, which
    errors name with the url. Raises ModelError when the
    url holds no model that can be served, EnvironmentFailed when the store or the disk fails.
    """
    shown = f"{key} {shown_url(url)}"
    try:
        fs, root = filesystem(url, storage, retries=retries)
    except (ImportError, ValueError, TypeError) as e:
        raise ModelError(
            f"{shown}: cannot be opened ({type(e).__name__}); is {url.partition('://')[0]}:// right, its "
            f"library installed, and are these its options: {', '.join(sorted(storage)) or 'none given'}?"
        ) from None
    if not isinstance(fs, RemoteFilesystem):
        return Path(root)
    files = _model_files(fs, root, shown)
    identity = [shown_url(url), *(f"{f.name} {f.size} {f.tag}" for f in files)]
    entry = cache / hashlib.sha256("\n".join(identity).encode()).hexdigest()[:32]
    if _whole(entry, digest):
        return entry
    with _disk(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{entry.name}.lock") as alone:
            if not _whole(entry, digest):  # no other process has made it while this one waited
                if alone:
                    _remove(cache, entry)
                _download(fs, files, entry, shown, digest, say)
    return entry


def _model_files(fs: RemoteFilesystem, root: str, shown: str) -> list[_Remote]:
    with _store(fs, shown):
        listed = [e for e in fs.ls(root) if e["type"] == "file" and not e["name"].endswith("/")]
    there = [_Remote(e["name"].rpartition("/")[2], e["name"], int(e["size"]), _tag_of(e)) for e in listed]
    files = sorted((f for f in there if any(fnmatch(f.name, p) for p in PATTERNS)), key=lambda f: f.name)
    names = [f.name for f in files]
    if "config.json" not in names:
        raise ModelError(f"{shown}: has no config.json; it must be the folder of one model")
    if not any(fnmatch(n, "*.safetensors") for n in names):
        pickles = [f.name for f in there if any(fnmatch(f.name, p) for p in _PICKLES)]
        why = f"only pickles ({pickles[0]}), which can run code and are never read" if pickles else "no weights"
        raise ModelError(f"{shown}: {why}; it needs *.safetensors files")
    return files


def _tag_of(entry: Mapping[str, Any]) -> str:
    for key in ("ETag", "etag", "md5", "LastModified", "last_modified", "mtime", "created"):
        if entry.get(key):
            return str(entry[key]).strip('"')
    return ""


def _whole(entry: Path, digest: Digest) -> bool:
    """Whether every file of the entry is there as it was when it was made."""
    try:
        manifest = json.loads((entry / MANIFEST).read_bytes())
        return all(
            (entry / name).stat().st_size == stored["size"] and digest(entry / name) == stored["digest"]
            for name, stored in manifest.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _download(fs: RemoteFilesystem, files: list[_Remote], entry: Path, shown: str, digest: Digest, say: Say) -> None:
    total = sum(f.size for f in files)
    free = shutil.disk_usage(entry.parent).free
    if total > free:
        raise EnvironmentFailed(
            f"{entry.parent}: {shown} needs {total / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; make "
            "room, or set PIPELINE_CACHE to a folder on a larger disk"
        )
    temporary = entry.parent / f".{entry.name}.{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        done = 0
        for file in files:
            say(f"downloading the model: {file.name}, {done / 1e9:.2f} of {total / 1e9:.2f} GB")
            _download_file(fs, file, temporary / file.name, shown)
            done += file.size
        manifest = {f.name: {"size": f.size, "digest": digest(temporary / f.name), "tag": f.tag} for f in files}
        with open(temporary / MANIFEST, "w") as out:
            json.dump(manifest, out)
            out.flush()
            os.fsync(out.fileno())
        _sync_folder(temporary)
        try:
            os.rename(temporary, entry)
        except OSError:
            if not _whole(entry, digest):  # a disk without locks let another process make it
                raise
        _sync_folder(entry.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _download_file(fs: RemoteFilesystem, file: _Remote, path: Path, shown: str) -> None:
    """One file, seen to be what the store has as far as its tag tells."""
    before = None
    while True:
        _read_ranges(fs, file, path, shown)
        if _matches(path, file.tag) is not False:
            return
        # a tag that looks like an MD5 and is none: damaged on the way, or encrypted by a key service
        with open(path, "rb") as written:
            now = hashlib.file_digest(written, "sha256").digest()
        if now == before:
            break
        before = now
    with _store(fs, shown):
        tag = _tag_of(fs.info(file.path))
    if tag != file.tag:
        raise EnvironmentFailed(f"{shown}/{file.name}: was replaced while it was downloaded; run again")


def _read_ranges(fs: RemoteFilesystem, file: _Remote, path: Path, shown: str) -> None:
    with open(path, "wb") as out, ThreadPoolExecutor(NUM_RANGES) as pool:

        def read(start: int) -> None:
            stop = min(start + RANGE_BYTES, file.size)
            with _store(fs, shown):
                data = fs.cat_file(file.path, start, stop)
            if len(data) != stop - start:
                raise EnvironmentFailed(f"{shown}/{file.name}: was replaced while it was downloaded; run again")
            view = memoryview(data)
            while view:
                written = os.pwrite(out.fileno(), view, start)
                view, start = view[written:], start + written

        for _ in pool.map(read, range(0, file.size, RANGE_BYTES)):
            pass
        os.fsync(out.fileno())


def _matches(path: Path, tag: str) -> bool | None:
    """Whether the file's MD5 is what an S3 store's entity tag says; None where the tag does not tell."""
    digest, _, num_parts = tag.partition("-")
    if len(digest) != 32 or set(digest) - set("0123456789abcdef"):
        return None
    if not num_parts:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == digest
    size = path.stat().st_size
    for part_bytes in _PART_BYTES:
        if num_parts == str(-(-size // part_bytes)) and _multipart_md5(path, part_bytes) == digest:
            return True
    return None  # uploaded in parts of another size


def _multipart_md5(path: Path, part_bytes: int) -> str:
    """S3's entity tag of a file uploaded in parts, without their number: the MD5 of the parts' MD5s."""
    parts = b""
    with open(path, "rb") as file:
        while part := file.read(part_bytes):
            parts += bytes.fromhex(md5(part))
    return md5(parts)


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


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _disk(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise EnvironmentFailed(
            f"{e.filename or cache}: {e.strerror or e}; make room or fix the disk, or set PIPELINE_CACHE to another "
            "folder, then run again"
        ) from e


@contextmanager
def _store(fs: RemoteFilesystem, shown: str) -> Iterator[None]:
    """Turn what the store's library raises into errors of the model, without secrets."""
    try:
        yield
    except FileNotFoundError:
        raise ModelError(f"{shown}: no such folder in the store") from None
    except PermissionError as e:
        raise ModelError(
            f"{shown}: the store denies it ({fs.said(e)}); it needs the rights to list and read below it"
        ) from None
    except Exception as e:
        # the libraries behind fsspec have their own exceptions and no common base; a builtin is a defect
        if isinstance(e, PipelineError) or (type(e).__module__ == "builtins" and not isinstance(e, OSError)):
            raise
        if is_malformed(e):
            raise ModelError(f"{shown}: no place in a store ({fs.said(e)})") from None
        raise EnvironmentFailed(f"{shown}: {fs.said(e)}; fix it, then run again") from None
