"""A file for reading whose bytes come piece by piece from a function: a request to a store, say."""

import io
from collections.abc import Callable
from typing import Any

from pipeline.stores.store_errors import ShortRead


class RangedFile(io.RawIOBase):
    """`size` bytes, each piece by one call read(start, stop), its length checked."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, name: str) -> None:
        super().__init__()
        self._read, self.size, self._name = read, size, name
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self.size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._at + len(view), self.size)
        if stop <= self._at:
            return 0
        data = self._read(self._at, stop)
        if len(data) != stop - self._at:
            raise ShortRead(f"{self._name}: is shorter than it was when it was opened")
        view[: len(data)] = data
        self._at = stop
        return len(data)
