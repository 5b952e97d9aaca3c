"""Sends the arrays of a step to the other ranks: one copy into memory that all of them share, and one short message
each."""

import mmap
import os
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

Arrays = Sequence[np.ndarray | None]
ALIGNMENT = 64


class PlanMemory:
    """Shared memory for the arrays of one call. The leader writes the next call only after all ranks have answered the
    last one."""

    def __init__(self, fd: int) -> None:
        self._bytes = mmap.mmap(fd, os.fstat(fd).st_size)

    @staticmethod
    def create(num_bytes: int) -> int:
        """Return the file descriptor of anonymous memory. Pages that are never written take no memory."""
        fd = os.memfd_create("step plans")
        os.ftruncate(fd, num_bytes)
        return fd

    def write(self, method: str, arrays: Arrays) -> bytes:
        """Copy the arrays, and return the message by which `read` finds them."""
        spans: list[tuple[str, tuple[int, ...], int] | None] = []
        at = 0
        for array in arrays:
            if array is None:
                spans.append(None)
                continue
            np.ndarray(array.shape, array.dtype, self._bytes, at)[...] = array
            spans.append((array.dtype.str, array.shape, at))
            at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return pickle.dumps((method, spans))

    def read(self, message: bytes) -> tuple[str, list[np.ndarray | None]]:
        """Return the method, and views of the arrays, which are valid until the call is answered."""
        method, spans = pickle.loads(message)
        return method, [span and np.ndarray(span[1], span[0], self._bytes, span[2]) for span in spans]


def send(connections: Sequence[Connection], memory: PlanMemory, method: str, arrays: Arrays) -> None:
    """Send a call to all other ranks. Raises OSError if one has ended."""
    message = memory.write(method, arrays)
    for connection in connections:
        connection.send_bytes(message)
