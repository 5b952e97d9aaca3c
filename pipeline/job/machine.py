"""This machine's clock and cores."""

import os
import time


def now_us() -> int:
    """Monotonic, in whole microseconds, the same for all processes of one machine."""
    return time.monotonic_ns() // 1000


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
