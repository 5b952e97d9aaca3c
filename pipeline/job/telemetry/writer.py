"""Write small files about a run (status, record, report) in a thread.

No row depends on them, so a disk or store that fails or hangs neither ends nor delays the run: failed writes are
counted and reported. Only the newest content of a file is queued.
"""

import threading
import time

from pipeline.stores.folder import Folder


class Telemetry:
    """Asynchronous writer of one output. `put` returns at once."""

    FLUSH_S = 5.0  # timeout for queued files at the end of a run

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._changed = threading.Condition()
        self._waiting: dict[str, bytes] = {}
        self._is_writing = False
        self._closed = False
        self.failures = 0
        self.last_failure = ""
        self.last_write_s = 0.0  # duration of the last write
        threading.Thread(target=self._run, daemon=True, name="telemetry").start()

    def put(self, name: str, data: bytes) -> None:
        """Replace the content of the file soon."""
        with self._changed:
            self._waiting[name] = data
            self._changed.notify_all()

    def close(self) -> bool:
        """Wait up to FLUSH_S for queued files, then write nothing more. Return False if files were left."""
        with self._changed:
            written = self._changed.wait_for(lambda: not self._waiting and not self._is_writing, self.FLUSH_S)
            self._closed = True
            self._changed.notify_all()
            return written

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                name = next(iter(self._waiting))
                data = self._waiting.pop(name)
                self._is_writing = True
            began, failure = time.monotonic(), ""
            try:
                self._folder.replace(name, data)
            except Exception as error:  # no failure may end the thread
                failure = f"{type(error).__name__}: {error}"
            with self._changed:
                self.last_write_s = time.monotonic() - began
                self._is_writing = False
                if failure:
                    self.failures += 1
                    self.last_failure = failure
                self._changed.notify_all()
