"""Limit of the bytes that threads hold together."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ByteRoom:
    """Room for `max_bytes`. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._used, self._changed = max_bytes, 0, threading.Condition()

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Wait until the bytes fit, or nothing else is held, and hold them during the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + num_bytes <= self._max_bytes)
            self._used += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= num_bytes
                self._changed.notify_all()
