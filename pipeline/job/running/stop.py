"""Signals that end a run: SIGINT, SIGTERM and SIGHUP.

While rows are being computed a signal asks for a drain: it is counted, and the run's loop reads the count. At any other
time (planning, verifying, publishing) nothing that is written could be lost, so a signal ends the run at once: the
handler raises `Stopped` in the main thread. Libraries may be slow to let that exception pass (a pool that waits for its
requests, an import), so a timer ends the process after GRACE_S; what follows is the same as after a kill.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from pipeline.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_STOP_S = 2.0  # nobody ends a drain that soon on purpose; Ctrl-C is SIGINT
GRACE_S = 10.0  # from a signal that ends the run at once to the end of its process


class Stopped(BaseException):
    """A signal came where it ends the run at once. No Exception: libraries must not catch it."""


class StopSignals:
    """Handles SIGNALS between `__enter__` and `__exit__`, in the main thread; elsewhere it only counts `ask`.

    SIGHUP stays ignored where it was, as `nohup` asks. A SIGTERM within ONE_STOP_S of the last is the same stop:
    Ray's job server and Slurm send one to each process of a run, and the guard passes its own on.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._draining = False
        self._old: dict[int, object] = {}
        self._timer: threading.Timer | None = None
        self._terminated_s = -math.inf  # when the last SIGTERM came
        self.count = 0  # stops asked for so far
        self.why = "a signal"  # of the first

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                there = signal.getsignal(number)
                if number != signal.SIGHUP or there != signal.SIG_IGN:
                    self._old[number] = there
                    signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._old.clear()

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Inside, signals are counted and nothing is raised."""
        self._draining = True
        try:
            yield
        finally:
            self._draining = False

    def ask(self, why: str) -> None:
        """Ask for a drain from any thread, as a signal does."""
        if not self.count:
            self.why = why
        self.count += 1

    def _heard(self, number: int, frame: object) -> None:
        if number == signal.SIGTERM:
            last, self._terminated_s = self._terminated_s, time.monotonic()
            if self._terminated_s < last + ONE_STOP_S:
                return
        self.ask(signal.Signals(number).name)
        if self._draining and self.count < 2:
            return
        if self._timer is not None:
            _leave_now(self.why)  # asked again while the first is being carried out
        self._timer = threading.Timer(self._grace_s, _leave_now, (self.why,))
        self._timer.daemon = True
        self._timer.start()
        if not self._draining:
            raise Stopped(self.why)


def _leave_now(why: str) -> NoReturn:
    """End the process without waiting for anything. Parts are whole or not there, so nothing is lost."""
    with suppress(OSError, ValueError):  # nobody may read any more
        os.write(sys.stderr.fileno(), f"Stopped by {why}. The same command goes on from here.\n".encode())
    os._exit(Interrupted.exit_code)
