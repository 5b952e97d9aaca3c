"""What a run measured about itself: whole numbers of microseconds, tokens and rows, so that sums are exact.

Owns the records that a run leaves in `_pipeline/runs/<run id>.json` and the phases an actor's time is cut
into. Does not own prices or the report over several runs (`cost.py`), nor the engine's own counters
(`engine.params.EngineStats`, kept here as a plain dict).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, cast

# The phases of an actor's time. They do not overlap and together are all of it, from the start of the actor's
# process to its end. Writing parts happens beside them and is counted in `RunRecord.write_us`.
PHASES = ("startup", "load", "prefill", "decode", "repeated", "waiting", "tail")

PHASE_MEANING = {
    "startup": "process, imports, device",
    "load": "weights, warm-up",
    "prefill": "reading prompts",
    "decode": "writing tokens",
    "repeated": "work done again after a preemption",
    "waiting": "no rows at hand",
    "tail": "the last rows, other actors done",
}

Outcome = Literal["running", "finished", "stopped", "interrupted", "failed", "killed"]

_T = TypeVar("_T")


def no_phases() -> dict[str, int]:
    """All phases at zero microseconds."""
    return dict.fromkeys(PHASES, 0)


def split_exactly(total: int, weights: Sequence[int]) -> list[int]:
    """`total` cut in proportion to `weights` into whole numbers that sum to it exactly (largest remainders).

    All-zero weights put everything on the first part.
    """
    whole = sum(weights)
    if whole == 0:
        return [total] + [0] * (len(weights) - 1)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def per_second(count: int, us: int) -> float:
    """A rate; 0.0 when no time has passed."""
    return count * 1e6 / us if us > 0 else 0.0


@dataclass(frozen=True)
class ActorRecord:
    """One engine actor of one run. `phases_us` holds every phase; their sum is the actor's machine time."""

    actor: int
    phases_us: dict[str, int] = field(default_factory=no_phases)
    stats: dict[str, int] = field(default_factory=dict)  # EngineStats, summed over its engine processes
    units: int = 0
    rows: int = 0
    error_rows: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        assert set(self.phases_us) == set(PHASES), f"phases {sorted(self.phases_us)}"
        assert all(isinstance(us, int) and us >= 0 for us in self.phases_us.values()), self.phases_us

    @property
    def machine_us(self) -> int:
        return sum(self.phases_us.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "ActorRecord":
        return _build(cls, {**raw, "phases_us": no_phases() | dict(raw.get("phases_us", {}))})


@dataclass(frozen=True)
class RunRecord:
    """One run of a job, replaced in the output folder as the run goes on.

    `rows_written` to `generated_tokens` cover the parts this run wrote; what its engines did is in `actors`,
    and the difference is work whose part was lost or already there. `config_free` holds the settings that may
    change between runs, without secrets. `hourly_usd` is the declared price of one actor's machine for an
    hour, None when not declared. `started_at` is for people only: nothing is decided by it.
    """

    run_id: str
    started_at: str
    outcome: Outcome = "running"
    wall_us: int = 0
    driver_us: dict[str, int] = field(default_factory=dict)
    actors: list[ActorRecord] = field(default_factory=list)
    rows_written: int = 0
    units_written: int = 0
    units_lost: int = 0  # computed here, but another run or try had written the part first
    input_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    write_us: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    config_free: dict[str, Any] = field(default_factory=dict)
    hourly_usd: float | None = None
    resolved: dict[str, Any] = field(default_factory=dict)

    @property
    def machine_us(self) -> int:
        return sum(actor.machine_us for actor in self.actors)

    def phase_us(self, phase: str) -> int:
        return sum(actor.phases_us[phase] for actor in self.actors)

    def stat(self, name: str) -> int:
        """One of EngineStats' counters, summed over the actors."""
        return sum(actor.stats.get(name, 0) for actor in self.actors)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "RunRecord":
        actors = [ActorRecord.from_json(actor) for actor in raw.get("actors", [])]
        return _build(cls, {**raw, "actors": actors})


def _build(cls: type[_T], raw: Mapping[str, Any]) -> _T:
    """A record from its JSON; keys that a newer version added are passed over."""
    known = {f.name for f in fields(cast(Any, cls))}
    return cls(**{key: value for key, value in raw.items() if key in known})
