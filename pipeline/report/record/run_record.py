"""What a run measured about itself: whole numbers of microseconds, tokens and rows, so that sums are exact.

Owns the records that a run leaves in `_pipeline/runs/<run id>.json` and the phases an actor's time is cut
into. Does not own prices or the report over several runs (`run_report.py`), nor the engine's own counters
(`engine.stats.EngineStats`, kept here as a plain dict).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.report.record.data_warnings import DataWarning
from pipeline.report.record.json_record import SCHEMA_VERSION, JsonRecord
from pipeline.report.record.row_stats import Computed, RowStats

# The phases of an actor's time. They do not overlap and together are all of it, from the start of the actor's
# process to its end. Parts are written while engines compute: all of that is `RunRecord.write_us`, in no phase.
PHASE_MEANING = {
    "startup": "process, imports, device",
    "load": "weights, warm-up",
    "prefill": "reading prompts",
    "decode": "generating tokens",
    "wasted": "drafts rejected, work done again or lost",
    "quality": "sample rows compared with a reference model",
    "idle": "no rows to compute: waiting for input, writing, other engines' last rows",
}
PHASES = tuple(PHASE_MEANING)

MICROSECONDS_PER_HOUR = 3_600_000_000

Outcome = Literal["running", "finished", "sampled", "stopped", "interrupted", "failed", "killed"]


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


def summed(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Counters of several, added up by name."""
    names = list(dict.fromkeys(name for part in counts for name in part))
    return {name: sum(part.get(name, 0) for part in counts) for name in names}


def per_second(count: int, us: int) -> float:
    """A rate; 0.0 when no time has passed."""
    return count * 1e6 / us if us > 0 else 0.0


@dataclass(frozen=True)
class ActorRecord:
    """One engine actor of one run. `phases_us` holds every phase; their sum is the actor's machine time.

    `delivered_tokens` to `crashed_tokens` say what became of the tokens that its engines computed; the rest is `open`.
    They are recorded together with `stats`, so that the difference is of one moment.
    """

    actor: int
    phases_us: dict[str, int] = field(default_factory=no_phases)
    stats: dict[str, int] = field(default_factory=dict)  # EngineStats, summed over its engine processes
    units: int = 0
    rows: int = 0
    error_rows: int = 0
    restarts: int = 0  # engine processes that ended on their own or were ended because they hung
    restart_reasons: list[str] = field(default_factory=list)  # how they ended, of the first few
    restart_us: int = 0  # start-up and load of the engine processes after the first
    crashed_us: int = 0  # of `wasted`: from an engine process's last report to its end, with rows in it
    tail_us: int = 0  # of `idle`: since it last computed anything
    poison_rows: int = 0  # that ended the engine's process and became error rows
    units_in_progress: int = 0  # begun and not finished at the moment of this record
    delivered_tokens: Computed = field(default_factory=Computed)  # of completed rows of parts that it wrote
    duplicate_tokens: Computed = field(default_factory=Computed)  # of units whose part already existed
    kept_tokens: Computed = field(default_factory=Computed)  # of finished rows that a stopped run kept for the next one
    crashed_tokens: Computed = field(default_factory=Computed)  # of rows in an engine process when it ended
    resumed_rows: int = 0  # rows that an earlier run had kept, delivered in parts of this one
    resumed_generated_tokens: int = 0  # of these
    storage_retries: dict[str, int] = field(default_factory=dict)  # of its requests to stores, by kind
    replaces: int | None = None  # the actor whose process had ended
    host: str = ""  # the name of its machine
    node_id: str = ""  # Ray's name for that machine; empty without Ray
    node_lost: bool = False  # the machine has left the cluster
    started_us: int = 0  # after the run's start, with which the first ones begin
    released: bool = False  # by an elastic pool, before the run's end, as no unit was left for it

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
        """Tokens computed and neither delivered nor known to be lost or kept."""
        known = self.delivered_tokens + self.duplicate_tokens + self.kept_tokens + self.crashed_tokens
        return self.computed.less(known)

    @property
    def node(self) -> str:
        """Its machine, for people: one that comes again under its host's name is another one to Ray."""
        return f"{self.host} (Ray node {self.node_id[:8]})"

    def times_of_us(self, tokens: Computed) -> tuple[int, int]:
        """Return the prefill and the decode time that its engines took for `tokens`, on average."""
        computed = self.computed
        prompt = self.phases_us["prefill"] * min(tokens.prompt, computed.prompt) // max(1, computed.prompt)
        generated = self.phases_us["decode"] * min(tokens.generated, computed.generated) // max(1, computed.generated)
        return prompt, generated


@dataclass(frozen=True)
class Moment:
    """Sums over the engines of a run, `at_us` after it began."""

    at_us: int
    prompt_tokens: int  # computed ones
    generated_tokens: int
    steps: int
    batch_sum: int
    kv_used_ppm_sum: int
    actors_computing: int  # those with units in progress


class Moments:
    """At most MAX_MOMENTS of a run, evenly spread: when there are more, every second one is dropped and the next ones
    are recorded half as often."""

    MAX_MOMENTS = 240

    def __init__(self) -> None:
        self._every_us, self._next_us = 1_000_000, 0
        self.recorded: list[Moment] = []

    def add(self, at_us: int, actors: Sequence[ActorRecord]) -> None:
        """Record what `actors` have done, `at_us` after the run began, unless the last moment was too short ago."""
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
    """A file of the input that was left out because it is damaged, as `input.on_corrupt: skip` asks."""

    file: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class RunRecord(JsonRecord):
    """One run of a job, replaced in the output folder as the run goes on.

    `rows_written` to `generated_tokens` cover the parts this run wrote; what its engines did is in `actors`,
    and the difference is work whose part was lost or already existed. `input_tokens` to `generated_tokens` are of
    completed rows, `error_input_tokens` the prompt tokens of error rows. `settings` are those that may change between
    runs, without secrets. `hourly_usd` is the declared price of one actor's machine for an hour, None when not
    declared. `started_at` is for people only: nothing is decided by it.
    """

    run_id: str
    started_at: str
    outcome: Outcome = "running"
    wall_us: int = 0
    driver_us: dict[str, int] = field(default_factory=dict)
    actors: list[ActorRecord] = field(default_factory=list)
    rows_written: int = 0
    units_written: int = 0
    duplicate_units: int = 0  # computed here, but another run or try had written the part first
    input_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    write_us: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    hourly_usd: float | None = None
    resolved: dict[str, Any] = field(default_factory=dict)  # what the engines chose: device, dtype, limits
    row_stats: RowStats = field(default_factory=RowStats)  # of the rows it wrote
    storage_retries: dict[str, int] = field(default_factory=dict)  # of the driver's requests to stores, by kind
    units_already_written: int = 0  # handed out, but their part existed before any work
    skipped_files: list[SkippedInput] = field(default_factory=list)
    error_rows: dict[str, int] = field(default_factory=dict)  # of `rows_written`, by code
    error_input_tokens: int = 0
    telemetry_failures: int = 0  # writes of status, record and report that failed
    sample_rows: int = 0  # that `--sample` requested; such a run writes no parts
    sample_row_stats: RowStats = field(default_factory=RowStats)  # of the rows of a run with --sample
    retry_limits: dict[str, Any] = field(default_factory=dict)  # of --retry-failed, where not the job's
    stopped_by: str = ""  # the key of the job file whose limit ended it
    moments: list[Moment] = field(default_factory=list)  # progress over time, for the charts of the report
    extra_samples: int = 0  # samples written as rows of their own, not counted in `rows_written`
    warnings: list[DataWarning] = field(default_factory=list)  # oddities of the input that planning found
    schema_version: int = SCHEMA_VERSION

    @property
    def machine_us(self) -> int:
        return sum(actor.machine_us for actor in self.actors)

    @property
    def computed(self) -> Computed:
        return sum((actor.computed for actor in self.actors), Computed())

    def phase_us(self, phase: str) -> int:
        return sum(actor.phases_us[phase] for actor in self.actors)

    def usd(self, us: int) -> float:
        """Return the declared price of `us` of machine time; 0 when none is declared."""
        return (self.hourly_usd or 0.0) * us / MICROSECONDS_PER_HOUR

    def stat(self, name: str) -> int:
        """One of EngineStats' counters, summed over the actors."""
        return sum(actor.stats.get(name, 0) for actor in self.actors)
