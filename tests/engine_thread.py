"""Engines of jobs in threads of this process. In one of its own, importing torch takes longer than a small job."""

import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.job.process import child, main


class EngineThread:
    """Replacement of the `Popen` of an engine's process. It ends by itself, and cannot be killed."""

    pid = os.getpid()

    def __init__(self, command: list[str], **_: Any) -> None:
        self._connection = os.dup(int(command[-1]))  # the caller closes its own
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine")
        self._thread.start()

    def _run(self) -> None:
        with socket.socket(fileno=os.dup(self._connection)) as end:
            try:
                with suppress(SystemExit):
                    main.main(self._connection)
            finally:
                end.shutdown(socket.SHUT_RDWR)  # as the end of a process does, although a thread still reads from it

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("engine", timeout or 0)
        return 0


def run_engines_in_threads(patch: pytest.MonkeyPatch) -> None:
    """Start engines of jobs in threads. Only the main thread may handle signals, and only the engine's thread exits."""

    def leave(code: int) -> None:
        if threading.current_thread().name == "engine":
            raise SystemExit(code)

    patch.setattr(child, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": EngineThread}))
    patch.setattr(main, "signal", SimpleNamespace(**{**vars(signal), "signal": lambda *_: None}))
    patch.setattr(main, "faulthandler", SimpleNamespace(enable=lambda: None, register=lambda number: None))
    patch.setattr(main, "os", SimpleNamespace(_exit=leave))
