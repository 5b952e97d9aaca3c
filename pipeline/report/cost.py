"""A job's report over all its runs: rows, tokens, work, time, money, and what the plan had expected.

Owns the report's numbers; `account.py` divides machine time and money, `faults.py` estimates what faults cost,
`render.py` writes it all out for people.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pipeline.data.output.part_totals import PartTotals
from pipeline.errors import RowError
from pipeline.report.account import Cost, Tokens, accounted, allocate, shares_us
from pipeline.report.estimate import Estimate, EstimateAndActual, compare
from pipeline.report.record.computed import Computed
from pipeline.report.record.json_record import SCHEMA_VERSION, JsonRecord
from pipeline.report.record.row_stats import ErrorExample, Histogram, LengthBucket, RowStats
from pipeline.report.record.run_record import PHASES, ActorRecord, RunRecord, per_second, summed
from pipeline.report.sections.drafts import Speculated
from pipeline.report.sections.faults import FaultCost, fault_costs, unseen_tokens
from pipeline.report.sections.loops import LoopCost
from pipeline.report.sections.quality import QualityReport
from pipeline.report.sections.reasoning import ReasoningCost
from pipeline.report.sections.savings import Saving, savings
from pipeline.report.targets import Target, targets_of

PERCENTS = (50, 95, 99)
MAX_REASONS = 10  # of engine restarts that are told


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


def build_report(
    job_name: str,
    fingerprint: str,
    runs: Sequence[RunRecord],
    totals: PartTotals,
    input_rows: int,
    estimate: Estimate | None = None,
) -> RunReport:
    """The report over all runs of a job, killed ones included, in the order they ran. `totals`: of the output."""
    machine_us = sum(run.machine_us for run in runs)
    errors = {code: count for code, count in sorted(totals.error_rows.items()) if count}
    rows = Rows(input_rows, totals.rows, sum(errors.values()), errors, totals.further_samples)
    tokens = Tokens(
        totals.num_input_tokens, totals.num_cached_tokens, totals.num_generated_tokens, totals.num_error_input_tokens
    )
    faults, lost = fault_costs(runs, tokens.generated)
    accounts = accounted(runs, lost)
    phases_us = {phase: sum(account[phase] for account in accounts) for phase in PHASES}
    cost = allocate(runs, accounts, tokens, rows.written)
    if cost.total_usd is None:
        faults = tuple(fault.unpriced() for fault in faults)
    speculated = Speculated.of(runs)
    usd_per_us = None if cost.total_usd is None else cost.total_usd / max(1, machine_us)

    def priced(us: int) -> float | None:
        return None if usd_per_us is None else us * usd_per_us

    stats = sum((run.row_stats for run in reversed(runs)), RowStats())  # rows that were tried again: the last result
    report = RunReport(
        job=job_name,
        fingerprint=fingerprint,
        outcome=runs[-1].outcome if runs else "running",
        rows=rows,
        tokens=tokens,
        work=_work(runs, tokens, faults),
        cost=cost,
        machine_us=machine_us,
        wall_us=sum(run.wall_us for run in runs),
        write_us=sum(run.write_us for run in runs),
        phases_us=phases_us,
        driver_us=summed([run.driver_us for run in runs]),
        runs=tuple(runs),
        latency={f.name: Percentiles.of(getattr(stats.latency, f.name)) for f in fields(stats.latency)},
        lengths=tuple(
            LengthCost(longest, bucket, us, priced(us))
            for (longest, bucket), us in zip(
                stats.lengths.items(), shares_us(list(stats.lengths.values()), machine_us, phases_us), strict=True
            )
        ),
        examples={code: stats.errors[code][:count] for code, count in errors.items() if code in stats.errors},
        faults=faults,
        error_costs=_error_costs(runs, errors, stats, faults, priced),
        energy_uj=sum(run.stat("energy_uj") for run in runs) or None,
        savings=savings(
            sum(run.stat("cached_tokens") for run in runs),
            sum(run.computed.prompt for run in runs),
            stats.outputs,
            int(runs[-1].resolved.get("max_num_seqs", 0)) if runs else 0,
            phases_us,
            speculated,
            usd_per_us,
        ),
        speculated=speculated,
        estimate=compare(estimate, runs, accounts) if estimate is not None else None,
        loops=LoopCost.of(stats.looped, machine_us, phases_us, tokens.generated, cost.generated_usd),
        reasoning=ReasoningCost.of(stats.reasoned, machine_us, phases_us, tokens.generated, cost.generated_usd),
        quality=QualityReport.of(
            stats.quality,
            sum(run.stat("quality_us") for run in runs),
            runs[-1].config_free.get("quality", {}) if runs else {},
        ),
    )
    limits = runs[-1].config_free.get("targets", {}) if runs else {}
    return replace(report, targets=targets_of(_actuals(report), limits)) if limits else report


def _actuals(report: RunReport) -> dict[str, float | None]:
    """What the job file's `targets` are compared with."""
    row, first = report.latency.get("row_us"), report.latency.get("first_token_us")

    def seconds(us: int | None) -> float | None:
        return None if us is None else us / 1e6

    return {
        "max_usd_per_1m_prompt": report.cost.per_1m_prompt_usd,
        "max_usd_per_1m_generated": report.cost.per_1m_generated_usd,
        "min_generated_per_s": report.generated_tokens_per_s,
        "min_batch_efficiency": report.batch_efficiency if report.machine_us else None,
        "min_kv_used": report.work.mean_kv_used,
        "max_error_rate": report.rows.errors / report.rows.written if report.rows.written else None,
        "max_row_p50_s": row and seconds(row.p50),
        "max_row_p95_s": row and seconds(row.p95),
        "max_row_p99_s": row and seconds(row.p99),
        "max_first_token_p95_s": first and seconds(first.p95),
    }


def _error_costs(
    runs: Sequence[RunRecord],
    errors: Mapping[str, int],
    stats: RowStats,
    faults: Sequence[FaultCost],
    priced: Callable[[int], float | None],
) -> dict[str, ErrorCost]:
    computed = sum((run.computed for run in runs), Computed())
    prefill, decode = (sum(run.phase_us(phase) for run in runs) for phase in ("prefill", "decode"))
    restarts_us = sum(fault.machine_us for fault in faults if fault.kind == "engine_restarted")
    found = {}
    for code, count in errors.items():
        lost = stats.lost.get(code, Computed())
        us = prefill * lost.prompt // max(1, computed.prompt) + decode * lost.generated // max(1, computed.generated)
        us += restarts_us if code == RowError.ENGINE_FAILURE else 0
        found[code] = ErrorCost(count, lost, us, priced(us))
    return found


def _work(runs: Sequence[RunRecord], tokens: Tokens, faults: Sequence[FaultCost]) -> Work:
    actors = [actor for run in runs for actor in run.actors]
    steps = sum(run.stat("num_steps") for run in runs)
    unseen = unseen_tokens(runs, tokens.generated)
    lost = [fault for fault in faults if fault.kind != "preempted"]
    reasons = Counter(reason for actor in actors for reason in actor.restart_reasons)
    return Work(
        generated_tokens=sum(run.stat("generated_tokens") for run in runs),
        wasted_generated_tokens=sum(fault.tokens.generated for fault in lost),
        wasted_is_lower_bound=unseen > 0 or any(run.outcome in ("killed", "running") for run in runs),
        recomputed_tokens=sum(run.stat("recomputed_tokens") for run in runs),
        preemptions=sum(run.stat("num_preemptions") for run in runs),
        units_lost=sum(run.units_lost for run in runs),
        restarts=sum(actor.restarts for actor in actors),
        steps=steps,
        mean_batch=sum(run.stat("batch_sum") for run in runs) / steps if steps else 0.0,
        mean_kv_used=sum(run.stat("kv_used_ppm_sum") for run in runs) / steps / 1e6 if steps else 0.0,
        wasted_prompt_tokens=sum(fault.tokens.prompt for fault in lost),
        wasted_us=sum(fault.work_us for fault in lost),
        wasted_usd=_total(fault.work_usd for fault in lost),
        unseen_generated_tokens=unseen,
        units_begun_again=sum(actor.open_units for run in runs for actor in run.actors if _is_gone(run, actor, runs)),
        units_found=sum(run.units_found for run in runs),
        taken_rows=sum(actor.taken_rows for actor in actors),
        convicted_rows=sum(actor.convicted_rows for actor in actors),
        actors_replaced=sum(actor.replaces is not None for actor in actors),
        machines_lost=sum(len({a.node_id for a in run.actors if a.node_lost}) for run in runs),
        storage_retries=summed([run.storage_retries for run in runs] + [a.storage_retries for a in actors]),
        restart_reasons=dict(reasons.most_common(MAX_REASONS)),
        steps_out_of_memory=sum(run.stat("num_out_of_memory") for run in runs),
        masked_tokens=sum(run.stat("masked_tokens") for run in runs),
        filled_masks=sum(run.stat("filled_masks") for run in runs),
        mask_us=sum(run.stat("mask_us") for run in runs),
        forced_tokens=sum(run.stat("forced_tokens") for run in runs),
        telemetry_failures=sum(run.telemetry_failures for run in runs),
    )


def _is_gone(run: RunRecord, actor: ActorRecord, runs: Sequence[RunRecord]) -> bool:
    """Whether nothing more will come of the actor."""
    replaced = {a.replaces for a in run.actors}
    return run is not runs[-1] or run.outcome != "running" or actor.node_lost or actor.actor in replaced


def _total(usd: Iterable[float | None]) -> float | None:
    """Of prices that are all known or all unknown; None also of none."""
    known = [u for u in usd if u is not None]
    return sum(known) if known else None
