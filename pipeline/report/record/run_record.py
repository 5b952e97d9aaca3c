"""What a run measured about itself: whole numbers of microseconds, tokens and rows, so that sums are exact.

Owns the records that a run leaves in `_pipeline/runs/<run id>.json` and the phases an actor's time is cut
into. Does not own prices or the report over several runs (`run_report.py`), nor the engine's own counters
(`engine.stats.EngineStats`, kept here as a plain dict).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.report.record.computed import Computed
from pipeline.report.record.data_warnings import DataWarning
from pipeline.report.record.json_record import SCHEMA_VERSION, JsonRecord
from pipeline.report.record.row_stats import RowStats

# The phases of an actor's time. They do not overlap and together are all of it, from the start of the actor's
# process to its end. Parts are written beside them (all of that is `RunRecord.write_us`): `write` is idle time.
PHASES = (
    "startup",
    "load",
    "prefill",
    "decode",
    "drafts",
    "preempted",
    "retried",
    "quality",
    "write",
    "waiting",
    "tail",
)

PHASE_MEANING = {
    "startup": "process, imports, device",
    "load": "weights, warm-up",
    "prefill": "reading prompts",
    "decode": "writing tokens",
    "drafts": "draft tokens that were rejected",
    "preempted": "work done again after a preemption",
    "retried": "work that was lost, or done again after a failure",
    "quality": "sample rows compared with a reference model",
    "write": "idle while a part was written",
    "waiting": "idle, no rows at hand",
    "tail": "idle, other actors finish the last rows",
}

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

    `delivered` to `died` are where the tokens that its engines computed went; what is left of them is `open`.
    They are told together with `stats`, so that the difference is of one moment.
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
    died_us: int = 0  # of the phase `retried`: between an engine process's last word and its end, with rows in it
    convicted_rows: int = 0  # that ended the engine's process and became error rows
    open_units: int = 0  # begun and not finished at the moment of this record
    delivered: Computed = field(default_factory=Computed)  # of completed rows of parts that it wrote
    doubled: Computed = field(default_factory=Computed)  # of units whose part was there already
    kept: Computed = field(default_factory=Computed)  # of finished rows of units that a stopped run could not finish
    died: Computed = field(default_factory=Computed)  # of rows that were in an engine process when it ended
    taken_rows: int = 0  # rows that an earlier run had kept, delivered in parts of this one
    taken_generated_tokens: int = 0  # of these
    storage_retries: dict[str, int] = field(default_factory=dict)  # of its requests to stores, by kind
    replaces: int | None = None  # the actor whose process had ended
    host: str = ""  # the name of its machine
    node_id: str = ""  # Ray's name for that machine; empty without Ray
    node_lost: bool = False  # the machine has left the cluster
    began_us: int = 0  # after the run's start, with which the first ones begin
    given_back: bool = False  # by an elastic pool, before the run's end, as no unit was left for it

    def __post_init__(self) -> None:
        assert set(self.phases_us) == set(PHASES), f"phases {sorted(self.phases_us)}"
        assert all(isinstance(us, int) and us >= 0 for us in self.phases_us.values()), self.phases_us

    @property
    def machine_us(self) -> int:
        return sum(self.phases_us.values())

    @property
    def computed(self) -> Computed:
        return Computed.by(self.stats)

    @property
    def open(self) -> Computed:
        """Computed, and neither delivered nor known to be lost or kept."""
        return self.computed.less(self.delivered + self.doubled + self.kept + self.died)

    @property
    def node(self) -> str:
        """Its machine, for people: one that comes again under its host's name is another one to Ray."""
        return f"{self.host} (Ray node {self.node_id[:8]})"

    def times_of_us(self, tokens: Computed) -> tuple[int, int]:
        """The time that its engines took for so many prompt tokens, and for so many generated ones, on average."""
        computed = self.computed
        prompt = self.phases_us["prefill"] * min(tokens.prompt, computed.prompt) // max(1, computed.prompt)
        generated = self.phases_us["decode"] * min(tokens.generated, computed.generated) // max(1, computed.generated)
        return prompt, generated

    def time_of_us(self, tokens: Computed) -> int:
        """Both."""
        return sum(self.times_of_us(tokens))


@dataclass(frozen=True)
class Moment:
    """What the engines of a run had done, in sums, so long after it began. running: engines that had open units."""

    at_us: int
    prompt: int
    generated: int
    steps: int
    batch_sum: int
    kv_used_ppm_sum: int
    running: int


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
    and the difference is work whose part was lost or already there. `input_tokens` to `generated_tokens` are of
    completed rows, `error_input_tokens` the prompt tokens of error rows, which a record of an earlier version counted
    in `input_tokens`. `config_free` holds the settings that may
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
    row_stats: RowStats = field(default_factory=RowStats)  # of the rows it wrote
    storage_retries: dict[str, int] = field(default_factory=dict)  # of the driver's requests to stores, by kind
    units_found: int = 0  # handed out, but their part was there before any work
    skipped_files: list[SkippedInput] = field(default_factory=list)
    error_rows: dict[str, int] = field(default_factory=dict)  # of `rows_written`, by code
    error_input_tokens: int = 0
    telemetry_failures: int = 0  # writes of status, record and report that failed
    sample_rows: int = 0  # of a run with --sample, which writes no parts: how many rows it was asked for
    retried_limits: dict[str, Any] = field(default_factory=dict)  # of its error rows, where not the job's
    stopped_by: str = ""  # the key of the job file whose limit ended it
    sampled_stats: RowStats = field(default_factory=RowStats)  # of the rows of a run with --sample
    moments: list[Moment] = field(default_factory=list)  # how it went over time (`moments.py`)
    further_samples: int = 0  # written as rows, beside `rows_written`
    warnings: list[DataWarning] = field(default_factory=list)  # what planning found odd about the input
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
        """The declared price of so much machine time; 0 when none is declared."""
        return (self.hourly_usd or 0.0) * us / MICROSECONDS_PER_HOUR

    def stat(self, name: str) -> int:
        """One of EngineStats' counters, summed over the actors."""
        return sum(actor.stats.get(name, 0) for actor in self.actors)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "RunRecord":
        """Also of earlier versions, whose actors lack phases that came later, or what they delivered."""
        actors = [{**actor, "phases_us": _phases_of(actor)} for actor in raw.get("actors", [])]
        run = super().from_json({**raw, "actors": actors})
        return run if all("delivered" in actor for actor in actors) else replace(run, actors=_with_deliveries(run))


def _phases_of(actor: Mapping[str, Any]) -> dict[str, int]:
    """All phases. Earlier versions had `repeated` in the place of `preempted` and `retried`."""
    phases = no_phases() | actor.get("phases_us", {})
    repeated = phases.pop("repeated", 0)
    died = min(actor.get("died_us", 0), repeated)
    return phases | {"preempted": phases["preempted"] + repeated - died, "retried": phases["retried"] + died}


def _with_deliveries(run: RunRecord) -> list[ActorRecord]:
    """The actors of a record that only says what the whole run delivered: each delivered in proportion to what it
    computed."""
    weights = [actor.computed for actor in run.actors]
    prompt = split_exactly(max(0, run.input_tokens - run.cached_tokens), [w.prompt for w in weights])
    generated = split_exactly(run.generated_tokens, [w.generated for w in weights])
    return [replace(actor, delivered=Computed(p, g)) for actor, p, g in zip(run.actors, prompt, generated, strict=True)]
