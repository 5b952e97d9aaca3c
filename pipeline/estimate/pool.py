"""So many engines on a kind of machine, and what they would take."""

from dataclasses import dataclass

from pipeline.report.estimate import Interval


@dataclass(frozen=True)
class PoolEstimate:
    """So many engines. machine_us: of them all, from their start to the end of the last one. usd: None without a
    price."""

    place: str
    actors: int
    wall_us: Interval
    machine_us: Interval
    usd: Interval | None = None
    spot_usd: Interval | None = None
    interruptions: float = 0.0  # of a spot machine, expected
    weights: str = ""
    basis: str = ""
    lacks: str = ""
