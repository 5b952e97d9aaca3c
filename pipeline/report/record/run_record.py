"""Record of a run in `_pipeline/runs/<run id>.json`, and the phases of an actor's time.

Microseconds, tokens and rows are integers, so that sums are exact. The report over several runs is in `run_report.py`;
the engine's counters (`engine.stats.EngineStats`) are stored here as a plain dict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.prices import Prices
from pipeline.report.record.data_warnings import DataWarning
from pipeline.report.record.json_record import SCHEMA_VERSION, JsonRecord
from pipeline.report.record.row_stats import Computed, RowStats

# Phases of an actor's time. They do not overlap and cover all of it, from the start of the actor's process to its end.
# Writing parts overlaps with computing and is counted in `RunRecord.write_us`, not in a phase.
PHASE_MEANING = {
    "startup": "process, imports, device",
    "load": "weights, warm-up",
    "prefill": "processing prompts",
    "decode": "generating tokens",
    "wasted": "rejected drafts, repeated or lost work",
    "quality": "comparing sample rows with a reference model",
    "idle": "no rows to compute: waiting for input, writing, or the last rows of other engines",
}
PHASES = tuple(PHASE_MEANING)

Outcome = Literal["running", "finished", "sampled", "stopped", "interrupted", "failed", "killed"]


def no_phases() -> dict[str, int]:
    """Return all phases with zero microseconds."""
    return dict.fromkeys(PHASES, 0)


def split_exactly(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` in proportion to `weights` into integers with the exact sum (largest remainder method).

    If all weights are zero, the first part gets everything.
    """
    whole = sum(weights)
    if whole == 0:
        return [total] + [0] * (len(weights) - 1)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def summed(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Add up counters by name."""
    names = list(dict.fromkeys(name for part in counts for name in part))
    return {name: sum(part.get(name, 0) for part in counts) for name in names}


def per_second(count: int, us: int) -> float:
    """Return a rate; 0.0 if no time has passed."""
    return count * 1e6 / us if us > 0 else 0.0


@dataclass(frozen=True)
class ActorRecord:
    """Record of one engine actor in one run. `phases_us` holds every phase; the sum is the actor's machine time.

    `delivered_tokens` to `crashed_tokens` are the known outcomes of the tokens that its engines computed; the rest is
    `open`. They are recorded together with `stats`, so that they are consistent.
    """

    actor: int
    phases_us: dict[str, int] = field(default_factory=no_phases)
    stats: dict[str, int] = field(default_factory=dict)  # EngineStats, summed over its engine processes
    units: int = 0
    rows: int = 0
    error_rows: int = 0
    restarts: int = 0  # engine processes that exited, or were killed because they hung
    restart_reasons: list[str] = field(default_factory=list)  # why they ended, for the first few
    restart_us: int = 0  # start-up and load of the engine processes after the first
    crashed_us: int = 0  # part of `wasted`: from an engine process's last report to its end, while it had rows
    tail_us: int = 0  # part of `idle`: since the last computation
    units_in_progress: int = 0  # started and not finished at the time of this record
    delivered_tokens: Computed = field(default_factory=Computed)  # of completed rows in parts that it wrote
    kept_tokens: Computed = field(default_factory=Computed)  # of finished rows that a stopped run kept for the next one
    crashed_tokens: Computed = field(default_factory=Computed)  # of rows in an engine process when it ended
    resumed_rows: int = 0  # rows kept by an earlier run and delivered in parts of this one
    resumed_generated_tokens: int = 0  # of these rows
    storage_retries: dict[str, int] = field(default_factory=dict)  # of its requests to stores, by kind
    replaces: int | None = None  # the actor that ended and was replaced by this one
    host: str = ""  # host name of its machine
    node_id: str = ""  # Ray's node id; empty without Ray
    node_lost: bool = False  # the machine has left the cluster
    started_us: int = 0  # time after the run's start; 0 for the first actors
    released: bool = False  # by an elastic pool before the run's end, because no units remained

    def __post_init__(self) -> None:
        assert set(self.phases_us) == set(PHASES), f"phases {sorted(self.phases_us)}"
        assert all(isinstance(us, int) and us >= 0 for us in self.phases_us.values()), self.phases_us

    @property
    def machine_us(self) -> int:
        return sum(self.phases_us.values())

    @property
    def computed(self) -> Computed:
        return Computed.from_stats(self.stats)

    @property
    def open(self) -> Computed:
        """Computed tokens that are neither delivered nor known to be lost or kept."""
        known = self.delivered_tokens + self.kept_tokens + self.crashed_tokens
        return self.computed.less(known)

    @property
    def node(self) -> str:
        """Machine for display; the Ray node id distinguishes machines that rejoin with the same host name."""
        return f"{self.host} (Ray node {self.node_id[:8]})"

    def times_of_us(self, tokens: Computed) -> tuple[int, int]:
        """Return the prefill and the decode time of `tokens`, by the average times of its engines."""
        computed = self.computed
        prompt = self.phases_us["prefill"] * min(tokens.prompt, computed.prompt) // max(1, computed.prompt)
        generated = self.phases_us["decode"] * min(tokens.generated, computed.generated) // max(1, computed.generated)
        return prompt, generated


@dataclass(frozen=True)
class Moment:
    """Sums over the engines of a run, `at_us` after its start."""

    at_us: int
    prompt_tokens: int  # computed, without cached ones
    generated_tokens: int
    steps: int
    batch_sum: int
    kv_used_ppm_sum: int
    actors_computing: int  # actors with units in progress


class Moments:
    """Up to MAX_MOMENTS evenly spaced moments of a run. When there are more, every second one is dropped, and the
    interval doubles."""

    MAX_MOMENTS = 240

    def __init__(self) -> None:
        self._every_us, self._next_us = 1_000_000, 0
        self.recorded: list[Moment] = []

    def add(self, at_us: int, actors: Sequence[ActorRecord]) -> None:
        """Record the progress of `actors`, `at_us` after the run's start, unless the last moment is too recent."""
        if at_us < self._next_us:
            return
        computed = sum((actor.computed for actor in actors), Computed())
        sums = summed([actor.stats for actor in actors])
        steps, batch, kv = (sums.get(name, 0) for name in ("num_steps", "batch_sum", "kv_used_ppm_sum"))
        computing = sum(bool(actor.units_in_progress) for actor in actors)
        self.recorded.append(Moment(at_us, computed.prompt, computed.generated, steps, batch, kv, computing))
        if len(self.recorded) > self.MAX_MOMENTS:
            self.recorded, self._every_us = self.recorded[::2], self._every_us * 2
        self._next_us = at_us + self._every_us


@dataclass(frozen=True)
class SkippedInput:
    """Damaged input file that was skipped because of `input.on_corrupt: skip`."""

    file: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class RunRecord(JsonRecord):
    """Record of one run of a job, rewritten in the output folder during the run.

    `rows_written` to `generated_tokens` cover the parts that this run wrote. `actors` records the work of its engines;
    the difference is work whose part was lost or already existed. `input_tokens` to `generated_tokens` count completed
    rows, `error_input_tokens` the prompt tokens of error rows. `settings` are the job's settings that may change
    between runs, without secrets. `hourly_usd` is the declared hourly price of one actor's machine, or None.
    `started_at` is for display only.
    """

    run_id: str
    started_at: str
    outcome: Outcome = "running"
    wall_us: int = 0
    driver_us: dict[str, int] = field(default_factory=dict)
    actors: list[ActorRecord] = field(default_factory=list)
    rows_written: int = 0
    units_written: int = 0
    duplicate_units: int = 0  # computed here, but another run or attempt wrote the part first
    input_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    write_us: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    hourly_usd: float | None = None
    usd_per_million: dict[str, float] = field(default_factory=dict)  # declared prices of a server's tokens
    resolved: dict[str, Any] = field(default_factory=dict)  # chosen by the engines: device, dtype, limits
    row_stats: RowStats = field(default_factory=RowStats)  # of the rows it wrote
    storage_retries: dict[str, int] = field(default_factory=dict)  # of the driver's requests to stores, by kind
    units_already_written: int = 0  # assigned, but their part existed before any work was done
    skipped_files: list[SkippedInput] = field(default_factory=list)
    error_rows: dict[str, int] = field(default_factory=dict)  # of `rows_written`, by code
    dropped_rows: dict[str, int] = field(default_factory=dict)  # of the output rows, by value of dropped_by
    error_input_tokens: int = 0
    telemetry_failures: int = 0  # writes of status, record and report that failed
    sample_rows: int = 0  # requested by `--sample`; such a run writes no parts
    sample_row_stats: RowStats = field(default_factory=RowStats)  # of the rows of a run with --sample
    retry_limits: dict[str, Any] = field(default_factory=dict)  # of rows computed again, if they differ from the job's
    redo: tuple[str, ...] = ()  # kinds of rows that `--redo` computed again
    stopped_by: str = ""  # key of the job file whose limit stopped the run
    moments: list[Moment] = field(default_factory=list)  # progress over time, for the charts of the report
    extra_samples: int = 0  # samples written as rows of their own, not counted in `rows_written`
    warnings: list[DataWarning] = field(default_factory=list)  # warnings about the input from planning
    schema_version: int = SCHEMA_VERSION

    @property
    def machine_us(self) -> int:
        return sum(actor.machine_us for actor in self.actors)

    @property
    def computed(self) -> Computed:
        return sum((actor.computed for actor in self.actors), Computed())

    def phase_us(self, phase: str) -> int:
        return sum(actor.phases_us[phase] for actor in self.actors)

    @property
    def prices(self) -> Prices:
        return Prices(self.hourly_usd, self.usd_per_million)

    def token_usd(self) -> tuple[float, float]:
        """Return the price of all prompt tokens and of all generated ones."""
        return self.prices.token_usd(summed([actor.stats for actor in self.actors]))

    @property
    def usd(self) -> float:
        """Price of its machine time and tokens."""
        return self.prices.machine_usd(self.machine_us) + sum(self.token_usd())

    @property
    def unmetered(self) -> dict[str, int]:
        """Counters of its engines, in which requests that were open at their last report are of unknown usage."""
        return summed([with_open_as_unmetered(actor.stats) for actor in self.actors])

    def stat(self, name: str) -> int:
        """Return a counter of EngineStats, summed over the actors."""
        return sum(actor.stats.get(name, 0) for actor in self.actors)


def with_open_as_unmetered(stats: Mapping[str, int]) -> dict[str, int]:
    """Return the counters of a process that has ended: the usage of its open requests stays unknown."""
    ended = {name: count for name, count in stats.items() if not name.startswith(("open_", "needed_", "num_open"))}
    moved = {f"unmetered_{name}_tokens": stats.get(f"open_{name}_tokens", 0) for name in ("prompt", "generated")}
    return summed([ended, {**moved, "num_unmetered": stats.get("num_open", 0)}]) if any(moved.values()) else ended
