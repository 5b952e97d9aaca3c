"""Logs of a run, `_pipeline/logs/<run id>/`: `driver.log`, `engine-<actor>.log` and, after a failure, `ray.log`.

Each line has a time and a level. A long log continues in `driver.2.log` and so on. To bound the size, only its first
file and the newest ones are kept, and logs of old runs are removed. No file is renamed, as logging's own rotation does:
a reader resumes at a name and an offset, and a store keeps what was uploaded. A thread writes, so that a slow disk or
store delays nothing. `log_reader` reads the logs back.
"""

import queue
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.data.output.parts import PartStore
from pipeline.errors import PipelineError
from pipeline.formatting import printable_lines
from pipeline.job.telemetry.run_id import run_number
from pipeline.stores.folder import Folder
from pipeline.stores.local_folder import LocalFolder

LOGS = "_pipeline/logs"
DRIVER = "driver.log"
RAY = "ray.log"
MAX_BYTES = 5 * 2**20  # per file on a disk
STORE_MAX_BYTES = 2**20  # per file in a store, where each change uploads the whole file
NUM_LAST = 2  # newest files of a log to keep, in addition to the first
MAX_RUNS = 20  # earlier runs whose logs are kept
SYNC_S = 3.0  # interval of uploads to a store
SYNC_SHARE = 0.05  # largest share of the time for uploads
MAX_WAITING = 10_000  # queued lines; further ones are dropped and counted
CLOSE_S = 2.0
STORE_CLOSE_S = 10.0  # for the last upload
RAY_TAIL_BYTES = 64 * 2**10

Level = Literal["debug", "info", "warning", "print"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "print")  # `print`: output of a process, always kept


@dataclass(frozen=True)
class LogOptions:
    """level: drop lines below it. show: called with each line of the driver's log, from any thread."""

    level: Level = "info"
    show: Callable[[str], None] | None = None


def engine_log(actor: int) -> str:
    return f"engine-{actor}.log"


class LogFolder:
    """Log folder of one run, for the driver and each actor. Nothing is created before the first line."""

    def __init__(self, store: PartStore, run_id: str) -> None:
        self._folder, self._name = store.folder, f"{LOGS}/{run_id}"

    def shown(self, name: str = "") -> str:
        """Return the path of a log for messages."""
        return self._folder.shown(f"{self._name}/{name}" if name else self._name)

    def log(self, name: str, level: Level) -> "RotatedLog":
        """Return one of the run's logs, with lines of this level and above."""
        return RotatedLog(self._folder, f"{self._name}/{name}", level)

    def prune(self) -> None:
        """Remove the logs of the oldest runs; in a store, do it in a thread. Failures are ignored: these are only
        logs."""
        if isinstance(self._folder, LocalFolder):
            self._prune()
        else:
            threading.Thread(target=self._prune, daemon=True, name="prune logs").start()

    def _prune(self) -> None:
        folder = self._folder
        with suppress(PipelineError, OSError):
            for run in sorted(folder.names(LOGS), key=lambda name: (run_number(name), name))[: -MAX_RUNS or None]:
                if isinstance(folder, LocalFolder):
                    shutil.rmtree(folder.path(f"{LOGS}/{run}"), ignore_errors=True)
                    continue
                for name in folder.names(f"{LOGS}/{run}"):
                    folder.remove(f"{LOGS}/{run}/{name}")

    def collect_ray(self, session_logs: Path) -> None:
        """Copy the ends of the error files of Ray's processes on this machine. Failures are ignored."""
        with suppress(PipelineError, OSError):
            ends = []
            for file in sorted(session_logs.glob("*.err")):
                with open(file, "rb") as lines:
                    lines.seek(max(0, file.stat().st_size - RAY_TAIL_BYTES))
                    if end := lines.read():
                        ends.append(f"--- {file.name}\n".encode() + end)
            if ends:
                self._folder.replace(f"{self._name}/{RAY}", b"\n".join(ends))


class RotatedLog:
    """A log in one or more files. Thread-safe; `line` never blocks and never raises."""

    def __init__(self, folder: Folder, name: str, level: Level = "info", max_bytes: int | None = None) -> None:
        """level: drop lines below it. max_bytes: size of a file at which the next one begins."""
        self._folder, self._name, self._min_level = folder, name, LEVELS.index(level)
        self._is_local = isinstance(folder, LocalFolder)
        self._max_bytes = max_bytes or (MAX_BYTES if self._is_local else STORE_MAX_BYTES)
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, daemon=True, name=f"log {name}")
        self._thread.start()

    def keeps(self, level: Level) -> bool:
        return LEVELS.index(level) >= self._min_level

    def line(self, text: str, level: Level = "info") -> list[str]:
        """Add a text with the current time, one log line per line of it. Return the log lines."""
        if not self.keeps(level):
            return []
        now = time.time()
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d} {level:<7} "
        lines = [head + printable_lines(one) for one in text.splitlines()]
        for line in lines:
            try:
                self._lines.put_nowait(line)
            except queue.Full:
                self.dropped += 1
        return lines

    def close(self) -> None:
        """Write the queued lines, waiting for a bounded time."""
        if self.dropped:
            self.line(f"{self.dropped} earlier lines were dropped", "warning")
        with suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(CLOSE_S if self._is_local else STORE_CLOSE_S)

    def _write(self) -> None:
        number, content, num_sent, next_send = 1, bytearray(), 0, 0.0
        line: str | None = ""
        while line is not None:
            try:
                line = self._lines.get(timeout=SYNC_S)
            except queue.Empty:
                line = ""
            data = line.encode("utf-8", "backslashreplace") + b"\n" if line else b""
            if content and len(content) + len(data) > self._max_bytes:
                self._send(number, content, num_sent)
                number, content, num_sent = number + 1, bytearray(), 0
                self._remove(number - NUM_LAST)
            content += data
            began = time.monotonic()
            if num_sent < len(content) and (self._is_local or line is None or began >= next_send):
                num_sent = self._send(number, content, num_sent)
                now = time.monotonic()
                next_send = now + max(SYNC_S, (now - began) / SYNC_SHARE)

    def _send(self, number: int, content: bytearray, num_sent: int) -> int:
        """Append what is new to the file, or upload all of it. Return the bytes sent so far: a failure is ignored, and
        the next call repeats it."""
        name = self._piece(number)
        with suppress(PipelineError, OSError):
            if isinstance(self._folder, LocalFolder):
                path = self._folder.path(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "ab") as file:
                    file.write(content[num_sent:])
            else:
                self._folder.replace(name, bytes(content))
            return len(content)
        return num_sent

    def _remove(self, number: int) -> None:
        """Remove an old file, but never the first one."""
        if number > 1:
            with suppress(PipelineError, OSError):
                self._folder.remove(self._piece(number))

    def _piece(self, number: int) -> str:
        """Return the name of a file by its number: `driver.log`, `driver.2.log`, `driver.3.log`."""
        stem, dot, suffix = self._name.rpartition(".")
        return self._name if number == 1 else f"{stem}.{number}{dot}{suffix}"
