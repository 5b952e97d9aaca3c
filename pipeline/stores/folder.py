"""Interface of output folders, on a disk (`local_folder`) or in an object store (`object_folder`).

Files appear atomically. Creating a file fails if the name is taken; replacing a file is a single step. Both are durable
when the call returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import IO

from pipeline.errors import PipelineError

TMP = "_pipeline/tmp"


class Folder(ABC):
    """Folder of an output. Names are relative to its root and "/"-separated.

    Every operation raises EnvironmentFailed if the disk or the store fails, OutputError if it refuses the operation.
    """

    reads_at_once: int  # number of small reads to run concurrently

    @abstractmethod
    def shown(self, name: str = "") -> str:
        """Return the path of a file for messages; without a name, the root, which can be opened again."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names of the folder's direct children, with one listing; empty if it does not exist."""

    @abstractmethod
    def each_name(self) -> Iterator[str]:
        """Iterate over the root's direct children, in any order, without holding all names in memory."""

    @abstractmethod
    def each_size(self) -> Iterator[tuple[str, int]]:
        """Iterate over the root's files and their sizes in bytes, like `each_name`."""

    @abstractmethod
    def has(self, name: str) -> bool: ...

    def read(self, name: str) -> bytes | None:
        """Return the file's bytes, or None if it does not exist."""
        found = self.read_tagged(name)
        return found[0] if found else None

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """Open the file for random reads. Raises FileNotFoundError if it does not exist."""

    @abstractmethod
    def tail(self, name: str, length: int) -> bytes:
        """Return the last `length` bytes of the file, or all of a shorter one. Raises FileNotFoundError if it does not
        exist."""

    @abstractmethod
    def create(self, name: str, data: bytes, point: str = "file") -> bool:
        """Write a new file and verify its bytes. Return False, without a change, if the name is taken.

        point: prefix of the names of the failpoints.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write or atomically replace a file; a reader sees the old or the new one as a whole."""

    @abstractmethod
    def read_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Return the file's bytes and the tag of this version, for `swap`; None if it does not exist."""

    @abstractmethod
    def swap(self, name: str, data: bytes, tag: str) -> bool:
        """Replace the file if it still has this tag. Otherwise change nothing and return False."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    @abstractmethod
    def clean_tmp(self) -> int:
        """Remove the leftovers of dead writers. Return their number."""

    @abstractmethod
    def probe(self) -> None:
        """Make the folder, and check that files can be written, read back and created exclusively."""

    @abstractmethod
    def probe_swap(self) -> None:
        """Check that `swap` is atomic here."""


def check_name(name: str) -> None:
    """Raise PipelineError if a name could lead out of the folder."""
    if {"", ".", ".."} & set(name.split("/")):
        raise PipelineError(f"not a valid file name: {name!r}")
