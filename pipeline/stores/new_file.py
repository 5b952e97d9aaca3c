"""New file that is written in pieces, appears atomically and never replaces another.

On a disk, the pieces go to a hidden file in the same folder, which gets its name by a hard link. For an object store,
they go to a local temporary file, which is read into memory and uploaded by one request. A file named `*.gz` or `*.zst`
is compressed.
"""

import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from pipeline.errors import EnvironmentFailed, OutputError
from pipeline.stores.filesystem import local_path
from pipeline.stores.folder import Folder
from pipeline.stores.local_folder import LocalFolder, sync_folder
from pipeline.stores.object_folder import open_objects
from pipeline.stores.redaction import shown_url

MAX_OBJECT_BYTES = 4 * 2**30  # an object store takes 5 GB in one request
CODECS = {".gz": "gzip", ".zst": "zstd"}  # by the end of the name
_COMPARED_BYTES = 1 << 20


class NewFile:
    """New file at a local path or an fsspec url, which appears on `publish`.

    A context manager: leaving it discards an unpublished file. Raises EnvironmentFailed if a disk or store fails,
    OutputError if the path cannot be used.
    """

    def __init__(self, path: str, storage: Mapping[str, Any], option: str) -> None:
        """Prepare the file. option: the option or key that gave the path, for messages."""
        self.shown, self._option, self._temporary = shown_url(path), option, None
        self._folder: Folder
        local = local_path(path)
        if local is None:
            parent, _, self._name = path.rstrip("/").rpartition("/")
            self._folder = open_objects(parent, storage, option=option)
        else:
            file_path = Path(os.path.abspath(os.path.expanduser(local)))
            if file_path.is_dir():
                raise OutputError(f"{option} {path}: is a folder; expected a file name")
            self._folder, self._name = LocalFolder(str(file_path.parent)), file_path.name
        self.file: IO[bytes]
        self._compressed: pa.CompressedOutputStream | None = None

    def __enter__(self) -> "NewFile":
        try:
            if isinstance(self._folder, LocalFolder):
                self._folder.root.mkdir(parents=True, exist_ok=True)
                self._temporary = self._folder.root / f".{self._name}.{secrets.token_hex(8)}.partial"
                self.file = open(self._temporary, "xb+")
            else:
                self.file = tempfile.TemporaryFile()
        except OSError as e:
            raise OutputError(f"{self._option} {self.shown}: cannot be written: {e.strerror} ({e.filename})") from e
        if codec := CODECS.get(os.path.splitext(self._name)[1]):
            self._compressed = pa.CompressedOutputStream(os.fdopen(os.dup(self.file.fileno()), "wb"), codec)
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        if self._temporary is not None:
            with suppress(FileNotFoundError):
                self._temporary.unlink()

    def write(self, data: bytes) -> None:
        try:
            (self._compressed or self.file).write(data)
        except OSError as e:
            raise EnvironmentFailed(f"{self._option} {self.shown}: {e.strerror}") from e

    def publish(self) -> bool:
        """Give the file its name. Return False if a file with the same bytes has it, raise OutputError if another
        has."""
        try:
            if self._compressed is not None:
                self._compressed.close()
            size = self.file.seek(0, os.SEEK_END)
            self.file.flush()
            os.fsync(self.file.fileno())
            if self._temporary is not None:
                made = self._link(self._temporary)
            elif size > MAX_OBJECT_BYTES:
                raise OutputError(
                    f"{self._option} {self.shown}: {size:,} bytes, expected at most {MAX_OBJECT_BYTES:,} for an upload "
                    "in one request; write a local file instead"
                )
            else:
                self.file.seek(0)
                existing = self._folder.has(self._name)
                made = not existing and self._folder.create(self._name, self.file.read())
        except OSError as e:
            raise EnvironmentFailed(f"{self._option} {self.shown}: {e.strerror}") from e
        if not made and not self._is_identical():
            raise OutputError(f"{self._option} {self.shown}: already exists and is never replaced; choose another name")
        return made

    def _link(self, temporary: Path) -> bool:
        final = temporary.with_name(self._name)
        try:
            os.link(temporary, final)
        except FileExistsError:
            return False
        sync_folder(final.parent)
        return True

    def _is_identical(self) -> bool:
        """Return whether the existing file of this name holds the same bytes."""
        self.file.seek(0)
        with self._folder.open(self._name) as existing:
            while True:
                ours = self.file.read(_COMPARED_BYTES)
                if ours != existing.read(max(1, len(ours))):
                    return False
                if not ours:
                    return True
