"""What is compiled of the proposer that looks up, where numba is installed. No torch."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple


class CompiledLookup(NamedTuple):
    """Of `compiled_lookup.py` and `compiled_copies.py`, which tell what they take."""

    look_up: Callable[..., None]
    index_runs: Callable[..., None]
    learn: Callable[..., None]
    draft: Callable[..., None]


def select_lookup() -> CompiledLookup | None:
    """None where numba is not installed."""
    if find_spec("numba") is None:
        return None
    from pipeline.engine.drafts.lookup import compiled_copies, compiled_lookup

    return CompiledLookup(
        compiled_lookup.look_up, compiled_lookup.index_runs, compiled_copies.learn, compiled_copies.draft
    )
