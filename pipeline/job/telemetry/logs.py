"""Logs of a run, `_pipeline/logs/<run id>/`: `driver.log`, `engine-<actor>.log` and, after a failure, `ray.log`.

Each line has a time and a level. A long log continues in `driver.2.log` and so on. To bound the size, only its first
file and the newest ones are kept, and logs of old runs are removed. No file is renamed, so that a reader can resume at
a name and an offset. A thread writes, so that a slow disk delays nothing. For an output in a store, logs are written to
a temporary folder and uploaded as they grow. `log_reader` reads them back.
"""

import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from pipeline.data.output.parts import PartStore
from pipeline.errors import PipelineError
from pipeline.formatting import printable_lines
from pipeline.job.telemetry.run_id import run_number
from pipeline.machine.host import process_mark
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
RAY_TAIL_BYTES = 64 * 2**10
STALE_FOLDER_S = 3600.0  # age at which the folder of a missing process is removed; a container may not see the process
_PREFIX = "pipeline-logs-"

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
        self._store, self._name = store, f"{LOGS}/{run_id}"
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._uploading = threading.Lock()
        self._closed = False
        self._is_local = isinstance(store.folder, LocalFolder)
        if isinstance(store.folder, LocalFolder):
            self.path = store.folder.path(self._name)
        else:
            _remove_stale_folders()
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
            threading.Thread(target=self._keep_uploading, daemon=True, name="upload logs").start()

    def shown(self, name: str = "") -> str:
        """Return the path of a log for messages."""
        return self._store.folder.shown(f"{self._name}/{name}" if name else self._name)

    def log(self, name: str, level: Level) -> "RotatedLog":
        """Return one of the run's logs, with lines of this level and above."""
        return RotatedLog(self.path / name, level, MAX_BYTES if self._is_local else STORE_MAX_BYTES)

    def close(self) -> None:
        """Upload the rest if the output is in a store, and remove the temporary folder."""
        if self._is_local:
            return
        self._sync()
        self._closed = True
        shutil.rmtree(self.path, ignore_errors=True)

    def prune(self) -> None:
        """Remove the logs of the oldest runs; in a store, do it in a thread. Failures are ignored: these are only
        logs."""
        if self._is_local:
            self._prune()
        else:
            threading.Thread(target=self._prune, daemon=True, name="prune logs").start()

    def _prune(self) -> None:
        folder = self._store.folder
        with suppress(PipelineError, OSError):
            for run in sorted(folder.names(LOGS), key=lambda name: (run_number(name), name))[: -MAX_RUNS or None]:
                if isinstance(folder, LocalFolder):
                    shutil.rmtree(folder.path(f"{LOGS}/{run}"), ignore_errors=True)
                    continue
                for name in folder.names(f"{LOGS}/{run}"):
                    folder.remove(f"{LOGS}/{run}/{name}")

    def _keep_uploading(self) -> None:
        last_sync_s = 0.0
        while not self._closed:
            time.sleep(max(SYNC_S, last_sync_s / SYNC_SHARE))
            began = time.monotonic()
            self._sync()
            last_sync_s = time.monotonic() - began

    def _sync(self) -> None:
        """Upload changed files until one fails; the next call retries it."""
        with self._uploading, suppress(PipelineError, OSError):
            for file in sorted(self.path.iterdir()):
                status = file.stat()
                version = (status.st_size, status.st_mtime_ns)
                if self._uploaded.get(file.name) != version:
                    self._store.folder.replace(f"{self._name}/{file.name}", file.read_bytes())
                    self._uploaded[file.name] = version
            for name in [name for name in self._uploaded if not (self.path / name).exists()]:
                self._store.folder.remove(f"{self._name}/{name}")
                del self._uploaded[name]


def _remove_stale_folders() -> None:
    """Remove the temporary folders of killed processes; Ray kills its actors at the end."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):
            if pid.isdigit() and not process_mark(int(pid)) and time.time() - folder.stat().st_mtime > STALE_FOLDER_S:
                shutil.rmtree(folder, ignore_errors=True)


class RotatedLog:
    """A log in one or more files. Thread-safe; `line` never blocks and never raises."""

    def __init__(self, path: Path, level: Level = "info", max_bytes: int = MAX_BYTES) -> None:
        """level: drop lines below it. max_bytes: size of a file at which the next one begins."""
        self._path, self._min_level, self._max_bytes = path, LEVELS.index(level), max_bytes
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, daemon=True, name=f"log {path.name}")
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

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the queued lines, waiting for up to `timeout_s`."""
        if self.dropped:
            self.line(f"{self.dropped} earlier lines were dropped", "warning")
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write(self) -> None:
        file: BinaryIO | None = None
        number = 1
        while (line := self._lines.get()) is not None:
            data = line.encode("utf-8", "backslashreplace") + b"\n"
            try:
                if file is not None and file.tell() + len(data) > self._max_bytes:
                    file.close()
                    file, number = None, number + 1
                    if number - NUM_LAST > 1:
                        piece_path(self._path, number - NUM_LAST).unlink(missing_ok=True)
                if file is None:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    file = open(piece_path(self._path, number), "ab")  # noqa: SIM115
                file.write(data)
                file.flush()
            except OSError:  # a full disk must not fill the terminal
                self.dropped += 1
        if file is not None:
            with suppress(OSError):
                file.close()


def piece_path(path: Path, number: int) -> Path:
    """Return the path of a log's file by its number: `driver.log`, `driver.2.log`, `driver.3.log`."""
    return path if number == 1 else path.with_suffix(f".{number}{path.suffix}")


def collect_ray_logs(session_logs: Path, path: Path) -> None:
    """Copy the ends of the error files of Ray's processes on this machine. Failures are ignored."""
    try:
        ends = []
        for file in sorted(session_logs.glob("*.err")):
            with open(file, "rb") as lines:
                lines.seek(max(0, file.stat().st_size - RAY_TAIL_BYTES))
                if end := lines.read():
                    ends.append(f"--- {file.name}\n".encode() + end)
        if ends:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"\n".join(ends))
    except OSError:
        return
