"""Signals that end a command: SIGINT, SIGTERM and SIGHUP. Imports nothing heavy, since it handles them while the rest
is imported.

What a signal does depends on what this process does at that time:

    imports                                   exit with 75 (`leave`)
    a command                                 raise KeyboardInterrupt (`interrupt`)
    a run that plans, verifies or publishes   raise Stopped: no computed rows can be lost (`StopSignals`)
    a run that computes rows                  count a request to drain; a second one ends the process

Libraries may delay an exception (a pool that waits for its requests, an import), so a timer ends the process after
GRACE_S; the result is the same as after a kill.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from pipeline.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_STOP_S = 2.0  # no user ends a drain that soon; Ctrl-C is SIGINT
GRACE_S = 10.0  # from a signal that ends the command at once to the exit of the process
_raised: list[int] = []

Handler = Callable[[int, FrameType | None], Any]


class Stopped(BaseException):
    """A signal arrived at a time when it ends the run at once. Not an Exception, so that libraries do not catch it."""


def handled() -> list[signal.Signals]:
    """Return the signals to handle. SIGHUP stays ignored if it is, as with `nohup`."""
    return [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def install(handler: Handler) -> None:
    """Handle the signals with `leave` or `interrupt` from now on."""
    for number in handled():
        signal.signal(number, handler)


def leave(number: int, frame: FrameType | None) -> None:
    """Exit at once. There is nothing to undo, and an exception raised in a callback of the garbage collector would be
    lost."""
    _leave_now("Interrupted.")


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and exit after GRACE_S at the latest."""
    _raised.append(number)
    _leave_later(GRACE_S, "Interrupted.")
    raise KeyboardInterrupt


def was_raised() -> bool:
    """Return whether `interrupt` received a signal. An extension module may replace KeyboardInterrupt by its own
    exception, as pydantic does while it builds a validator."""
    return bool(_raised)


def leave_process(code: int) -> NoReturn:
    """Exit with this code, without the shutdown of the interpreter and libraries: it may take seconds, and a signal
    during it would change the code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda *_: os._exit(code))  # if a flush blocks
    with suppress(OSError, ValueError):  # the reader may have closed the pipe
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def restore_handlers() -> None:
    """Install Python's handlers again, in the main thread: Ray's native code replaces them as it starts and resets them
    as it ends, unknown to Python."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None:  # None: not installed by Python
                signal.signal(number, handler)


class StopSignals:
    """Handler of the signals of a run, between `__enter__` and `__exit__` in the main thread; in other threads it only
    counts `request`.

    A SIGTERM within ONE_STOP_S of the last one is the same stop: Ray's job server and Slurm send it to each process of
    a run, and the guard forwards its own.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._draining = False
        self._old: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._terminated_s = -math.inf  # time of the last SIGTERM
        self.count = 0  # number of stop requests
        self.reason = "a signal"  # reason of the first request

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._heard) for number in handled()}
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._old.items():
            signal.signal(number, handler)
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

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            last, self._terminated_s = self._terminated_s, time.monotonic()
            if self._terminated_s < last + ONE_STOP_S:
                return
        self.request(signal.Signals(number).name)
        if self._draining and self.count < 2:
            return
        words = f"Stopped by {self.reason}. Run the same command to resume."
        if self._timer is not None:
            _leave_now(words)  # second request during the first one
        self._timer = _leave_later(self._grace_s, words)
        if not self._draining:
            raise Stopped(self.reason)


def _leave_later(grace_s: float, words: str) -> threading.Timer:
    timer = threading.Timer(grace_s, _leave_now, (words,))
    timer.daemon = True
    timer.start()
    return timer


def _leave_now(words: str) -> NoReturn:
    """Exit without waiting. Parts are complete or absent, so nothing is lost."""
    with suppress(OSError, ValueError):  # stderr may be closed
        os.write(2, f"{words}\n".encode())
    os._exit(Interrupted.exit_code)
