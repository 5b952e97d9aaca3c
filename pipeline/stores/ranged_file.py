"""Read-only file whose bytes are returned by a function, such as a request to a store."""

import io
from collections.abc import Callable
from typing import Any

from pipeline.stores.store_errors import ShortRead


class RangedFile(io.RawIOBase):
    """File of `size` bytes. Each read calls `read(start, stop)` once and checks the length of the result."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, name: str) -> None:
        super().__init__()
        self._read, self.size, self._name = read, size, name
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._offset = max(0, offset + (0, self._offset, self.size)[whence])
        return self._offset

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._offset + len(view), self.size)
        if stop <= self._offset:
            return 0
        data = self._read(self._offset, stop)
        if len(data) != stop - self._offset:
            raise ShortRead(f"{self._name}: the file is shorter than when it was opened")
        view[: len(data)] = data
        self._offset = stop
        return len(data)
