"""How this program starts Python processes of its own: they find the modules that this one finds, and none beside the
job file.

Python puts the working directory, or a script's folder, before everything else. There a user may keep a `random.py`
or a package called `pipeline`, and a child would import that in the place of ours.
"""

import os
import sys
from pathlib import Path

from pipeline.machine.threads import bounded_spin

PACKAGE_PARENT = str(Path(__file__).absolute().parents[2])  # the folder that `import pipeline` was found in


def child_environment(**more: str) -> dict[str, str]:
    """The environment of a child process, for `subprocess`: this one's, a safe path of modules, threads that do not
    spin for long, and `more`."""
    path = os.pathsep.join(_module_path())
    return {**os.environ, **bounded_spin(os.environ), "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **more}


def _module_path() -> list[str]:
    """`sys.path` without the working directory, unless PYTHONPATH names it or this package lies there."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    wanted = {os.path.realpath(place) for place in (*named, PACKAGE_PARENT)}
    unwanted = {str(Path.cwd())} - wanted
    found = [place for place in sys.path if place and os.path.realpath(place) not in unwanted]
    return found if PACKAGE_PARENT in found else [*found, PACKAGE_PARENT]
