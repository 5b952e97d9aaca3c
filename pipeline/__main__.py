"""The console script, and `python -m pipeline`: signals first, then everything else.

Importing the command line takes a quarter of a second. A SIGTERM that comes in that time leaves with 75 as at any
other, not by the system's default.
"""

import atexit
import os
import signal
import sys

from pipeline.cli import interrupt
from pipeline.machine.threads import bounded_spin


def main() -> None:
    sys.unraisablehook = interrupt.send_again
    atexit.register(interrupt.ignore_all)  # before anybody else's, so it is called after them
    os.environ.update(bounded_spin(os.environ))  # before torch is imported
    code: object = 0
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # as nohup asks
            signal.signal(number, interrupt.interrupt)
        from pipeline.cli.main import main as command

        command()
    except SystemExit as leaving:
        code = leaving.code
        raise
    except KeyboardInterrupt:
        from pipeline.errors import Interrupted

        print("Interrupted.", file=sys.stderr)
        code = Interrupted.exit_code
        sys.exit(code)
    finally:
        interrupt.keep_exit_code(code)


if __name__ == "__main__":
    main()
