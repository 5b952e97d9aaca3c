"""Signals outside a run, which has handlers of its own (`job/running/stop.py`): each ends the command with 75.

Nothing heavy is imported here: this is what catches a signal while the rest is imported.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED = 75  # as `errors.Interrupted`, which is not imported yet
GRACE_S = 10.0  # from a signal to the end of its process, whatever holds its exception up
_raised: list[signal.Signals] = []


def leave(number: int, frame: FrameType | None) -> None:
    """Handle a signal while the command line is imported: there is nothing to undo, and an exception can be lost in a
    callback of the garbage collector."""
    _leave_now()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal while a command runs: it undoes what it has begun, for GRACE_S at most."""
    _raised.append(signal.Signals(number))
    timer = threading.Timer(GRACE_S, _leave_now)
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt


def was_raised() -> bool:
    """Return whether a signal has come. An extension module may turn its exception into one of its own, as pydantic's
    does where it builds a validator."""
    return bool(_raised)


def leave_process(code: int) -> NoReturn:
    """Leave with this code, without the interpreter's and the libraries' own end: it may take seconds, and a signal in
    it would change the code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda *_: os._exit(code))  # where writing hangs
    with suppress(OSError, ValueError):  # the reader may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _leave_now() -> NoReturn:
    with suppress(OSError, ValueError):
        os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)
