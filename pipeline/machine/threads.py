"""Waiting policy of the threads of parallel loops that share their cores with other processes.

libgomp, which runs torch's loops and by default numba's, assigns each thread its share of a loop in advance and waits
for all threads at the end. Waiting threads spin for milliseconds; if another process occupies a core, they take CPU
time from the very thread that they wait for. oneTBB's threads fetch work instead: a loop ends when its work is done,
even if some threads never arrived. Spinning torch threads would starve oneTBB's threads, so use both settings together.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress

_SPINS = 300  # about 5 to 15 us, as long as it takes to wake a thread
_MAX_SPINS = 10_000  # above this, spinning takes as long as the loops
_LIBRARY = "libtbb.so.12"


def bounded_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the environment of a process before it loads torch, so that idle libgomp threads soon
    sleep.

    Empty if the environment already has a setting, and on platforms without oneTBB: there, a process alone on its cores
    is slower with this setting.
    """
    has_tbb = (sys.platform, platform.machine()) == ("linux", "x86_64")  # the platforms of pyproject.toml
    if not has_tbb or {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys():
        return {}
    return {"GOMP_SPINCOUNT": str(_SPINS)}


def is_spin_bounded() -> bool:
    """Return whether this process's environment makes idle libgomp threads sleep soon."""
    count = os.environ.get("GOMP_SPINCOUNT")
    if count is None:
        return os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    return count.isdigit() and int(count) <= _MAX_SPINS


def load_tbb() -> bool:
    """Load oneTBB, so that numba finds it: pip installs it outside the dynamic linker's search path.

    Return whether it is loaded.
    """
    from importlib.metadata import PackageNotFoundError, files

    with suppress(PackageNotFoundError, OSError):
        for file in files("tbb") or ():
            if file.name == _LIBRARY:
                ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
                return True
    return False
