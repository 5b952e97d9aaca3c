"""The clock of all durations: monotonic, in whole microseconds, the same for all processes of one machine."""

import time


def now_us() -> int:
    return time.monotonic_ns() // 1000
