"""The console script, and `python -m pipeline`: signals first, then everything else.

Importing the command line takes a quarter of a second. A SIGTERM that comes in that time leaves with 75 as at any
other, not by the system's default.
"""

import signal
import sys

from pipeline.cli import interrupt


def main() -> None:
    sys.unraisablehook = interrupt.send_again
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # as nohup asks
            signal.signal(number, interrupt.interrupt)
        from pipeline.cli.main import main as command

        command()
    except KeyboardInterrupt:
        from pipeline.errors import Interrupted

        print("Interrupted.", file=sys.stderr)
        sys.exit(Interrupted.exit_code)


if __name__ == "__main__":
    main()
