"""Whether numba can be used here, and where it keeps what it compiles.

No import of it elsewhere tells: it may be installed and refuse to be imported.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def numba_unavailable_reason() -> str | None:
    """What to read after "numba"; None where it can be imported. It refuses numpy versions that it does not know."""
    if find_spec("numba") is None:
        return "is not installed"
    try:
        import_module("numba")
    except ImportError as error:
        return f"cannot be imported ({error})"
    return None


def keep_compiled_in(folder: Path) -> None:
    """Let numba keep compiled functions in `folder`. A function takes the folder that is set when its module is
    imported; without one, numba tries `__pycache__` next to the module, then the user's home, then raises."""
    import_module("numba").config.CACHE_DIR = str(folder)
