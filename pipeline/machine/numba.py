"""Import check and cache folder of numba. An installed numba may still fail to import."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def numba_unavailable_reason() -> str | None:
    """Return why numba cannot be used, to follow the word "numba"; None if it can. It rejects some numpy versions."""
    if find_spec("numba") is None:
        return "is not installed"
    try:
        import_module("numba")
    except ImportError as error:
        return f"cannot be imported ({error})"
    return None


def keep_compiled_in(folder: Path) -> None:
    """Keep numba's compiled functions in `folder`. A function uses the folder that is set when its module is imported;
    without one, numba tries `__pycache__` next to the module, then the user's home, then raises."""
    import_module("numba").config.CACHE_DIR = str(folder)
