"""Read the logs of a run: all of them in the order of their times, and new lines since the last read.

Works on a disk and in a store. A position in a log is the name of one of its files and an offset.
"""

import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass
from os import SEEK_END

from pipeline.errors import OutputError
from pipeline.job.telemetry.logs import LOGS, RAY
from pipeline.job.telemetry.run_id import run_number
from pipeline.stores.folder import Folder

RAY_LOG = RAY.removesuffix(".log")
_PIECE = re.compile(r"([^.]+)(?:\.(\d+))?\.log")


@dataclass(frozen=True)
class LogLine:
    """A line of `log` (`driver`, `engine-0`), including its time and level."""

    log: str
    text: str

    def to_json(self) -> dict[str, str]:
        """Split time, level and text. Ray's logs have text only."""
        if self.log == RAY_LOG:
            return {"log": self.log, "text": self.text}
        day, time, level, text = (self.text.split(" ", 3) + [""] * 3)[:4]
        return {"log": self.log, "time": f"{day} {time}", "level": level, "text": text.lstrip()}


def logged_run(folder: Folder, wanted: str | None = None) -> str:
    """Return the run to read: the last one, or the one with the number or name `wanted`. Raises OutputError."""
    runs = sorted(folder.names(LOGS), key=lambda name: (run_number(name), name))
    if not runs:
        raise OutputError(f"{folder.shown()}: no run has left logs here")
    if wanted is None:
        return runs[-1]
    found = [run for run in runs if run == wanted or (wanted.isdigit() and run_number(run) == int(wanted))]
    if not found:
        raise OutputError(f"{folder.shown()}: no logs of run {wanted}; available: {', '.join(runs)}")
    return found[-1]


class LogReader:
    """Reader of one run's logs. `only`: names without their suffix, such as `driver`; empty: all logs."""

    def __init__(self, folder: Folder, run_id: str, only: Iterable[str] = ()) -> None:
        self._folder, self._log_folder, self._only = folder, f"{LOGS}/{run_id}", frozenset(only)
        self._offsets: dict[str, int] = {}  # by file name

    def new_lines(self) -> list[LogLine]:
        """Return the complete lines that were not returned before, in the order of their times."""
        pieces = [piece for piece in self._pieces() if not self._only or piece[0] in self._only]
        timed: dict[str, list[LogLine]] = {}
        for log, _, name in pieces:
            timed.setdefault(log, []).extend(LogLine(log, line) for line in self._rest(name))
        ray_lines = timed.pop(RAY_LOG, [])  # Ray's lines have other timestamps
        return [*heapq.merge(*timed.values(), key=_time), *ray_lines]

    def _pieces(self) -> list[tuple[str, int, str]]:
        """Return (log, number, file name) of each file, in order."""
        found = [(_PIECE.fullmatch(name), name) for name in self._folder.names(self._log_folder)]
        return sorted((match[1], int(match[2] or 1), name) for match, name in found if match is not None)

    def _rest(self, name: str) -> list[str]:
        """Return the complete lines of a file after those already read."""
        offset = self._offsets.get(name, 0)
        try:
            with self._folder.open(f"{self._log_folder}/{name}") as file:
                size = file.seek(0, SEEK_END)
                if size <= offset:
                    return []
                file.seek(offset)
                data = file.read(size - offset)  # in one request
        except FileNotFoundError:  # removed in the meantime
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._offsets[name] = offset + len(data)
        return data.decode("utf-8", "replace").splitlines()


def _time(line: LogLine) -> str:
    return line.text[:23]
