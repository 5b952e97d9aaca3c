"""Output folder in an object store.

A file is written by one PUT. Creating a file uses a PUT that refuses to replace: If-None-Match on S3, mode "create" of
other fsspec filesystems. Multipart uploads are never used, since a dead writer would leave pieces behind. If the
response to a PUT is lost, the retry finds the name taken: a file with the same bytes is then ours. Every write is
verified by its entity tag, or read back if the tag is not the MD5 of the bytes.
"""

import posixpath
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO, Any, cast

from pipeline.errors import EnvironmentFailed, OutputError, PipelineError
from pipeline.stores.failpoints import hit
from pipeline.stores.filesystem import RemoteFilesystem, filesystem, md5, open_problem, protocols
from pipeline.stores.folder import TMP, Folder, check_name
from pipeline.stores.redaction import shown_url
from pipeline.stores.retries import RetryCounts
from pipeline.stores.store_errors import SET_CREDENTIALS, Failure, PreconditionFailed, failure_of

_TRIES = 3  # writes of a file that the store acknowledges, but then does not return intact


def open_objects(
    url: str, options: Mapping[str, Any], retries: RetryCounts | None = None, option: str = "output.path"
) -> "ObjectFolder":
    """Return the folder of a url, without a request to S3. Raises OutputError if it cannot be an output. option: the
    key or option that gave the url, for messages."""
    shown = shown_url(url).rstrip("/")
    if "::" in url:
        raise OutputError(f"{option} {shown}: a chain of filesystems cannot create files exclusively; use a single url")
    try:
        fs, root = filesystem(url, options, retries=retries)
    except (ImportError, ValueError, TypeError, OSError) as e:
        raise OutputError(f"{option} {shown}: {open_problem(url, options, e)}") from None
    if "memory" in protocols(fs):
        raise OutputError(f"{option} {shown}: memory:// exists in one process only; use a disk or an object store")
    return ObjectFolder(cast(RemoteFilesystem, fs), root.rstrip("/"), shown)


class ObjectFolder(Folder):
    """Output folder in a store that supports exclusive creation."""

    reads_at_once = 32  # latency dominates

    def __init__(self, fs: RemoteFilesystem, root: str, shown: str) -> None:
        self._fs = fs
        self._root = root
        self._shown = shown

    def __repr__(self) -> str:
        return f"ObjectFolder({self._shown})"

    def shown(self, name: str = "") -> str:
        return f"{self._shown}/{name}" if name else self._shown

    def path(self, name: str) -> str:
        check_name(name)
        return f"{self._root}/{name}"

    def names(self, folder: str = "") -> list[str]:
        return sorted(name for name, _ in self._listed(folder))

    def each_name(self) -> Iterator[str]:
        return (name for name, _ in self._each())

    def each_size(self) -> Iterator[tuple[str, int]]:
        return ((name, size) for name, size in self._each() if size is not None)

    def _each(self) -> Iterator[tuple[str, int | None]]:
        found = False
        for page in self._pages() if self._fs.is_s3 else ():
            found = found or bool(page)
            yield from page
        if not found:  # no children: the root may be a file
            yield from self._listed("")

    def _pages(self) -> Iterator[list[tuple[str, int | None]]]:
        with self._reading(""), suppress(FileNotFoundError):
            yield from self._fs.pages(self._root)

    def _listed(self, folder: str) -> list[tuple[str, int | None]]:
        """Return the folder's direct children as (name, size in bytes); the size of a folder is None."""
        path = self.path(folder) if folder else self._root
        with self._reading(folder):
            try:
                entries = self._fs.ls(path)
            except FileNotFoundError:
                return []
        path = path.lstrip("/")
        if [(e["name"].lstrip("/"), e["type"]) for e in entries] == [(path, "file")]:
            raise OutputError(f"{self.shown(folder)}: is a file; expected a folder")
        # skip the empty object named like the folder, which web consoles create
        return [
            (posixpath.basename(e["name"].rstrip("/")), int(e["size"]) if e["type"] == "file" else None)
            for e in entries
            if e["name"].strip("/") != path
        ]

    def has(self, name: str) -> bool:
        with self._reading(name):
            return self._fs.exists(self.path(name))

    def read_tagged(self, name: str) -> tuple[bytes, str] | None:
        with self._reading(name):
            try:
                data, tag = self._fs.whole(self.path(name))
            except FileNotFoundError:
                return None
        return data, tag or md5(data)

    def open(self, name: str) -> IO[bytes]:
        with self._reading(name, absent=FileNotFoundError):
            return cast(IO[bytes], self._fs.open(self.path(name)))

    def tail(self, name: str, length: int) -> bytes:
        with self._reading(name, absent=FileNotFoundError):
            return self._fs.tail(self.path(name), length)

    def create(self, name: str, data: bytes, point: str = "file") -> bool:
        for _ in range(_TRIES):
            with self._writing(name):
                hit(f"{point}.serialized")
                try:
                    tag = self._fs.pipe_file(self.path(name), data, mode="create")
                except FileExistsError:
                    existing = self.read(name)
                    if existing is None:
                        continue  # removed in the meantime
                    return existing == data
                hit(f"{point}.linked")
            if self._is_stored(name, data, tag):
                return True
            self.remove(name)
        raise self._lost_write(name)

    def replace(self, name: str, data: bytes) -> None:
        for _ in range(_TRIES):
            with self._writing(name):
                tag = self._fs.pipe_file(self.path(name), data)
            # other bytes mean that another writer has replaced the file since, after ours was complete
            if tag == md5(data) or self.read(name) is not None:
                return
        raise self._lost_write(name)

    def swap(self, name: str, data: bytes, tag: str) -> bool:
        with self._writing(name):
            hit("swap.serialized")
            try:
                written = self._fs.pipe_file(self.path(name), data, if_match=tag)
            except (PreconditionFailed, FileNotFoundError):
                return self.read(name) == data  # the response to an earlier try may have been lost
            hit("swap.replaced")
        if not self._is_stored(name, data, written):
            raise self._lost_write(name)
        return True

    def remove(self, name: str) -> None:
        with self._writing(name), suppress(FileNotFoundError):
            self._fs.rm_file(self.path(name))

    def clean_tmp(self) -> int:
        """Do nothing: a dead writer leaves no file and no upload."""
        return 0

    def probe(self) -> None:
        name = f"{TMP}/probe-{secrets.token_hex(8)}"
        refused = f"output.path {self._shown}: this store cannot be an output"
        if _looks_then_writes(self._fs.raw):
            raise OutputError(
                f"{refused}: its fsspec filesystem ({protocols(self._fs)[0]}) has no exclusive create, so two runs "
                "could undo each other's work; use S3, Google Cloud Storage, Azure or a local disk"
            )
        try:
            with self._reading(TMP):
                self._put_new(name, b"first")
                try:
                    self._fs.pipe_file(self.path(name), b"second", mode="create")
                except FileExistsError:
                    kept = True
                else:
                    kept = False
                data, _ = self._fs.whole(self.path(name))
                self._fs.rm_file(self.path(name))
        except (NotImplementedError, TypeError, ValueError) as e:
            raise OutputError(
                f"{refused}: it cannot create a file exclusively ({type(e).__name__}); use another store"
            ) from e
        if not kept:
            raise OutputError(
                f"{refused}: it ignores If-None-Match and replaced an existing file, so two runs could undo each "
                "other's work; update it or use another store"
            )
        if data != b"first":
            raise EnvironmentFailed(f"{self.shown(name)}: a file that was just written reads back differently")

    def probe_swap(self) -> None:
        refused = f"output.path {self._shown}: parts cannot be rewritten here"
        if not self._fs.is_s3:
            raise OutputError(
                f"{refused}: only S3 and local disks support replacing a file if it is unchanged, "
                f"{protocols(self._fs)[0]} does not; write to a new output instead"
            )
        name = f"{TMP}/probe-{secrets.token_hex(8)}"
        with self._reading(TMP):
            self._put_new(name, b"first")
            tag = self._fs.whole(self.path(name))[1] or ""
            try:
                self._fs.pipe_file(self.path(name), b"second", if_match=tag)
                self._fs.pipe_file(self.path(name), b"third", if_match=tag)
            except PreconditionFailed:
                kept = self._fs.whole(self.path(name))[0] == b"second"
            else:
                kept = False
            self._fs.rm_file(self.path(name))
        if not kept:
            raise OutputError(
                f"{refused}: the store ignores If-Match, so two runs could undo each other's work; write to a new "
                "output instead"
            )

    def _put_new(self, name: str, data: bytes) -> None:
        """Create a file with a unique name. If it exists with the same bytes, an earlier try succeeded."""
        try:
            self._fs.pipe_file(self.path(name), data, mode="create")
        except FileExistsError:
            if self._fs.whole(self.path(name))[0] != data:
                raise

    def _is_stored(self, name: str, data: bytes, tag: str | None) -> bool:
        """Return whether the store holds the written bytes."""
        return tag == md5(data) or self.read(name) == data

    def _lost_write(self, name: str) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"{self.shown(name)}: the upload was acknowledged, but reading it back returned different or no data; fix "
            "the store, then run again"
        )

    def _reading(self, name: str, absent: type[Exception] = OutputError) -> AbstractContextManager[None]:
        """Translate errors of reads and probes. These run first, so a refusal is an OutputError for the user to fix."""
        return self._failing(name, OutputError, absent)

    def _writing(self, name: str) -> AbstractContextManager[None]:
        """Translate errors of writes. The probe has passed, so a refusal stops the job, which can be resumed."""
        return self._failing(name, EnvironmentFailed, OutputError)

    @contextmanager
    def _failing(self, name: str, denied: type[PipelineError], absent: type[Exception]) -> Iterator[None]:
        """Turn errors of the store's library into ours, with the path and without secrets."""
        path = self.shown(name)
        try:
            yield
        except Exception as e:
            failure, message = failure_of(e), self._fs.error_text(e)
            if failure is None and isinstance(e, (ValueError, NotImplementedError)):  # its library refused the path
                raise denied(f"{path}: {message}") from None
            if failure is None:
                raise
            if failure is Failure.ABSENT:
                raise absent(f"{path}: no such bucket or container ({message}); create it first") from None
            if failure is Failure.CREDENTIALS:
                raise denied(f"{path}: {message}; {SET_CREDENTIALS}") from None
            if failure is Failure.DENIED:
                needed = "grant the rights to list, read, write and delete below output.path"
                raise denied(f"{path}: access denied ({message}); {needed}") from None
            if failure is Failure.SYSTEM:
                raise EnvironmentFailed(f"{path}: {message}; fix it, then run again") from None
            raise denied(f"{path}: {message}") from None


def _looks_then_writes(fs: Any) -> bool:
    """Return whether mode "create" is fsspec's default: a check and then a write, which two writers can interleave."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if isinstance(fs, AsyncFileSystem):
        return type(fs)._pipe_file is AsyncFileSystem._pipe_file
    return type(fs).pipe_file is AbstractFileSystem.pipe_file
