"""Figures of a job's report over all its runs, and their names in JSON: rows, tokens, work, time, cost, estimate.

`build.py` computes them, `sections.py` arranges them for display.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.output.result_columns import ACCEPT, WHEN
from pipeline.report.account import Cost, Tokens
from pipeline.report.estimate import EstimateAndActual
from pipeline.report.faults import FaultCost
from pipeline.report.features import QualityReport, Speculation, TokensCost
from pipeline.report.record.data_warnings import DataWarning
from pipeline.report.record.json_record import SCHEMA_VERSION, JsonRecord
from pipeline.report.record.row_stats import Computed, ErrorExample, Histogram, LengthBucket, StepStats
from pipeline.report.record.run_record import RunRecord, per_second

PERCENTS = (50, 95, 99)


@dataclass(frozen=True)
class Rows:
    """Counts of input rows: all, and those written so far (completed + errors + uncomputed). extra_samples: additional
    output rows if samples are rows. copied: completed rows whose results were copied from equal rows. dropped: output
    rows by value of dropped_by. images: of recorded completed rows; a page is one."""

    input: int
    written: int
    errors: int
    errors_by_code: dict[str, int]
    extra_samples: int = 0
    copied: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    images: int = 0

    @property
    def completed(self) -> int:
        return self.written - self.errors - self.uncomputed

    @property
    def uncomputed(self) -> int:
        """Rows that do not meet `input.when`."""
        return self.dropped.get(WHEN, 0)

    @property
    def rejected(self) -> int:
        """Completed output rows that do not meet `output.accept`."""
        return self.dropped.get(ACCEPT, 0)

    @property
    def output(self) -> int:
        """Number of rows in the output."""
        return self.written + self.extra_samples


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of the engines over all runs, including lost work.

    `wasted_*_tokens` were computed but are missing in the output, summed over runs (`faults.py`), without cached prompt
    tokens. A killed run has not recorded its last seconds; `wasted_is_lower_bound` is then true. `wasted_us` is their
    time, by the engines' average time per token. `unrecorded_tokens` are generated tokens in the output that no record
    covers, for the same reason.
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
    resumed_rows: int  # finished by a stopped run, delivered by a later one
    engine_restarts: int
    restart_reasons: Mapping[str, int]  # most common reasons why engine processes ended
    nodes_lost: int  # left the cluster while the job ran on them
    storage_retries: Mapping[str, int]
    telemetry_failures: int  # writes of status, record and report that failed
    steps: int
    out_of_memory_steps: int  # rolled back and retried with fewer tokens
    mean_batch_size: float
    mean_kv_cache_usage: float
    grammar_tokens: int  # checked against a grammar, including those after drafts
    grammar_masks: int  # of these, tokens whose mask was filled; otherwise the most likely token was allowed
    grammar_mask_us: int  # time of filling these masks
    grammar_forced_tokens: int  # generated without a step, because the grammar allowed only one token


@dataclass(frozen=True)
class Percentiles:
    """Percentiles over `rows` rows, in microseconds; None without rows."""

    rows: int
    p50: int | None
    p95: int | None
    p99: int | None

    @classmethod
    def from_histogram(cls, histogram: Histogram) -> "Percentiles":
        return cls(histogram.count, *(histogram.percentile(percent) for percent in PERCENTS))


@dataclass(frozen=True)
class LengthCost:
    """Machine time and cost of completed rows whose prompts have at most `max_prompt_tokens`, and more than in the
    previous bucket."""

    max_prompt_tokens: int
    completed: LengthBucket
    machine_us: int
    usd: float | None = None


@dataclass(frozen=True)
class StepCost:
    """Machine time and cost of a step, or of the first prompt, whose name is empty."""

    name: str
    completed: StepStats
    machine_us: int
    usd: float | None = None


@dataclass(frozen=True)
class ErrorCost:
    """Cost of error rows of one code: the tokens computed for them, at the average time per token. For rows that
    crashed the engine process, it includes the restarts that found them."""

    rows: int
    computed_tokens: Computed
    machine_us: int
    usd: float | None


@dataclass(frozen=True, kw_only=True)
class RunReport(JsonRecord):
    """Report of a job so far. Times are in whole microseconds; `phases_us` sums to `machine_us` exactly.

    `latency`, `lengths`, `steps` and `examples` cover the recorded rows: all except those that a killed run wrote after
    its last record. energy_uj: of all engines since loading; None if no machine measures it. was_complete: the call
    that returned this report found nothing to compute.
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
    steps: tuple[StepCost, ...] = ()  # in the job's order; empty without steps
    examples: Mapping[str, tuple[ErrorExample, ...]] = field(default_factory=dict)
    faults: list[FaultCost] = field(default_factory=list)
    speculation: Speculation | None = None
    estimate: EstimateAndActual | None = None
    error_costs: Mapping[str, ErrorCost] = field(default_factory=dict)
    energy_uj: int | None = None
    loops: TokensCost | None = None
    reasoning: TokensCost | None = None
    quality: QualityReport | None = None
    warnings: tuple[DataWarning, ...] = ()  # warnings about the data
    was_complete: bool = False
    schema_version: int = SCHEMA_VERSION

    @property
    def input_tokens_per_s(self) -> float:
        """Delivered, computed prompt tokens per second of total machine time."""
        return per_second(self.tokens.computed, self.machine_us)

    @property
    def generated_tokens_per_s(self) -> float:
        """Delivered, computed generated tokens per second of total machine time."""
        return per_second(self.tokens.decoded, self.machine_us)

    @property
    def rows_per_s(self) -> float:
        """Completed rows per second of total machine time."""
        return per_second(self.rows.completed, self.machine_us)

    @property
    def has_generated(self) -> bool:
        """True if the job's task generates tokens."""
        return self.tokens.generated > 0 or not self.rows.completed

    @property
    def batch_efficiency(self) -> float:
        """Share of the machine time that was spent on delivered tokens."""
        return (self.phases_us["prefill"] + self.phases_us["decode"]) / self.machine_us if self.machine_us else 0.0

    @property
    def joules_per_generated_token(self) -> float | None:
        """Total energy per delivered, computed generated token in joules; None if unknown."""
        known = self.energy_uj is not None and self.tokens.decoded
        return self.energy_uj / 1e6 / self.tokens.decoded if known else None  # pyright: ignore[reportOptionalOperand]

    def to_json(self) -> dict[str, Any]:
        raw = super().to_json()
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
