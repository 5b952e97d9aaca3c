"""An output folder in an object store: a file appears by one PUT, and under a new name by one that refuses to
replace (If-None-Match on S3; whatever the store's fsspec filesystem does for mode "create" elsewhere).

Never a multipart upload: it would leave pieces behind when its writer dies. A PUT whose answer is lost is tried
again and then finds the name taken, so "it exists" means "look what is there": the same bytes are ours.
What was written is compared by its entity tag, or read back where the tag is not the MD5 of the bytes.
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

_TRIES = 3  # how often a file is written anew that the store took and then has not, or has otherwise


def open_objects(
    url: str, options: Mapping[str, Any], retries: RetryCounts | None = None, what: str = "output.path"
) -> "ObjectFolder":
    """The folder of a url. No request is made to S3. Raises OutputError when there cannot be one, with `what`: the key
    or option that gave the url."""
    shown = shown_url(url).rstrip("/")
    if "::" in url:
        raise OutputError(f"{what} {shown}: a chain of filesystems cannot create files exclusively; give one url")
    try:
        fs, root = filesystem(url, options, retries=retries)
    except (ImportError, ValueError, TypeError, OSError) as e:
        raise OutputError(f"{what} {shown}: {open_problem(url, options, e)}") from None
    if "memory" in protocols(fs):
        raise OutputError(f"{what} {shown}: lies in the memory of one process and ends with it; give a disk or a store")
    return ObjectFolder(cast(RemoteFilesystem, fs), root.rstrip("/"), shown)


class ObjectFolder(Folder):
    """As `folder.Folder`, over one store that can create exclusively."""

    reads_at_once = 32  # mostly waited for

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
        if not found:  # nothing below it: it may be a file
            yield from self._listed("")

    def _pages(self) -> Iterator[list[tuple[str, int | None]]]:
        with self._reading(""), suppress(FileNotFoundError):
            yield from self._fs.pages(self._root)

    def _listed(self, folder: str) -> list[tuple[str, int | None]]:
        """Names with their bytes; None: a folder."""
        path = self.path(folder) if folder else self._root
        with self._reading(folder):
            try:
                entries = self._fs.ls(path)
            except FileNotFoundError:
                return []
        path = path.lstrip("/")
        if [(e["name"].lstrip("/"), e["type"]) for e in entries] == [(path, "file")]:
            raise OutputError(f"{self.shown(folder)}: is a file, expected a folder")
        # an empty object named like the folder, as consoles make them, is not in it
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
                    there = self.read(name)
                    if there is None:
                        continue  # removed since
                    return there == data
                hit(f"{point}.linked")
            if self._stands(name, data, tag):
                return True
            self.remove(name)
        raise self._broken(name)

    def replace(self, name: str, data: bytes) -> None:
        for _ in range(_TRIES):
            with self._writing(name):
                tag = self._fs.pipe_file(self.path(name), data)
            # another writer may have replaced it since: then ours stood, and that is enough
            if tag == md5(data) or self.read(name) is not None:
                return
        raise self._broken(name)

    def swap(self, name: str, data: bytes, tag: str) -> bool:
        with self._writing(name):
            hit("swap.serialized")
            try:
                written = self._fs.pipe_file(self.path(name), data, if_match=tag)
            except (PreconditionFailed, FileNotFoundError):
                return self.read(name) == data  # the answer of an earlier try may have been lost
            hit("swap.replaced")
        if not self._stands(name, data, written):
            raise self._broken(name)
        return True

    def remove(self, name: str) -> None:
        with self._writing(name), suppress(FileNotFoundError):
            self._fs.rm_file(self.path(name))

    def clean_tmp(self) -> int:
        """Nothing: a writer that dies leaves no file and no upload."""
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
                f"{refused}: it does not know how to create a file only where none is ({type(e).__name__})"
            ) from e
        if not kept:
            raise OutputError(
                f"{refused}: it let a second file replace the first one of the same name (If-None-Match is ignored), "
                "so two runs could undo each other's work; update it or use another store"
            )
        if data != b"first":
            raise EnvironmentFailed(f"{self.shown(name)}: a file just written reads back differently")

    def probe_swap(self) -> None:
        refused = f"output.path {self._shown}: parts cannot be rewritten here"
        if not self._fs.is_s3:
            raise OutputError(
                f"{refused}: replacing a file only if it is unchanged is known of S3 and local disks only, not of "
                f"{protocols(self._fs)[0]}; write to a new output instead"
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
                f"{refused}: the store does not heed If-Match, so two runs could undo each other's work; write to a "
                "new output instead"
            )

    def _put_new(self, name: str, data: bytes) -> None:
        """Create a file that only we can have made, also where the answer to an earlier try was lost."""
        try:
            self._fs.pipe_file(self.path(name), data, mode="create")
        except FileExistsError:
            if self._fs.whole(self.path(name))[0] != data:
                raise

    def _stands(self, name: str, data: bytes, tag: str | None) -> bool:
        """Whether the store has what was written."""
        return tag == md5(data) or self.read(name) == data

    def _broken(self, name: str) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"{self.shown(name)}: the store said that it took the file, and has other bytes or none; see to the store, "
            "then run again"
        )

    def _reading(self, name: str, absent: type[Exception] = OutputError) -> AbstractContextManager[None]:
        """Reading and probing come first: what the store does not allow is the user's to change."""
        return self._failing(name, OutputError, absent)

    def _writing(self, name: str) -> AbstractContextManager[None]:
        """The probe has passed: what the store does not allow any more stops the job, resumably."""
        return self._failing(name, EnvironmentFailed, OutputError)

    @contextmanager
    def _failing(self, name: str, denied: type[PipelineError], absent: type[Exception]) -> Iterator[None]:
        """Turn what the store's library raises into errors with the place and without secrets."""
        place = self.shown(name)
        try:
            yield
        except Exception as e:
            failure, told = failure_of(e), self._fs.said(e)
            if failure is None and isinstance(e, (ValueError, NotImplementedError)):  # a path that its library refuses
                raise denied(f"{place}: {told}") from None
            if failure is None:
                raise
            if failure is Failure.ABSENT:
                raise absent(f"{place}: no such bucket or container ({told}); make it first") from None
            if failure is Failure.CREDENTIALS:
                raise denied(f"{place}: {told}; {SET_CREDENTIALS}") from None
            if failure is Failure.DENIED:
                needed = "it needs the rights to list, read, write and delete below output.path"
                raise denied(f"{place}: the store denies it ({told}); {needed}") from None
            if failure is Failure.SYSTEM:
                raise EnvironmentFailed(f"{place}: {told}; fix it, then run again") from None
            raise denied(f"{place}: {told}") from None


def _looks_then_writes(fs: Any) -> bool:
    """Whether "create" is fsspec's own: see that there is none, then write, which two writers can do at once."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if isinstance(fs, AsyncFileSystem):
        return type(fs)._pipe_file is AsyncFileSystem._pipe_file
    return type(fs).pipe_file is AbstractFileSystem.pipe_file
