"""What is compiled of the proposer that looks up. No torch."""

from collections.abc import Callable
from typing import NamedTuple


class CompiledLookup(NamedTuple):
    """Of `cpu/lookup.py` and `cpu/templates.py`, which tell what they take."""

    look_up: Callable[..., None]
    index_runs: Callable[..., None]
    learn: Callable[..., None]
    draft: Callable[..., None]
