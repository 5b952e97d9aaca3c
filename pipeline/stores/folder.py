"""What an output folder can do, on a disk (`local_folder`) or in an object store (`object_folder`).

A file appears whole or not at all: a new one only where its name is free, a replaced one in a single step. Both are
durable when the call returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import IO

from pipeline.errors import PipelineError

TMP = "_pipeline/tmp"


class Folder(ABC):
    """Where an output lies. Names are relative to its root and "/"-separated. A kind of folder that lacks one of the
    operations cannot be made.

    Every operation raises EnvironmentFailed when the disk or the store fails, OutputError when it refuses.
    """

    reads_at_once: int  # small reads that are worth having under way together

    @abstractmethod
    def shown(self, name: str = "") -> str:
        """The place as messages name it; without a name, the root, by which it can be opened again."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """What lies directly in the folder, sorted; one listing. No folder, no names."""

    @abstractmethod
    def each_name(self) -> Iterator[str]:
        """What lies directly in the root, in any order, of which only some are in memory at a time."""

    @abstractmethod
    def each_size(self) -> Iterator[tuple[str, int]]:
        """As `each_name`, of files alone, with their bytes."""

    @abstractmethod
    def has(self, name: str) -> bool: ...

    def read(self, name: str) -> bytes | None:
        """The file's bytes, or None where there is none."""
        there = self.read_tagged(name)
        return there[0] if there else None

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """The file for reading pieces of it. FileNotFoundError where there is none."""

    @abstractmethod
    def tail(self, name: str, length: int) -> bytes:
        """The last `length` bytes of the file, or all of a shorter one. FileNotFoundError where there is none."""

    @abstractmethod
    def create(self, name: str, data: bytes, point: str = "file") -> bool:
        """Write a new file, seen to be what was meant; False, and nothing is changed, where the name is taken.

        point: the first half of the names of the failpoints passed.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a file or put it in the place of the old one; a reader sees the old or the new, whole."""

    @abstractmethod
    def read_tagged(self, name: str) -> tuple[bytes, str] | None:
        """The file's bytes and a tag of this version of it, for `swap`; None where there is none."""

    @abstractmethod
    def swap(self, name: str, data: bytes, tag: str) -> bool:
        """Replace the file if it still is the version of this tag; False, and nothing is changed, if not."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; none there is fine."""

    @abstractmethod
    def clean_tmp(self) -> int:
        """Remove what writers that are gone have left; how many."""

    @abstractmethod
    def probe(self) -> None:
        """Make the folder and see that files can be made, are create-only and are kept."""

    @abstractmethod
    def probe_swap(self) -> None:
        """See that `swap` keeps its promise here."""


def check_name(name: str) -> None:
    """Raise where a name could lead out of the folder."""
    if {"", ".", ".."} & set(name.split("/")):
        raise PipelineError(f"not a file's name: {name!r}")
