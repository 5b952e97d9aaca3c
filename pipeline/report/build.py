"""A job's report made of what its runs left: their records, the totals of its parts, and its plan.

`account.py` divides machine time and money, `sections/faults.py` estimates what faults cost.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace

from pipeline.data.output.part_totals import PartTotals
from pipeline.errors import RowError
from pipeline.report.account import Tokens, accounted, allocate, shares_us
from pipeline.report.estimate import Estimate, compare
from pipeline.report.record.computed import Computed
from pipeline.report.record.row_stats import RowStats
from pipeline.report.record.run_record import PHASES, ActorRecord, RunRecord, summed
from pipeline.report.run_report import ErrorCost, LengthCost, Percentiles, Rows, RunReport, Work
from pipeline.report.sections.drafts import Speculated
from pipeline.report.sections.faults import FaultCost, fault_costs, unseen_tokens
from pipeline.report.sections.loops import LoopCost
from pipeline.report.sections.quality import QualityReport
from pipeline.report.sections.reasoning import ReasoningCost
from pipeline.report.sections.savings import savings
from pipeline.report.targets import targets_of

MAX_REASONS = 10  # of engine restarts that are told


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
        warnings=(*(runs[-1].warnings if runs else ()), *stats.control_tokens.warnings()),
    )
    limits = runs[-1].config_free.get("targets", {}) if runs else {}
    return replace(report, targets=targets_of(_actuals(report), limits)) if limits else report


def _actuals(report: RunReport) -> dict[str, float | None]:
    """What the job file's `targets` are compared with."""
    row = report.latency.get("row_us")
    return {
        "max_usd_per_1m_generated": report.cost.per_1m_generated_usd,
        "min_generated_per_s": report.generated_tokens_per_s,
        "min_batch_efficiency": report.batch_efficiency if report.machine_us else None,
        "max_row_p95": None if row is None or row.p95 is None else row.p95 / 1e6,
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
