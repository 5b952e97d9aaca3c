"""A rank's process that reports an error while it loads, and ends: `python -m tests.engine.parallel.failing_start`."""

import sys
from multiprocessing.connection import Connection

if __name__ == "__main__":
    Connection(int(sys.argv[1])).send(("", "ValueError: a bug in a test"))
    sys.exit(1)
