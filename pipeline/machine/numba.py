"""Whether numba can be used here. No import of it elsewhere tells: it may be installed and refuse to be imported."""

from importlib import import_module
from importlib.util import find_spec


def why_no_numba() -> str | None:
    """What to read after "numba"; None where it can be imported. It refuses numpy versions that it does not know."""
    if find_spec("numba") is None:
        return "is not installed"
    try:
        import_module("numba")
    except ImportError as error:
        return f"cannot be imported ({error})"
    return None
