"""One run of a job: resume -> compute -> count -> publish -> report. This file defines the order in which state
changes.

plan (nothing written) -> claim the output -> one listing -> the remaining units, through the dataflow (`driver.py`)
  -> count -> _SUCCESS -> record, report and status become "finished" (`reporter`)
"""

import contextlib
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import pyarrow as pa

from pipeline.config import JobConfig
from pipeline.config.identity import free_of
from pipeline.data.output.inventory import output_problem
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import SUCCESS, DoneUnits, PartName, PartStore
from pipeline.errors import (
    ConfigError,
    EnvironmentFailed,
    FingerprintError,
    Interrupted,
    PipelineError,
    TooManyRowErrors,
)
from pipeline.job.actor.backends import backend_of
from pipeline.job.actor.partial import remove_all
from pipeline.job.actor.resolved_numerics import RESOLVED
from pipeline.job.actor.row_function import RowFn, RowFunction
from pipeline.job.actor.rows_again import Kind, RowsAgain
from pipeline.job.actor.work_spec import Backend
from pipeline.job.dataflow.spec import WindowTask
from pipeline.job.output.success import check_none_appended, count_rows, read_success, write_empty_part, write_success
from pipeline.job.planning.actor_specs import flow_spec, provenance, resolve_device
from pipeline.job.planning.fingerprint import claim, file_digests, record_numerics
from pipeline.job.planning.plan import JobPlan, make_plan, remaining_windows
from pipeline.job.planning.redo import begin, check_same, finish, unfinished, with_rows_again
from pipeline.job.running.driver import Driver
from pipeline.job.running.limits import RunLimits
from pipeline.job.running.reporter import RunReporter, Show, close_telemetry, harmless
from pipeline.job.running.sample import forget_samples_of_another_job, sample_tasks
from pipeline.job.running.totals import OutputTotals
from pipeline.job.telemetry.logs import LogOptions
from pipeline.job.telemetry.run_log import (
    RunLog,
    load_estimate,
    load_runs,
    make_report,
    put_status,
    totals_so_far,
    versions,
)
from pipeline.job.telemetry.status import Status
from pipeline.job.telemetry.writer import Telemetry
from pipeline.machine.host import wall_time
from pipeline.machine.signals import Stopped, StopSignals
from pipeline.report.record.data_warnings import input_warnings
from pipeline.report.record.run_record import Outcome, RunRecord, SkippedInput
from pipeline.report.run_report import RunReport
from pipeline.stores.filesystem import storage_for
from pipeline.stores.read_ahead import read_ahead
from pipeline.stores.retries import RetryCounts


def run_job(
    config: JobConfig,
    *,
    row_fn: RowFn | None = None,
    version: str | None = None,
    columns: Mapping[str, pa.DataType | str] | None = None,
    accept_numerics: bool = False,
    retry_failed: bool = False,
    redo: Sequence[Kind] = (),
    append: bool = False,
    sample: int | None = None,
    progress: Show | None = None,
    backend: Backend | None = None,
    logs: LogOptions | None = None,
    metrics: str | None = None,
) -> RunReport:
    """Run or resume a job until its output is complete. For a finished job only the report is rebuilt.

    `row_fn(row, generate)`, an async function, makes the requests of each row, by awaiting `generate(prompt, ...)`, and
    returns the values of `columns`, or None. `version` identifies its code.

    `retry_failed` recomputes the error rows of the output, `redo` its rows of these kinds under other limits. `append`
    accepts input files that are new since the first run. With `sample`, only that many rows are computed and saved for
    the run that does the rest; `sample.read_sample` reads them. `progress` is called about once a second. At `metrics`,
    HOST:PORT, the run serves /metrics for Prometheus.

    Raises the exceptions of `pipeline.errors`. Whenever one is raised, written output is consistent and the same call
    resumes the job. In the main thread SIGINT, SIGTERM and SIGHUP end the run with Interrupted: while rows are
    computed, after at most `run.drain_timeout` or at a second signal; at any other time at once
    (`machine/signals.py`).
    """
    if not isinstance(config, JobConfig):
        raise ConfigError(f"run_job({config!r:.80}): expected a job, as in run_job(load_job('my.yaml'))")
    function = RowFunction.from_arguments(row_fn, version, columns)
    if sample is not None and (retry_failed or redo):
        other = "--retry-failed" if retry_failed else "--redo"
        raise ConfigError(f"--sample and {other}: expected only one of them, since a sample writes no parts")
    if redo and (retry_failed or append):
        raise ConfigError("--redo: expected without --retry-failed and --append, each in a run of its own")
    show = harmless(progress or (lambda status: None))
    with StopSignals() as stop:
        phase = "planning"
        try:
            started_ns, retries, logs = time.monotonic_ns(), RetryCounts(), logs or LogOptions()
            plan, store = _plan(config, function, accept_numerics, retry_failed, redo, append, show, retries)
            left = _Left.from_plan(plan, store)
            begun = unfinished(store) if left.has_missing else check_same(store, plan.again)
            if sample is not None and left.tasks:
                left = replace(left, tasks=sample_tasks(left.tasks, sample))
            earlier = load_runs(store)
            if not left.tasks and begun is None and SUCCESS in store.folder.names(""):
                wrong = output_problem(store)
                if wrong is None:
                    return _already_complete(plan, store, left.existing, earlier, show)
                show(Status(phase=f"planning: counting all parts again: {wrong}"))
            limits = RunLimits(config.cost, config.run, earlier if left.tasks else ())
            if accept_numerics:
                record_numerics(store, plan.fingerprint)
                store.folder.remove(RESOLVED)  # the first engine of this run records its own
            if redo and left.tasks and begun is None:
                begin(store, plan.again, versions(), wall_time())
            # _SUCCESS describes the old parts: some will be written or replaced, or are damaged
            store.folder.remove(SUCCESS)
            phase = "recording the end of the run"
            telemetry = Telemetry(store.folder)
            of_sample = sample or 0
            log = RunLog(
                store,
                settings=free_of(config),
                cost=config.cost,
                resolved={"device": plan.device},
                telemetry=telemetry,
                retries=retries,
                sample_rows=of_sample,
                retried_limits=plan.again.limits,
                redo=redo,
            )
            log.skipped_files = [SkippedInput(f.relative, f.size, f.reason) for f in plan.source.skipped]
            source = plan.source
            log.warnings = input_warnings(
                source.passed_over, source.unified_texts, source.large_compressed, source.empty
            )
            totals = left.totals(store, log, earlier, plan)
            log.driver_us["planning"] = (time.monotonic_ns() - started_ns) // 1000
            reporter = RunReporter(
                plan,
                store,
                log,
                totals=totals,
                earlier=earlier,
                telemetry=telemetry,
                show=show,
                logs=logs,
                sample=sample,
                metrics=metrics,
            )
            if plan.batches.new is not None:
                reporter.note(f"appended: {len(plan.batches.new)} new files of the input")
            with _recorded(log, reporter, stop, "finished" if sample is None else "sampled"):
                store.folder.clean_tmp()
                if not plan.windows or plan.windows[0].index > 0:
                    write_empty_part(plan, store, provenance(plan))
                totals.check_error_rate()
                if left.tasks:
                    found = backend or backend_of(plan.job.work_config())
                    # A run that was refused or ended early has no model.
                    named = [run.resolved for run in earlier if "model" in run.resolved]
                    found = found.resuming(named[-1] if named else {})
                    spec = flow_spec(plan, left.tasks, found, log.run_id, logs.level)
                    Driver(config.run, log, totals, reporter, stop, limits, plan.num_rows).compute(spec)
                if sample is None:
                    _publish(plan, store, log, totals, reporter)
            return reporter.report
        except Stopped:
            raise _interrupted(stop, phase) from None


def _plan(
    config: JobConfig,
    row_fn: RowFunction | None,
    accept_numerics: bool,
    retry_failed: bool,
    redo: Sequence[Kind],
    append: bool,
    show: Show,
    retries: RetryCounts,
) -> tuple[JobPlan, PartStore]:
    """Plan the job and claim its output."""
    show(Status(phase="planning"))

    def log(activity: str) -> None:
        show(Status(phase=f"planning: {activity}"))

    plan = make_plan(config, resolve_device(config), log=log, retries=retries, append=append, row_fn=row_fn)
    store = PartStore(config.output.path, storage_for(config.output.path, config.storage_options), retries)
    forget_samples_of_another_job(store, plan.fingerprint)
    if retry_failed or redo:
        plan = with_rows_again(plan, store, retry_failed, redo)
    files = file_digests(plan.source)
    claimed = claim(store, config.name, plan.fingerprint, accept_numerics, versions(), wall_time(), files)
    store.name_data_files()
    if plan.batches.new is not None:
        rows = plan.batches.num_rows(plan.source)
        log(f"{len(plan.batches.new):,} new files with {rows:,} rows appended")
        plan.batches.record(store, rows, versions(), wall_time())
    return replace(plan, fingerprint=claimed), store


@dataclass(frozen=True)
class _Left:
    """Remaining work of a run. `existing`: the parts that exist. `has_missing`: others do not. `whole`: the totals of
    the parts without rows that are computed again; None if the run computes none again."""

    tasks: tuple[WindowTask, ...]
    existing: DoneUnits
    has_missing: bool
    whole: PartTotals | None = None

    @classmethod
    def from_plan(cls, plan: JobPlan, store: PartStore) -> "_Left":
        existing, again = store.list(plan.fingerprint.short), plan.again
        missing = tuple(remaining_windows(plan, existing))
        if not again.kinds:
            return cls(missing, existing, bool(missing))
        if again.limits and missing:
            option = "--retry-failed to compute the error rows" if again.has_failed else "--redo to compute these rows"
            raise FingerprintError(
                f"output.path {store.path}: not all rows are computed yet, and the rest must use the limits of the "
                f"first run. Finish the job without the change of {', '.join(again.limits)}; then use {option} under "
                "the new limits."
            )
        store.folder.probe_swap()
        parts, whole = _parts_again(store, existing, again), PartTotals()
        for name, totals in store.parts(existing):
            if name not in parts:
                whole += totals
        return cls(tuple(remaining_windows(plan, existing, parts)), existing, bool(missing), whole)

    def totals(self, store: PartStore, log: RunLog, earlier: list[RunRecord], plan: JobPlan) -> OutputTotals:
        if self.whole is not None:
            before, existing = self.whole, None
        else:
            before, existing = totals_so_far(store, earlier, self.existing), self.existing
        return OutputTotals(store, log, before, existing, plan.num_rows, plan.job.config.run.max_error_rate)


def _parts_again(store: PartStore, existing: DoneUnits, again: RowsAgain) -> set[PartName]:
    """Return the parts with rows to compute again: by the footers if they are error rows, else by the rows."""
    if again.has_failed:
        return {name for name, totals in store.parts(existing) if totals.num_error_rows}
    read = read_ahead(lambda name: store.read_part(name, again.columns), existing.parts(), store.folder.reads_at_once)
    with closing(read):
        return {name for name, part in read if again.row_ids(part)}


def _already_complete(plan: JobPlan, store: PartStore, done: DoneUnits, runs: list[RunRecord], show: Show) -> RunReport:
    """Report a job without remaining work. Its report and status are written again, since a run may have ended between
    `_SUCCESS` and these."""
    rows, run_id = plan.num_rows, runs[-1].run_id if runs else ""
    status = Status(run_id, "already complete", "finished", rows, rows, rows)
    show(status)
    totals = read_success(store) or store.totals(done)
    telemetry = Telemetry(store.folder)
    report = make_report(
        telemetry,
        plan.job.config.name,
        plan.fingerprint.digest,
        runs,
        totals,
        rows,
        finished=True,
        estimate=load_estimate(store, plan.fingerprint.undated),
    )
    put_status(telemetry, replace(status, phase="finished", units=totals.units, error_rows=totals.num_error_rows))
    remove_all(store)
    close_telemetry(telemetry, show, status)
    return replace(report, was_complete=True)


@contextlib.contextmanager
def _recorded(log: RunLog, reporter: RunReporter, stop: StopSignals, outcome: Outcome) -> Iterator[None]:
    """Record how the block ends, in record, report and status. They show `outcome` only if the block completes."""
    try:
        log.save()
        reporter.begin_phase("starting")
        yield
        log.outcome = outcome
    except TooManyRowErrors:
        log.outcome = "stopped"
        raise
    except Interrupted:
        log.outcome = "interrupted"
        raise
    except Stopped:
        log.outcome = "interrupted"
        raise _interrupted(stop, reporter.phase) from None
    except EnvironmentFailed as error:
        log.outcome = "failed"
        reporter.note(str(error), "warning")
        raise EnvironmentFailed(f"{error}\nThe logs of this run: {reporter.logs.shown()}") from error
    except BaseException as error:
        log.outcome = "failed"
        reporter.note("".join(traceback.format_exception(error)), "warning")
        raise
    finally:
        reporter.end()


def _publish(plan: JobPlan, store: PartStore, log: RunLog, totals: OutputTotals, reporter: RunReporter) -> None:
    """Count every row of the output, and publish it as complete: `_SUCCESS` first, then everything else."""
    reporter.begin_phase("verifying")
    check_none_appended(plan, store)
    started = time.monotonic_ns()
    counted = count_rows(plan, store, reporter.counted)
    totals.check_error_rate(counted)
    if check_same(store, plan.again) is not None:
        finish(store, log.run_id)
    log.driver_us["verify"] = (time.monotonic_ns() - started) // 1000
    reporter.begin_phase("publishing")
    try:
        write_success(plan, store, counted)
    except Interrupted:
        raise
    except PipelineError as error:
        raise type(error)(f"All {counted.rows} rows are written, but writing _SUCCESS failed: {error}") from error
    totals.set_counted(counted)
    with contextlib.suppress(PipelineError):  # saved rows are no longer needed
        remove_all(store)


def _interrupted(stop: StopSignals, phase: str) -> Interrupted:
    return Interrupted(f"Stopped by {stop.reason} while {phase}.")
