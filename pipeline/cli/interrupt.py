"""Signal handlers outside a run (`job/running/stop.py` has those of a run): each signal ends the command with 75.

Imports nothing heavy, since it handles signals while the rest is imported.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED = 75  # `errors.Interrupted.exit_code`; errors is not imported yet
GRACE_S = 10.0  # from a signal to a forced exit, if something blocks the exception
_raised: list[signal.Signals] = []


def leave(number: int, frame: FrameType | None) -> None:
    """Handle a signal during imports: exit at once. There is nothing to undo, and an exception raised in a callback of
    the garbage collector would be lost."""
    _leave_now()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal while a command runs: raise KeyboardInterrupt, and exit after GRACE_S at the latest."""
    _raised.append(signal.Signals(number))
    timer = threading.Timer(GRACE_S, _leave_now)
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt


def was_raised() -> bool:
    """Return whether a signal was received. An extension module may replace KeyboardInterrupt by its own exception, as
    pydantic does while it builds a validator."""
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


def _leave_now() -> NoReturn:
    with suppress(OSError, ValueError):
        os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)
