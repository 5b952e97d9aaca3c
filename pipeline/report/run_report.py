"""A job's report over all its runs: rows, tokens, work, time, money, and what the plan had expected.

Owns the report's numbers and their names in JSON. `build.py` makes it, `render.py` writes it out for people.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.report.account import Cost, Tokens
from pipeline.report.estimate import EstimateAndActual
from pipeline.report.record.computed import Computed
from pipeline.report.record.data_warnings import DataWarning
from pipeline.report.record.json_record import SCHEMA_VERSION, JsonRecord
from pipeline.report.record.row_stats import ErrorExample, Histogram, LengthBucket
from pipeline.report.record.run_record import RunRecord, per_second
from pipeline.report.sections.drafts import Speculated
from pipeline.report.sections.faults import FaultCost
from pipeline.report.sections.loops import LoopCost
from pipeline.report.sections.quality import QualityReport
from pipeline.report.sections.reasoning import ReasoningCost
from pipeline.report.sections.savings import Saving
from pipeline.report.targets import Target

PERCENTS = (50, 95, 99)


@dataclass(frozen=True)
class Rows:
    """Of the whole job: rows of the input, and those of them in the output so far (completed + errors), with
    `further_samples` where samples stand as rows."""

    input: int
    written: int
    errors: int
    errors_by_code: dict[str, int]
    further_samples: int = 0

    @property
    def completed(self) -> int:
        return self.written - self.errors

    @property
    def output(self) -> int:
        """As whoever reads the output counts them."""
        return self.written + self.further_samples


@dataclass(frozen=True)
class Work:
    """What the engines did over all runs, lost work included.

    `wasted_*_tokens` is what engines computed and the output does not hold, summed over the runs (`faults.py`);
    prompt tokens without those from cache. A run that was killed has not recorded its last second or two, so it is a
    lower bound when `wasted_is_lower_bound`. `wasted_us` is the engines' time for it, on average a token.
    `unseen_generated_tokens` is in the output, but in no run's record, for the same reason.
    """

    generated_tokens: int
    wasted_generated_tokens: int
    wasted_is_lower_bound: bool
    recomputed_tokens: int
    preemptions: int
    units_lost: int
    restarts: int
    steps: int
    mean_batch: float
    mean_kv_used: float
    wasted_prompt_tokens: int = 0
    wasted_us: int = 0
    wasted_usd: float | None = None
    unseen_generated_tokens: int = 0
    units_begun_again: int = 0  # open at the last that was heard of a run or an actor that is gone
    units_found: int = 0  # handed out, but their part was there before any work: no work was done twice
    taken_rows: int = 0  # finished by a run that was stopped, delivered by a later one
    convicted_rows: int = 0  # that ended the engine's process and became error rows
    actors_replaced: int = 0
    machines_lost: int = 0  # that left the cluster while the job ran on them
    storage_retries: Mapping[str, int] = field(default_factory=dict)
    restart_reasons: Mapping[str, int] = field(default_factory=dict)  # how engine processes ended, the commonest
    steps_out_of_memory: int = 0  # undone, and tried again with fewer tokens
    masked_tokens: int = 0  # that a grammar had to allow, those after drafts too
    filled_masks: int = 0  # of these, the ones whose mask was filled; else the likeliest token was allowed
    mask_us: int = 0  # in which engines filled these masks
    forced_tokens: int = 0  # generated ones that a grammar left no choice of, which took no step
    telemetry_failures: int = 0  # writes of status, record and report that failed


@dataclass(frozen=True)
class Percentiles:
    """Microseconds, of `rows` rows; None of none."""

    rows: int
    p50: int | None
    p95: int | None
    p99: int | None

    @classmethod
    def of(cls, histogram: Histogram) -> "Percentiles":
        return cls(histogram.count, *(histogram.percentile(percent) for percent in PERCENTS))


@dataclass(frozen=True)
class LengthCost:
    """Completed rows whose prompts have at most `longest` tokens (and more than the bucket before), and their share
    of the machine time and of its price."""

    longest: int
    rows: LengthBucket
    machine_us: int
    usd: float | None = None


@dataclass(frozen=True)
class ErrorCost:
    """Error rows of one code: what engines computed for them, the time of that on average, and its price. Of rows that
    ended the engine's process: what it took to find them."""

    rows: int
    lost: Computed
    machine_us: int
    usd: float | None


@dataclass(frozen=True)
class RunReport(JsonRecord):
    """The job so far. Times are whole microseconds; `phases_us` sums to `machine_us` exactly.

    `latency`, `lengths` and `examples` are of the rows that the runs' records know: all but those that a killed
    run wrote after its last record.
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
    faults: tuple[FaultCost, ...] = ()
    speculated: Speculated | None = None
    estimate: EstimateAndActual | None = None
    targets: tuple[Target, ...] = ()
    error_costs: Mapping[str, ErrorCost] = field(default_factory=dict)
    savings: tuple[Saving, ...] = ()
    energy_uj: int | None = None  # of all engines, from when each was loaded on; None where no machine tells it
    loops: LoopCost | None = None
    reasoning: ReasoningCost | None = None
    quality: QualityReport | None = None
    warnings: tuple[DataWarning, ...] = ()  # what was odd about the data
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
        """Whether tokens were generated; not by a job whose task asks for something else."""
        return self.tokens.generated > 0 or not self.rows.completed

    @property
    def batch_efficiency(self) -> float:
        """The share of the machine time in which engines computed what was delivered."""
        return (self.phases_us["prefill"] + self.phases_us["decode"]) / self.machine_us if self.machine_us else 0.0

    @property
    def joules_per_generated_token(self) -> float | None:
        """Of delivered tokens, everything included; None where the energy is not known."""
        known = self.energy_uj is not None and self.tokens.generated
        return self.energy_uj / 1e6 / self.tokens.generated if known else None  # pyright: ignore[reportOptionalOperand]

    @property
    def missed(self) -> tuple[Target, ...]:
        """The targets that a finished job missed."""
        return tuple(t for t in self.targets if t.is_missed) if self.outcome == "finished" else ()

    def to_json(self) -> dict[str, Any]:
        raw = super().to_json()
        raw["targets"] = [{**asdict(target), "is_missed": target.is_missed} for target in self.targets]
        raw["rows"]["completed"] = self.rows.completed
        raw["rows"]["output"] = self.rows.output
        raw["tokens"]["computed"] = self.tokens.computed
        raw["input_tokens_per_s"] = self.input_tokens_per_s
        raw["generated_tokens_per_s"] = self.generated_tokens_per_s
        raw["rows_per_s"] = self.rows_per_s
        raw["joules_per_generated_token"] = self.joules_per_generated_token
        raw["runs"] = [run.to_json() | {"machine_us": run.machine_us} for run in self.runs]
        if self.estimate is not None:
            raw["estimate"]["ratio"] = self.estimate.ratio
        raw["faults"] = [fault.to_json() for fault in self.faults]
        return raw
