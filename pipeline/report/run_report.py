"""A job's report over all its runs: rows, tokens, work, time, money, and what the plan had expected.

Owns the report's numbers and their names in JSON. `build.py` makes it, `sections.py` arranges it for people.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.report.account import Cost, Tokens
from pipeline.report.estimate import EstimateAndActual
from pipeline.report.faults import FaultCost
from pipeline.report.features import QualityReport, Speculation, TokensCost
from pipeline.report.record.data_warnings import DataWarning
from pipeline.report.record.json_record import SCHEMA_VERSION, JsonRecord
from pipeline.report.record.row_stats import Computed, ErrorExample, Histogram, LengthBucket
from pipeline.report.record.run_record import RunRecord, per_second
from pipeline.report.savings import Saving

PERCENTS = (50, 95, 99)


@dataclass(frozen=True)
class Rows:
    """Rows of the input, and those of them in the output so far (completed + errors), with `extra_samples` where
    samples are rows of their own."""

    input: int
    written: int
    errors: int
    errors_by_code: dict[str, int]
    extra_samples: int = 0

    @property
    def completed(self) -> int:
        return self.written - self.errors

    @property
    def output(self) -> int:
        """Rows as a reader of the output counts them."""
        return self.written + self.extra_samples


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the engines did over all runs, lost work included.

    `wasted_*_tokens` is what engines computed and the output does not hold, summed over the runs (`faults.py`);
    prompt tokens without those from cache. A run that was killed has not recorded its last second or two, so it is a
    lower bound when `wasted_is_lower_bound`. `wasted_us` is the engines' time for it, on average a token.
    `unrecorded_tokens` are generated ones of the output that are in no run's record, for the same reason.
    """

    computed_generated_tokens: int
    wasted_generated_tokens: int
    wasted_prompt_tokens: int
    wasted_is_lower_bound: bool
    wasted_us: int
    wasted_usd: float | None
    unrecorded_tokens: int
    recomputed_tokens: int  # after preemptions
    rejected_draft_tokens: int
    preemptions: int
    duplicate_units: int
    units_already_written: int  # handed out, but their part existed before any work: no work was done twice
    units_restarted: int  # in progress at the last report of a run or an actor that is gone
    resumed_rows: int  # finished by a run that was stopped, delivered by a later one
    poison_rows: int  # that ended the engine's process and became error rows
    engine_restarts: int
    restart_reasons: Mapping[str, int]  # how engine processes ended, the commonest
    actors_replaced: int
    nodes_lost: int  # that left the cluster while the job ran on them
    storage_retries: Mapping[str, int]
    telemetry_failures: int  # writes of status, record and report that failed
    steps: int
    out_of_memory_steps: int  # undone, and tried again with fewer tokens
    mean_batch_size: float
    mean_kv_cache_usage: float
    grammar_tokens: int  # that a grammar had to allow, those after drafts too
    grammar_masks: int  # of these, the ones whose mask was filled; else the likeliest token was allowed
    grammar_mask_us: int  # in which engines filled these masks
    grammar_forced_tokens: int  # generated ones that a grammar left no choice of, which took no step


@dataclass(frozen=True)
class Percentiles:
    """Microseconds, of `rows` rows; None without rows."""

    rows: int
    p50: int | None
    p95: int | None
    p99: int | None

    @classmethod
    def of(cls, histogram: Histogram) -> "Percentiles":
        return cls(histogram.count, *(histogram.percentile(percent) for percent in PERCENTS))


@dataclass(frozen=True)
class LengthCost:
    """Completed rows whose prompts have at most `max_prompt_tokens` (and more than the bucket before), and their share
    of the machine time and of its price."""

    max_prompt_tokens: int
    completed: LengthBucket
    machine_us: int
    usd: float | None = None


@dataclass(frozen=True)
class ErrorCost:
    """Error rows of one code: what engines computed for them, the time of that on average, and its price. For rows that
    ended the engine's process: what it took to find them."""

    rows: int
    computed_tokens: Computed
    machine_us: int
    usd: float | None


@dataclass(frozen=True)
class Target:
    """A limit of the job file's section `targets`. actual: None where it is not known, which is a miss too."""

    key: str
    limit: float
    actual: float | None

    @property
    def is_missed(self) -> bool:
        if self.actual is None:
            return True
        return self.actual < self.limit if self.key.startswith("min_") else self.actual > self.limit


@dataclass(frozen=True, kw_only=True)
class RunReport(JsonRecord):
    """The job so far. Times are whole microseconds; `phases_us` sums to `machine_us` exactly.

    `latency`, `lengths` and `examples` are of the rows in the runs' records: all but those that a killed run wrote
    after its last record. energy_uj: of all engines since each was loaded, None where no machine measures it.
    """

    job: str
    fingerprint: str
    outcome: str
    rows: Rows
    tokens: Tokens
    work: Work
    cost: Cost
    machine_us: int
    wall_us: int
    write_us: int
    phases_us: dict[str, int]
    driver_us: dict[str, int]
    runs: tuple[RunRecord, ...]
    latency: Mapping[str, Percentiles] = field(default_factory=dict)
    lengths: tuple[LengthCost, ...] = ()
    examples: Mapping[str, tuple[ErrorExample, ...]] = field(default_factory=dict)
    faults: list[FaultCost] = field(default_factory=list)
    speculation: Speculation | None = None
    estimate: EstimateAndActual | None = None
    targets: tuple[Target, ...] = ()
    error_costs: Mapping[str, ErrorCost] = field(default_factory=dict)
    savings: tuple[Saving, ...] = ()
    energy_uj: int | None = None
    loops: TokensCost | None = None
    reasoning: TokensCost | None = None
    quality: QualityReport | None = None
    warnings: tuple[DataWarning, ...] = ()  # oddities of the data
    schema_version: int = SCHEMA_VERSION

    @property
    def input_tokens_per_s(self) -> float:
        """Delivered prompt tokens that were computed, per second of machine time, everything included."""
        return per_second(self.tokens.computed, self.machine_us)

    @property
    def generated_tokens_per_s(self) -> float:
        """Delivered generated tokens per second of machine time, everything included."""
        return per_second(self.tokens.generated, self.machine_us)

    @property
    def rows_per_s(self) -> float:
        """Completed rows per second of machine time, everything included."""
        return per_second(self.rows.completed, self.machine_us)

    @property
    def has_generated(self) -> bool:
        """False for a job whose task generates no tokens."""
        return self.tokens.generated > 0 or not self.rows.completed

    @property
    def batch_efficiency(self) -> float:
        """The share of the machine time in which engines computed delivered tokens."""
        return (self.phases_us["prefill"] + self.phases_us["decode"]) / self.machine_us if self.machine_us else 0.0

    @property
    def joules_per_generated_token(self) -> float | None:
        """Joules for a delivered token, everything included; None where the energy is not known."""
        known = self.energy_uj is not None and self.tokens.generated
        return self.energy_uj / 1e6 / self.tokens.generated if known else None  # pyright: ignore[reportOptionalOperand]

    @property
    def missed(self) -> tuple[Target, ...]:
        """The targets that a finished job missed."""
        return tuple(t for t in self.targets if t.is_missed) if self.outcome == "finished" else ()

    def to_json(self) -> dict[str, Any]:
        raw = super().to_json()
        raw["targets"] = [{**asdict(target), "is_missed": target.is_missed} for target in self.targets]
        raw["rows"] |= {"completed": self.rows.completed, "output": self.rows.output}
        raw["tokens"]["computed"] = self.tokens.computed
        raw["input_tokens_per_s"] = self.input_tokens_per_s
        raw["generated_tokens_per_s"] = self.generated_tokens_per_s
        raw["rows_per_s"] = self.rows_per_s
        raw["batch_efficiency"] = self.batch_efficiency
        raw["joules_per_generated_token"] = self.joules_per_generated_token
        raw["runs"] = [run.to_json() | {"machine_us": run.machine_us} for run in self.runs]
        if self.estimate is not None:
            raw["estimate"]["ratio"] = self.estimate.ratio
        return raw
