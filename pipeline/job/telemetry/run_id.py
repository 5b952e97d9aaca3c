"""Names of runs: `0001-20261123-120000-a1b2`. The number orders them; the time is for readers."""

import re
import secrets
from collections.abc import Iterable
from datetime import datetime

_NUMBER = re.compile(r"(\d+)-")


def run_number(run_id: str) -> int:
    """Return the run's number; 0 for other names."""
    match = _NUMBER.match(run_id)
    return int(match[1]) if match else 0


def next_run_id(earlier: Iterable[str], now: datetime) -> str:
    """Return the name of a run after all of `earlier`."""
    number = max(map(run_number, earlier), default=0) + 1
    return f"{number:04d}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
