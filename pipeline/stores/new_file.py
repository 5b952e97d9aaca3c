"""One new file, written piece by piece, that appears whole or not at all and never takes the place of another.

On a disk the pieces go to a hidden file beside it, which gets the name by a hard link. For an object store they are
gathered in a temporary file of this machine and go there by one request, for which they lie in memory once.
"""

import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pipeline.errors import EnvironmentFailed, OutputError
from pipeline.stores.filesystem import local_path
from pipeline.stores.folder import Folder
from pipeline.stores.local_folder import LocalFolder, sync_folder
from pipeline.stores.object_folder import open_objects
from pipeline.stores.redaction import shown_url

MAX_OBJECT_BYTES = 4 * 2**30  # an object store takes 5 GB in one request
_COMPARED_BYTES = 1 << 20


class NewFile:
    """A file to be at `place`, a local path or an fsspec url. Nothing is there before `publish`.

    Used as a context: what was not published is gone at its end. Raises EnvironmentFailed where a disk or store fails,
    OutputError where the place cannot be used.
    """

    def __init__(self, place: str, storage: Mapping[str, Any], what: str) -> None:
        """what: how messages call the place, such as the option that gave it."""
        self.shown, self._what, self._temporary = shown_url(place), what, None
        self._folder: Folder
        local = local_path(place)
        if local is None:
            parent, _, self._name = place.rstrip("/").rpartition("/")
            self._folder = open_objects(parent, storage, what=what)
        else:
            path = Path(os.path.abspath(os.path.expanduser(local)))
            if path.is_dir():
                raise OutputError(f"{what} {place}: is a folder, expected the name of a file")
            self._folder, self._name = LocalFolder(str(path.parent)), path.name
        self.file: IO[bytes]

    def __enter__(self) -> "NewFile":
        try:
            if isinstance(self._folder, LocalFolder):
                self._folder.root.mkdir(parents=True, exist_ok=True)
                self._temporary = self._folder.root / f".{self._name}.{secrets.token_hex(8)}.partial"
                self.file = open(self._temporary, "xb+")
            else:
                self.file = tempfile.TemporaryFile()
        except OSError as e:
            raise OutputError(f"{self._what} {self.shown}: cannot be written: {e.strerror} ({e.filename})") from e
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        if self._temporary is not None:
            with suppress(FileNotFoundError):
                self._temporary.unlink()

    def write(self, data: bytes) -> None:
        try:
            self.file.write(data)
        except OSError as e:
            raise EnvironmentFailed(f"{self._what} {self.shown}: {e.strerror}") from e

    @property
    def num_bytes(self) -> int:
        return self.file.tell()

    def publish(self) -> bool:
        """Give the file its name; False where a file of the same bytes has it. Raises OutputError where another has."""
        size = self.num_bytes
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            if self._temporary is not None:
                made = self._linked(self._temporary)
            elif size > MAX_OBJECT_BYTES:
                raise OutputError(
                    f"{self._what} {self.shown}: {size:,} bytes, and a store takes at most {MAX_OBJECT_BYTES:,} in one "
                    "request; write a local file"
                )
            else:
                self.file.seek(0)
                there = self._folder.has(self._name)
                made = not there and self._folder.create(self._name, self.file.read())
        except OSError as e:
            raise EnvironmentFailed(f"{self._what} {self.shown}: {e.strerror}") from e
        if not made and not self._is_there():
            raise OutputError(f"{self._what} {self.shown}: is there already, and is not replaced; give another name")
        return made

    def _linked(self, temporary: Path) -> bool:
        final = temporary.with_name(self._name)
        try:
            os.link(temporary, final)
        except FileExistsError:
            return False
        sync_folder(final.parent)
        return True

    def _is_there(self) -> bool:
        """Whether the file that has the name holds these bytes."""
        self.file.seek(0)
        with self._folder.open(self._name) as there:
            while True:
                ours = self.file.read(_COMPARED_BYTES)
                if ours != there.read(max(1, len(ours))):
                    return False
                if not ours:
                    return True
