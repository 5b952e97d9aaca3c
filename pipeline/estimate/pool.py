"""Estimate of a pool of engines on one kind of machine."""

from dataclasses import dataclass

from pipeline.report.estimate import Interval


@dataclass(frozen=True)
class PoolEstimate:
    """Estimate of a pool of engines with `num_cards` cards each. machine_us: of all engines together, until the last
    one ends. usd: None without a price."""

    machine: str
    actors: int
    wall_us: Interval
    machine_us: Interval
    usd: Interval | None = None
    spot_usd: Interval | None = None
    interruptions: float = 0.0  # expected number on spot machines
    weights: str = ""
    basis: str = ""
    lacks: str = ""
    num_cards: int = 1
