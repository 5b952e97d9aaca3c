"""Entry point of the console script and of `python -m pipeline`. Installs signal handlers first.

Importing the command line takes a quarter of a second. A SIGTERM during that time must also exit with 75, and not with
the system's default.
"""

import os
import signal

from pipeline.machine.signals import install, interrupt, leave, leave_process
from pipeline.machine.threads import bounded_spin


def main() -> None:
    install(leave)
    os.environ.update(bounded_spin(os.environ))  # before torch is imported
    from pipeline.cli.main import main as command

    try:
        install(interrupt)
        command()
    except SystemExit as leaving:
        leave_process(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except KeyboardInterrupt:
        leave(signal.SIGINT, None)
    leave_process(0)


if __name__ == "__main__":
    main()
