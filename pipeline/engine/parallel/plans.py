"""Memory through which the other ranks get the arrays of a step: one copy for all of them."""

import mmap
import os
import pickle
from collections.abc import Sequence

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
