"""Handle the signals that end a run: SIGINT, SIGTERM and SIGHUP.

While rows are computed, a signal requests a drain: it is counted, and the run's loop reads the count. At any other time
(planning, verifying, publishing) no computed rows can be lost, so a signal ends the run at once: the handler raises
`Stopped` in the main thread. Libraries may delay that exception (a pool that waits for its requests, an import), so a
timer ends the process after GRACE_S; the result is the same as after a kill.
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
ONE_STOP_S = 2.0  # no user ends a drain that soon; Ctrl-C is SIGINT
GRACE_S = 10.0  # from a signal that ends the run at once to the exit of the process


class Stopped(BaseException):
    """A signal arrived at a time when it ends the run at once. Not an Exception, so that libraries do not catch it."""


class StopSignals:
    """Handler of SIGNALS between `__enter__` and `__exit__` in the main thread; in other threads it only counts `ask`.

    SIGHUP stays ignored if it was, as with `nohup`. A SIGTERM within ONE_STOP_S of the last one is the same stop: Ray's
    job server and Slurm send it to each process of a run, and the guard forwards its own.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._draining = False
        self._old: dict[int, object] = {}
        self._timer: threading.Timer | None = None
        self._terminated_s = -math.inf  # time of the last SIGTERM
        self.count = 0  # number of stop requests
        self.reason = "a signal"  # reason of the first request

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if number != signal.SIGHUP or handler != signal.SIG_IGN:
                    self._old[number] = handler
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
        """Within this context, count signals without raising."""
        self._draining = True
        try:
            yield
        finally:
            self._draining = False

    def request(self, reason: str) -> None:
        """Request a drain from any thread, as a signal does."""
        if not self.count:
            self.reason = reason
        self.count += 1

    def _heard(self, number: int, frame: object) -> None:
        if number == signal.SIGTERM:
            last, self._terminated_s = self._terminated_s, time.monotonic()
            if self._terminated_s < last + ONE_STOP_S:
                return
        self.request(signal.Signals(number).name)
        if self._draining and self.count < 2:
            return
        if self._timer is not None:
            _leave_now(self.reason)  # second request during the first one
        self._timer = threading.Timer(self._grace_s, _leave_now, (self.reason,))
        self._timer.daemon = True
        self._timer.start()
        if not self._draining:
            raise Stopped(self.reason)


def _leave_now(reason: str) -> NoReturn:
    """End the process without waiting. Parts are complete or absent, so nothing is lost."""
    with suppress(OSError, ValueError):  # stderr may be closed
        os.write(sys.stderr.fileno(), f"Stopped by {reason}. Run the same command to resume.\n".encode())
    os._exit(Interrupted.exit_code)
