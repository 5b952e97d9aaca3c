"""Builds a job's report from its run records, the totals of its parts, and its estimate.

`account.py` divides machine time and cost; `faults.py` estimates the cost of faults.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

from pipeline.data.output.part_totals import PartTotals
from pipeline.errors import RowError
from pipeline.report.account import Tokens, accounted, allocate, shares_us
from pipeline.report.estimate import Estimate, compare
from pipeline.report.faults import FaultCost, LostWork, fault_costs, lost_work, unrecorded_tokens
from pipeline.report.features import QualityReport, Speculation, TokensCost
from pipeline.report.record.row_stats import Computed, RowStats
from pipeline.report.record.run_record import PHASES, RunRecord, summed
from pipeline.report.run_report import ErrorCost, LengthCost, Percentiles, Rows, RunReport, StepCost, Work

MAX_REASONS = 10  # reasons of engine restarts in the report


def build_report(
    job_name: str,
    fingerprint: str,
    runs: Sequence[RunRecord],
    totals: PartTotals,
    input_rows: int,
    estimate: Estimate | None = None,
) -> RunReport:
    """Build the report over all runs of a job, including killed ones, in order. totals: of the output."""
    machine_us = sum(run.machine_us for run in runs)
    errors = {code: count for code, count in sorted(totals.error_rows.items()) if count}
    stats = sum(
        (run.row_stats for run in reversed(runs)), RowStats()
    )  # reversed: examples of the latest run come first
    rows = Rows(
        input_rows,
        totals.rows,
        sum(errors.values()),
        errors,
        totals.further_samples,
        stats.copied.rows,
        totals.dropped_rows,
        stats.images,
    )
    tokens = Tokens(
        totals.num_input_tokens,
        totals.num_cached_tokens,
        totals.num_generated_tokens,
        totals.num_error_input_tokens,
        stats.copied.generated_tokens,
    )
    lost = lost_work(runs, tokens.generated)
    accounts = accounted(runs, [sum(of_run, LostWork()) for of_run in lost])
    phases_us = {phase: sum(account[phase] for account in accounts) for phase in PHASES}
    recorded = sum(bucket.rows for bucket in stats.lengths.values())
    images = stats.images * rows.completed / max(1, recorded)
    cost = allocate(runs, accounts, tokens, rows.written - rows.uncomputed, images)
    speculation = Speculation.from_runs(runs)
    usd_per_us = None if cost.total_usd is None else cost.total_usd / max(1, machine_us)

    def usd_of(us: int) -> float | None:
        return None if usd_per_us is None else us * usd_per_us

    faults = [replace(fault, usd=usd_of(fault.machine_us)) for fault in fault_costs(runs, lost)]
    all_lost = sum((each for of_run in lost for each in of_run), LostWork())

    def cost_of_tokens(rows: int, generated: int) -> TokensCost | None:
        return TokensCost.charge(
            rows,
            generated,
            machine_us=machine_us,
            phases_us=phases_us,
            generated_tokens=tokens.generated,
            generated_usd=cost.generated_usd,
        )

    times_us = shares_us(list(stats.lengths.values()), machine_us, phases_us)
    step_times_us = shares_us(list(stats.steps.values()), machine_us, phases_us)
    settings = runs[-1].settings if runs else {}
    return RunReport(
        job=job_name,
        fingerprint=fingerprint,
        outcome=runs[-1].outcome if runs else "running",
        rows=rows,
        tokens=tokens,
        work=_work(runs, tokens, all_lost, usd_of(all_lost.us), speculation),
        cost=cost,
        machine_us=machine_us,
        wall_us=sum(run.wall_us for run in runs),
        write_us=sum(run.write_us for run in runs),
        phases_us=phases_us,
        driver_us=summed([run.driver_us for run in runs]),
        runs=tuple(runs),
        latency={f.name: Percentiles.from_histogram(getattr(stats.latency, f.name)) for f in fields(stats.latency)},
        lengths=tuple(
            LengthCost(longest, bucket, us, usd_of(us))
            for (longest, bucket), us in zip(stats.lengths.items(), times_us, strict=True)
        ),
        steps=tuple(
            StepCost(name, step, us, usd_of(us))
            for (name, step), us in zip(stats.steps.items(), step_times_us, strict=True)
        ),
        examples={code: stats.errors[code][:count] for code, count in errors.items() if code in stats.errors},
        faults=faults,
        error_costs=_error_costs(runs, errors, stats, faults, usd_of),
        energy_uj=sum(run.stat("energy_uj") for run in runs) or None,
        speculation=speculation,
        estimate=compare(estimate, runs, accounts) if estimate is not None else None,
        loops=cost_of_tokens(stats.looped.rows, stats.looped.generated_tokens),
        reasoning=cost_of_tokens(stats.reasoned.rows, stats.reasoned.tokens),
        quality=QualityReport.from_sums(
            stats.quality, sum(run.stat("quality_us") for run in runs), settings.get("quality", {})
        ),
        warnings=(*(runs[-1].warnings if runs else ()), *stats.control_tokens.warnings()),
    )


def _error_costs(
    runs: Sequence[RunRecord],
    errors: Mapping[str, int],
    stats: RowStats,
    faults: Sequence[FaultCost],
    usd_of: Callable[[int], float | None],
) -> dict[str, ErrorCost]:
    computed = sum((run.computed for run in runs), Computed())
    prefill, decode = (sum(run.phase_us(phase) for run in runs) for phase in ("prefill", "decode"))
    restarts_us = sum(fault.machine_us for fault in faults if fault.kind == "engine_restarted")
    found = {}
    for code, count in errors.items():
        lost = stats.lost.get(code, Computed())
        us = prefill * lost.prompt // max(1, computed.prompt) + decode * lost.generated // max(1, computed.generated)
        us += restarts_us if code == RowError.ENGINE_FAILURE else 0
        found[code] = ErrorCost(count, lost, us, usd_of(us))
    return found


def _work(
    runs: Sequence[RunRecord],
    tokens: Tokens,
    lost: LostWork,
    lost_usd: float | None,
    speculation: Speculation | None,
) -> Work:
    actors = [actor for run in runs for actor in run.actors]
    unrecorded = unrecorded_tokens(runs, tokens.generated)
    reasons = Counter(reason for actor in actors for reason in actor.restart_reasons)

    def stat(name: str) -> int:
        return sum(run.stat(name) for run in runs)

    steps = stat("num_steps")
    return Work(
        computed_generated_tokens=stat("generated_tokens"),
        wasted_generated_tokens=lost.tokens.generated,
        wasted_prompt_tokens=lost.tokens.prompt,
        wasted_is_lower_bound=unrecorded > 0 or any(run.outcome in ("killed", "running") for run in runs),
        wasted_us=lost.us,
        wasted_usd=lost_usd if lost.us else None,
        unrecorded_tokens=unrecorded,
        recomputed_tokens=stat("recomputed_tokens"),
        rejected_draft_tokens=speculation.rejected_tokens if speculation is not None else 0,
        preemptions=stat("num_preemptions"),
        duplicate_units=sum(run.duplicate_units for run in runs),
        resumed_rows=sum(actor.resumed_rows for actor in actors),
        engine_restarts=sum(actor.restarts for actor in actors),
        restart_reasons=dict(reasons.most_common(MAX_REASONS)),
        nodes_lost=sum(len({a.node_id for a in run.actors if a.node_lost}) for run in runs),
        storage_retries=summed([run.storage_retries for run in runs] + [a.storage_retries for a in actors]),
        telemetry_failures=sum(run.telemetry_failures for run in runs),
        steps=steps,
        out_of_memory_steps=stat("num_out_of_memory"),
        mean_batch_size=stat("batch_sum") / steps if steps else 0.0,
        mean_kv_cache_usage=stat("kv_used_ppm_sum") / steps / 1e6 if steps else 0.0,
        grammar_tokens=stat("masked_tokens"),
        grammar_masks=stat("filled_masks"),
        grammar_mask_us=stat("mask_us"),
        grammar_forced_tokens=stat("forced_tokens"),
    )
