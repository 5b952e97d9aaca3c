"""PDFs of the input, as files of this machine: those in stores are copied to files without a name, which end with this
process."""

import asyncio
import os
import posixpath
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import IO, Any

from pipeline.data.files.footer import reading
from pipeline.data.files.listing import is_local
from pipeline.data.files.pdf_pages import path_of
from pipeline.data.files.source_file import open_file
from pipeline.endpoint.spec import DocumentFolder
from pipeline.errors import InputError
from pipeline.stores.filesystem import filesystem, secrets_in, storage_for

MAX_COPIES = 8  # at once, those that pages are read from and others


@dataclass
class _Copy:
    task: "asyncio.Task[IO[bytes]]"
    num_readers: int = 0


class Documents:
    """PDFs below a folder. All methods run in one event loop."""

    def __init__(self, folder: DocumentFolder, storage: Mapping[str, Mapping[str, Any]]) -> None:
        """storage: fsspec options by url prefix."""
        self._folder, self._storage = folder, storage_for(folder.url, storage)
        self._copies: dict[str, _Copy] = {}  # the last one used is the last
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def local(self, relative: str) -> AsyncIterator[str]:
        """Yield the path of a document, which is valid until the end. Raises PipelineError."""
        fs, _ = filesystem(self._folder.url, self._storage)
        path = posixpath.join(self._folder.base, relative)
        if is_local(fs):
            if not os.access(path, os.R_OK):
                raise InputError(f"{path}: does not exist, or cannot be read")
            yield path
            return
        async with self._changed:
            await self._changed.wait_for(lambda: relative in self._copies or self._has_room())
            copy = self._copies.pop(relative, None) or _Copy(asyncio.create_task(asyncio.to_thread(_copied, fs, path)))
            self._copies[relative] = copy
            copy.num_readers += 1
        try:
            yield path_of(await asyncio.shield(copy.task))
        finally:
            copy.num_readers -= 1
            if copy.task.done() and copy.task.exception() is not None and self._copies.get(relative) is copy:
                del self._copies[relative]
            async with self._changed:
                self._changed.notify_all()

    def close(self) -> None:
        for copy in self._copies.values():
            if copy.task.done() and copy.task.exception() is None:
                copy.task.result().close()
        self._copies.clear()

    def _has_room(self) -> bool:
        """Return whether another copy may be made, after removing the one that was not used for the longest time."""
        if len(self._copies) < MAX_COPIES:
            return True
        unused = [relative for relative, copy in self._copies.items() if not copy.num_readers and copy.task.done()]
        if not unused:
            return False
        self._copies.pop(unused[0]).task.result().close()
        return True


def _copied(fs: Any, path: str) -> IO[bytes]:
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    with reading(path, secrets_in(fs)), closing(open_file(fs, path, int(fs.info(path)["size"]), path)) as file:
        shutil.copyfileobj(file, copy, 1 << 20)
    return copy
