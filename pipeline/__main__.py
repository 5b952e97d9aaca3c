"""The console script, and `python -m pipeline`: signals first, then everything else.

Importing the command line takes a quarter of a second. A SIGTERM that comes in that time leaves with 75 as at any
other, not by the system's default.
"""

import os
import signal
import sys
import threading
from types import FrameType


class Interrupt(KeyboardInterrupt):
    """A signal. A class of its own: Python remembers a plain KeyboardInterrupt that went through `exec` (importing a
    dataclass does it) and then ends itself with SIGINT, whatever the exit code was to be."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupt(signal.Signals(number).name)


def _send_again(lost: "sys.UnraisableHookArgs") -> None:
    """Nothing is raised out of a callback of the garbage collector, which importing a module runs too: a signal that
    came there comes once more."""
    if isinstance(lost.exc_value, Interrupt):
        number = signal.Signals[str(lost.exc_value)]
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()  # after the callback
    else:
        sys.__unraisablehook__(lost)


def main() -> None:
    sys.unraisablehook = _send_again
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # as nohup asks
            signal.signal(number, _interrupt)
        from pipeline.cli.main import main as command

        command()
    except KeyboardInterrupt:
        from pipeline.errors import Interrupted

        print("Interrupted.", file=sys.stderr)
        sys.exit(Interrupted.exit_code)


if __name__ == "__main__":
    main()
