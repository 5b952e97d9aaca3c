"""How the threads of parallel loops wait, where they share their cores with other processes.

libgomp, which runs torch's loops and by default numba's, gives each thread its share of a loop in advance and waits for
all threads at its end. Threads that wait spin for milliseconds, and so take the time of the very thread that they wait
for when another process has its core. oneTBB's threads fetch work instead: a loop ends when its work is done, whether
all threads came or not. Threads of torch must not spin next to those of oneTBB, so the two settings come together.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress

_SPINS = 300  # about 5 to 15 us, as long as it takes to wake a thread
_MAX_SPINS = 10_000  # from here on, spinning takes as long as the loops
_LIBRARY = "libtbb.so.12"


def bounded_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the environment of a process before it loads torch, so that libgomp's threads soon sleep.

    Empty where the environment has a setting already, and on platforms for which oneTBB is not installed: without it,
    a process alone on its cores is slower with this setting.
    """
    has_tbb = (sys.platform, platform.machine()) == ("linux", "x86_64")  # as pyproject.toml has it
    if not has_tbb or {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys():
        return {}
    return {"GOMP_SPINCOUNT": str(_SPINS)}


def is_spin_bounded() -> bool:
    """Return whether this process's environment lets libgomp's threads sleep soon."""
    count = os.environ.get("GOMP_SPINCOUNT")
    if count is None:
        return os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    return count.isdigit() and int(count) <= _MAX_SPINS


def load_tbb() -> bool:
    """Load oneTBB, so that numba finds it: pip installs it into a folder in which the dynamic linker does not look.

    Returns whether it is loaded.
    """
    from importlib.metadata import PackageNotFoundError, files

    with suppress(PackageNotFoundError, OSError):
        for file in files("tbb") or ():
            if file.name == _LIBRARY:
                ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
                return True
    return False
