"""Files packed into a few tar.gz, none larger than a limit, so that they can be fetched from a borrowed machine."""

import os
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 16 << 20  # of one file
MAX_FILES = 8  # of all that a session leaves
HEADER_BYTES = 2048  # of one member, at the most


@dataclass(frozen=True)
class Pack:
    """`stem.tar.gz`, `stem-2.tar.gz` and so on, `max_files` at most, of the files below `folder`."""

    stem: str
    folder: Path
    max_files: int


def pack(what: Pack, into: Path, max_bytes: int = MAX_BYTES) -> list[str]:
    """Pack what is there now, the newest first; what was packed before is replaced, each file at once. Those that did
    not fit, by their paths."""
    parts, left_out = _parts(_newest_first(what.folder), what, max_bytes)
    for number in range(1, what.max_files + 1):
        path = into / f"{what.stem}{'' if number == 1 else f'-{number}'}.tar.gz"
        if number > len(parts):
            path.unlink(missing_ok=True)
            continue
        there = path.with_name(f".{path.name}.part")
        with tarfile.open(there, "w:gz", compresslevel=6) as tar:
            for member in parts[number - 1]:
                tar.add(member, str(member.relative_to(what.folder.parent)), recursive=False)
        if there.stat().st_size > max_bytes:  # a log that grew meanwhile
            there.unlink()
            left_out += [str(member.relative_to(what.folder)) for member in parts[number - 1]]
            continue
        os.replace(there, path)
    return left_out


def unpack(path: Path, into: Path) -> None:
    """Raises OSError or tarfile.TarError where that is no archive, or holds what would lie outside of `into`."""
    with tarfile.open(path, "r:*") as tar:
        tar.extractall(into, filter="data")


def _newest_first(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".part")]
    return sorted(files, key=lambda path: (-path.stat().st_mtime, path))


def _parts(files: Iterable[Path], what: Pack, max_bytes: int) -> tuple[list[list[Path]], list[str]]:
    """Each file goes to the first part that has room for it, by its compressed size alone."""
    parts: list[list[Path]] = []
    rooms: list[int] = []
    left_out: list[str] = []
    for path in files:
        size = _packed_bytes(path)
        number = next((number for number, room in enumerate(rooms) if size <= room), len(parts))
        if number == len(parts):
            if number == what.max_files or size > max_bytes - HEADER_BYTES:
                left_out.append(str(path.relative_to(what.folder)))
                continue
            parts.append([])
            rooms.append(max_bytes - HEADER_BYTES)
        parts[number].append(path)
        rooms[number] -= size
    return parts, left_out


def _packed_bytes(path: Path) -> int:
    """Not less than it takes in the archive."""
    data = path.read_bytes()
    return len(zlib.compress(data, 1)) + len(data) // 1000 + HEADER_BYTES
