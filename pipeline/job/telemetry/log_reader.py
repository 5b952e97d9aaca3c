"""The logs of a run read back for people: all of them in the order of their times, and what was added since.

Works on a disk and in a store alike. Rotation is followed: the rest of a file that was moved away is read too.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import SEEK_END

from pipeline.errors import OutputError
from pipeline.job.telemetry.logs import LOGS, NUM_BACKUPS, RAY
from pipeline.job.telemetry.run_id import run_number
from pipeline.stores.folder import Folder

HEAD_BYTES = 64  # by which a file is known again after it was moved: the time of its first line is among them


@dataclass(frozen=True)
class LogLine:
    """A line of `log` (`driver`, `engine-0`), with its time and level in it."""

    log: str
    text: str

    def to_json(self) -> dict[str, str]:
        """Time, level and text apart; of Ray's logs there is the text alone."""
        if self.log == "ray":
            return {"log": self.log, "text": self.text}
        day, time, level, text = (self.text.split(" ", 3) + [""] * 3)[:4]
        return {"log": self.log, "time": f"{day} {time}", "level": level, "text": text.lstrip()}


@dataclass(frozen=True)
class _Place:
    """How far a file was read."""

    head: bytes = b""
    offset: int = 0


def logged_run(folder: Folder, wanted: str | None = None) -> str:
    """The run whose logs are meant: the last one, or the one of that number or name. Raises OutputError."""
    runs = sorted(folder.names(LOGS), key=lambda name: (run_number(name), name))
    if not runs:
        raise OutputError(f"{folder.shown()}: no run has left logs here")
    if wanted is None:
        return runs[-1]
    found = [run for run in runs if run == wanted or (wanted.isdigit() and run_number(run) == int(wanted))]
    if not found:
        raise OutputError(f"{folder.shown()}: no logs of a run {wanted}; there are {', '.join(runs)}")
    return found[-1]


class LogReader:
    """Reads one run's logs. `only`: names without their ending, such as `driver`; empty: all of them."""

    def __init__(self, folder: Folder, run_id: str, only: Iterable[str] = ()) -> None:
        self._folder, self._place, self._only = folder, f"{LOGS}/{run_id}", frozenset(only)
        self._read: dict[str, _Place] = {}

    def names(self) -> list[str]:
        """The logs that are there, without their ending."""
        return [name.removesuffix(".log") for name in self._folder.names(self._place) if name.endswith(".log")]

    def new_lines(self) -> list[LogLine]:
        """The whole lines that were not told before, in the order of their times."""
        wanted = [name for name in self.names() if not self._only or name in self._only]
        timed = heapq.merge(*(self._new_of(name) for name in wanted if f"{name}.log" != RAY), key=_time)
        return [*timed, *(self._new_of("ray") if "ray" in wanted else ())]  # Ray's lines have no such times

    def _new_of(self, name: str) -> Iterator[LogLine]:
        data = self._new_bytes(f"{self._place}/{name}.log")
        return (LogLine(name, line) for line in data.decode("utf-8", "replace").splitlines())

    def _new_bytes(self, path: str) -> bytes:
        seen = self._read.get(path)
        if seen is None:  # from the oldest file on
            before = [self._folder.read(f"{path}.{number}") or b"" for number in range(NUM_BACKUPS, 0, -1)]
            return b"".join(before) + self._rest(path, _Place())
        try:
            with self._folder.open(path) as file:
                if file.seek(0, SEEK_END) == seen.offset:
                    return b""
                file.seek(0)
                is_same = file.read(len(seen.head)) == seen.head
        except FileNotFoundError:  # just being moved
            return b""
        if is_same:
            return self._rest(path, seen)
        moved = self._folder.read(f"{path}.1") or b""
        before = moved[seen.offset :] if moved.startswith(seen.head) else moved
        return before + self._rest(path, _Place())

    def _rest(self, path: str, place: _Place) -> bytes:
        """What the file holds after `place`, up to its last line's end."""
        try:
            with self._folder.open(path) as file:
                size = file.seek(0, SEEK_END)
                file.seek(0)
                head = place.head or file.read(HEAD_BYTES)
                file.seek(place.offset)
                data = file.read(size - place.offset)  # in one request
        except FileNotFoundError:
            return b""
        data = data[: data.rfind(b"\n") + 1]
        self._read[path] = _Place(head, place.offset + len(data))
        return data


def _time(line: LogLine) -> str:
    return line.text[:23]
