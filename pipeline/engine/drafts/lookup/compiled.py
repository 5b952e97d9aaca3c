"""What is compiled of the proposer that looks up, where numba can be used. No torch."""

from collections.abc import Callable
from typing import NamedTuple

from pipeline.machine.numba import why_no_numba


class CompiledLookup(NamedTuple):
    """Of `compiled_lookup.py` and `compiled_copies.py`, which tell what they take."""

    look_up: Callable[..., None]
    index_runs: Callable[..., None]
    learn: Callable[..., None]
    draft: Callable[..., None]


def select_lookup() -> CompiledLookup | None:
    """None where numba cannot be used."""
    if why_no_numba() is not None:
        return None
    from pipeline.engine.drafts.lookup import compiled_copies, compiled_lookup

    return CompiledLookup(
        compiled_lookup.look_up, compiled_lookup.index_runs, compiled_copies.learn, compiled_copies.draft
    )
