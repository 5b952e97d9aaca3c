"""Signals before a run has handlers of its own, where each ends the command, and after the command has ended, where
none changes the exit code any more.

Nothing heavy is imported here: this is what catches a signal while the rest is imported.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
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


def keep_exit_code(code: object) -> None:
    """The command has ended and what is left is the interpreter's and the libraries' own end, which may take seconds:
    Ctrl-C cuts it short, with the code that the command ended with; a scheduler's signals change nothing."""
    with suppress(OSError, ValueError):  # nobody may read any more
        sys.stdout.flush()
        sys.stderr.flush()
    number = code if isinstance(code, int) else int(code is not None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda *_: os._exit(number))


def ignore_all() -> None:
    """For the last part of the interpreter's end, where it gives every signal that has a handler the system's default,
    which is to end the process by the signal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
