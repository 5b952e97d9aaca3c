"""The logs of a run, `_pipeline/logs/<run id>/`: `driver.log`, `engine-<actor>.log` and, after a failure, `ray.log`.

Each line carries its time. Files are rotated, so that their size is bounded, and written by a thread, so that a slow
disk holds nothing up. Of an output in a store they are written to a temporary folder and uploaded by `sync`.
"""

import logging
import logging.handlers
import queue
import shutil
import tempfile
import threading
from pathlib import Path

from pipeline.data.output.parts import PartStore
from pipeline.errors import PipelineError
from pipeline.formatting import printable_lines
from pipeline.job.telemetry.run_id import run_number
from pipeline.stores.local_folder import LocalFolder

LOGS = "_pipeline/logs"
DRIVER = "driver.log"
RAY = "ray.log"
MAX_BYTES = 5 * 2**20  # of a file, before it is rotated
NUM_BACKUPS = 2
MAX_RUNS = 20  # earlier ones whose logs are kept on a disk
MAX_WAITING = 10_000  # lines; more are dropped and counted
CLOSE_S = 2.0
RAY_TAIL_BYTES = 64 * 2**10


def engine_log(actor: int) -> str:
    return f"engine-{actor}.log"


class LogFolder:
    """Where one run's logs lie, for the driver and for each actor. Nothing is created before the first line."""

    def __init__(self, store: PartStore, run_id: str) -> None:
        self._store, self._name = store, f"{LOGS}/{run_id}"
        self._uploaded: dict[str, tuple[int, int]] = {}
        self.is_local = isinstance(store.folder, LocalFolder)
        if isinstance(store.folder, LocalFolder):
            self.path = store.folder.path(self._name)
        else:
            self.path = Path(tempfile.mkdtemp(prefix=f"pipeline-logs-{run_id}-"))

    def shown(self, name: str = "") -> str:
        """A log as messages name it."""
        return self._store.folder.shown(f"{self._name}/{name}" if name else self._name)

    def sync(self) -> None:
        """Upload what has changed, where the output is in a store. A failure is passed by: these are only logs."""
        if self.is_local:
            return
        for file in sorted(self.path.iterdir()):
            status = file.stat()
            version = (status.st_size, status.st_mtime_ns)
            if self._uploaded.get(file.name) == version:
                continue
            try:
                self._store.folder.replace(f"{self._name}/{file.name}", file.read_bytes())
            except PipelineError:
                return
            self._uploaded[file.name] = version

    def close(self) -> None:
        """`sync`, and remove the temporary folder."""
        self.sync()
        if not self.is_local:
            shutil.rmtree(self.path, ignore_errors=True)

    def prune(self) -> None:
        """Remove the logs of the oldest runs on a disk."""
        if not self.is_local:
            return
        try:
            runs = sorted((run for run in self.path.parent.iterdir() if run.is_dir()), key=lambda r: run_number(r.name))
        except OSError:
            return
        for run in runs[: -MAX_RUNS or None]:
            shutil.rmtree(run, ignore_errors=True)


class RotatedLog:
    """One log file. Thread-safe; `line` never blocks and never raises."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_WAITING)
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, daemon=True, name=f"log {path.name}")
        self._thread.start()

    def line(self, text: str) -> None:
        """Add a line, with the time of now; of a text of several lines each gets one."""
        for one in text.splitlines():
            record = logging.LogRecord("pipeline", logging.INFO, "", 0, "%s", (printable_lines(one),), None)
            try:
                self._lines.put_nowait(record)
            except queue.Full:
                self.dropped += 1

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what waits, for so long at most."""
        if self.dropped:
            self.line(f"{self.dropped} lines before this one could not be kept")
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write(self) -> None:
        handler: _Rotated | None = None
        while (record := self._lines.get()) is not None:
            try:
                if handler is None:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    handler = _Rotated(self._path, maxBytes=MAX_BYTES, backupCount=NUM_BACKUPS, encoding="utf-8",
                                       errors="backslashreplace")  # fmt: skip
                    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", "%Y-%m-%d %H:%M:%S"))
                handler.emit(record)
            except OSError:
                self.dropped += 1
        if handler is not None:
            handler.close()


class _Rotated(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk must not fill the terminal."""


def collect_ray_logs(session_logs: Path, path: Path) -> None:
    """Copy the ends of what Ray's processes on this machine wrote to their error files. A failure is passed by."""
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
