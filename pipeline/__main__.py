"""Entry point of the console script and of `python -m pipeline`. Installs signal handlers first.

Importing the command line takes a quarter of a second. A SIGTERM during that time must also exit with 75, and not with
the system's default.
"""

import os
import signal

from pipeline.cli import interrupt
from pipeline.machine.threads import bounded_spin

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def main() -> None:
    # nohup ignores SIGHUP
    handled = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, interrupt.leave)
    os.environ.update(bounded_spin(os.environ))  # before torch is imported
    from pipeline.cli.main import main as command

    try:
        for number in handled:
            signal.signal(number, interrupt.interrupt)
        command()
    except SystemExit as leaving:
        interrupt.leave_process(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except KeyboardInterrupt:
        interrupt.leave(signal.SIGINT, None)
    interrupt.leave_process(0)


if __name__ == "__main__":
    main()
