"""Signals before a run has handlers of its own: each ends the command, wherever it is.

Nothing heavy is imported here: this is what catches a signal while the rest is imported.
"""

import os
import signal
import sys
import threading
from types import FrameType

_raised: list[signal.Signals] = []


class Interrupt(KeyboardInterrupt):
    """A signal. A class of its own: Python remembers a plain KeyboardInterrupt that went through `exec` (importing a
    dataclass does it) and then ends itself with SIGINT, whatever the exit code was to be."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """The handler."""
    _raised.append(signal.Signals(number))
    raise Interrupt(signal.Signals(number).name)


def was_raised() -> bool:
    """Whether a signal has come. An extension module may turn its exception into one of its own, as pydantic's does
    where it builds a validator."""
    return bool(_raised)


def send_again(lost: "sys.UnraisableHookArgs") -> None:
    """Nothing is raised out of a callback of the garbage collector, which importing a module runs too: a signal that
    came there comes once more."""
    if isinstance(lost.exc_value, Interrupt):
        number = signal.Signals[str(lost.exc_value)]
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()  # after the callback
    else:
        sys.__unraisablehook__(lost)
