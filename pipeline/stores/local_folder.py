"""Output folder on a local disk or a mounted network disk.

Bytes are written to a temporary file and synced. A hard link then gives the file its name. It fails if the name is
taken, so exactly one of several writers wins and the others notice. A writer locks its temporary file; an unlocked file
is a leftover. Deleting a live writer's file by accident costs it a retry, never a row.
"""

import errno
import fcntl
import os
import posixpath
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pipeline.errors import EnvironmentFailed, OutputError
from pipeline.stores.failpoints import hit
from pipeline.stores.folder import TMP, Folder, check_name

_TRIES = 5  # writes of a temporary file that vanishes
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)  # from filesystems that cannot sync a folder and need not


class LocalFolder(Folder):
    """Output folder on a disk."""

    reads_at_once = 8

    def __init__(self, root: str) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(root)))

    def shown(self, name: str = "") -> str:
        return str(self.root / name)

    def path(self, name: str) -> Path:
        check_name(name)
        return self.root.joinpath(*name.split("/"))

    def make(self) -> None:
        """Make the root and its folder for temporary files. Raises OSError."""
        (self.root / TMP).mkdir(parents=True, exist_ok=True)
        sync_folder(self.root)

    def names(self, folder: str = "") -> list[str]:
        return sorted(entry.name for entry in self._each(folder))

    def each_name(self) -> Iterator[str]:
        return (entry.name for entry in self._each(""))

    def each_size(self) -> Iterator[tuple[str, int]]:
        for entry in self._each(""):
            with suppress(FileNotFoundError):  # removed since
                if entry.is_file():
                    yield entry.name, entry.stat().st_size

    def _each(self, folder: str) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(self.path(folder) if folder else self.root) as entries:
                yield from entries
        except FileNotFoundError:
            return
        except NotADirectoryError as e:
            file = self.root if self.root.is_file() else self.root / folder
            raise OutputError(f"{file}: is a file; expected a folder") from e
        except OSError as e:
            raise EnvironmentFailed(f"{self.root / folder}: cannot be listed: {e.strerror}") from e

    def has(self, name: str) -> bool:
        return self.path(name).exists()

    def open(self, name: str) -> IO[bytes]:
        return open(self.path(name), "rb")

    def tail(self, name: str, length: int) -> bytes:
        with open(self.path(name), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - length))
            return file.read()

    def create(self, name: str, data: bytes, point: str = "file") -> bool:
        def link(temporary: Path, final: Path) -> bool:
            _check(temporary, data)
            try:
                os.link(temporary, final)
            except FileExistsError:
                # a network disk may have made the link and lost the response: then the file is ours
                return os.path.samefile(temporary, final)
            return True

        return self._publish(name, data, point, link)

    def replace(self, name: str, data: bytes) -> None:
        self._publish(name, data, "file", lambda temporary, final: os.replace(temporary, final) or True)

    def _publish(self, name: str, data: bytes, point: str, give_name: Callable[[Path, Path], bool]) -> bool:
        """Write a temporary file and pass it to `give_name`. Return the result of `give_name`."""
        final = self.path(name)
        for _ in range(_TRIES):
            with self._failing(final), self._temporary(name, data, point) as temporary:
                try:
                    final.parent.mkdir(parents=True, exist_ok=True)
                    made = give_name(temporary, final)
                except FileNotFoundError:
                    continue  # another process removed the temporary file
                hit(f"{point}.linked")
                # sync an existing file's name too: its writer may have died before this, and the caller relies on it
                sync_folder(final.parent)
                hit(f"{point}.dir_synced")
                return made
        raise EnvironmentFailed(
            f"{final}: temporary files in {self.root / TMP} disappear during writes; stop what removes them"
        )

    def read_tagged(self, name: str) -> tuple[bytes, str] | None:
        try:
            with open(self.path(name), "rb") as file:
                return file.read(), _tag(file.fileno())
        except FileNotFoundError:
            return None
        except NotADirectoryError as e:
            raise OutputError(f"{self.root}: is a file or a path inside one; expected a folder") from e
        except OSError as e:
            raise EnvironmentFailed(f"{self.path(name)}: cannot be read: {e.strerror}") from e

    def swap(self, name: str, data: bytes, tag: str) -> bool:
        """Swap as in `Folder.swap`. Concurrent swaps wait for the lock of the existing file; the second one then sees
        that the name belongs to another file."""
        final = self.path(name)
        with self._failing(final):
            try:
                current_fd = os.open(final, os.O_RDONLY)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(current_fd, fcntl.LOCK_EX)
                if _tag(current_fd) != tag or not os.path.samestat(os.fstat(current_fd), os.stat(final)):
                    return False
                with self._temporary(name, data, "swap") as temporary:
                    _check(temporary, data)
                    os.replace(temporary, final)
                    hit("swap.replaced")
                    sync_folder(final.parent)
                return True
            finally:
                os.close(current_fd)

    def remove(self, name: str) -> None:
        with self._failing(self.path(name)):
            self.path(name).unlink(missing_ok=True)

    def clean_tmp(self) -> int:
        removed = 0
        for name in self.names(TMP):
            path = self.root / TMP / name
            with self._failing(path), suppress(FileNotFoundError):  # the writer may remove it first
                fd = os.open(path, os.O_RDWR)
                try:
                    if _lock(fd):
                        path.unlink()
                        removed += 1
                finally:
                    os.close(fd)
        return removed

    def probe(self) -> None:
        name = f"{TMP}/probe-{secrets.token_hex(8)}"
        try:
            self.make()
            with self._temporary(name, b"probe", "file") as temporary:
                os.link(temporary, self.path(name))
                try:
                    os.link(temporary, self.path(name))
                except FileExistsError:
                    pass
                else:
                    raise OutputError(
                        f"output.path {self.root}: a hard link replaced an existing file on this filesystem, so two "
                        "runs could undo each other's work; use another disk"
                    )
                whole = self.path(name).read_bytes() == b"probe"
                self.path(name).unlink()
        except OSError as e:
            if e.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK) and os.access(self.root / TMP, os.W_OK):
                raise OutputError(
                    f"output.path {self.root}: this filesystem does not support hard links, which exclusive creation "
                    "needs; use another disk"
                ) from e
            if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE):
                raise EnvironmentFailed(f"output.path {self.root}: {e.strerror}") from e
            raise OutputError(f"output.path {self.root}: cannot be written: {e.strerror} ({e.filename})") from e
        if not whole:
            raise EnvironmentFailed(f"output.path {self.root}: a file that was just written reads back differently")

    def probe_swap(self) -> None:
        """Do nothing: `swap` needs only renames, and a disk that passes `probe` supports them."""

    @contextmanager
    def _temporary(self, name: str, data: bytes, point: str) -> Iterator[Path]:
        """Write a synced temporary file. It is locked inside the context and removed afterwards."""
        path = self.root / TMP / f"{posixpath.basename(name)}.{secrets.token_hex(8)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            _lock(fd)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            hit(f"{point}.serialized")
            os.fsync(fd)
            hit(f"{point}.synced")
            yield path
        finally:
            with suppress(FileNotFoundError):
                path.unlink()
            os.close(fd)

    @contextmanager
    def _failing(self, path: Path) -> Iterator[None]:
        """Turn OSError into EnvironmentFailed with the path."""
        try:
            yield
        except OSError as e:
            raise EnvironmentFailed(
                f"{path}: {e.strerror or e}; free some space or fix the disk, then run again"
            ) from e


def _check(path: Path, data: bytes) -> None:
    """Raise EnvironmentFailed unless the file on disk holds these bytes."""
    written = path.read_bytes()
    if written != data:
        raise EnvironmentFailed(f"{path}: wrote {len(data)} bytes, but read back {len(written)} or different bytes")


def _tag(fd: int) -> str:
    """Return a tag that identifies this version of a file; files are never changed in place."""
    status = os.fstat(fd)
    return f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _lock(fd: int) -> bool:
    """Lock the file until it is closed. Return False if another process holds the lock or the disk has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sync_folder(path: Path) -> None:
    """Sync a folder, which makes its names durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)
