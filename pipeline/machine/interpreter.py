"""The environment of Python child processes: they import the modules that this process imports, never files in the
working directory.

Python puts the working directory, or a script's folder, first in `sys.path`. A `random.py` or a `pipeline` package of
the user in that folder would shadow ours in a child process.
"""

import os
import sys
from pathlib import Path

from pipeline.machine.threads import bounded_spin

PACKAGE_PARENT = str(Path(__file__).absolute().parents[2])  # the folder from which `pipeline` was imported


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment for a `subprocess`: the current one, a safe module path, a bounded spin of threads, and
    `more`."""
    path = os.pathsep.join(_module_path())
    return {**os.environ, **bounded_spin(os.environ), "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **more}


def _module_path() -> list[str]:
    """Return `sys.path` without the working directory, unless PYTHONPATH names it or it contains this package."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    wanted = {os.path.realpath(folder) for folder in (*named, PACKAGE_PARENT)}
    unwanted = {str(Path.cwd())} - wanted
    found = [folder for folder in sys.path if folder and os.path.realpath(folder) not in unwanted]
    return found if PACKAGE_PARENT in found else [*found, PACKAGE_PARENT]
