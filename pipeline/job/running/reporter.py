"""Reports of a run, during it and at its end: status, record and report in the output, and the driver's log.

All are written asynchronously (`telemetry/writer.py`), so that a failing or hanging disk or store delays nothing.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import PartStore
from pipeline.job.planning.history import remember
from pipeline.job.planning.plan import JobPlan
from pipeline.job.running.notify import Notifier
from pipeline.job.running.totals import OutputTotals
from pipeline.job.telemetry.logs import DRIVER, Level, LogFolder, LogOptions
from pipeline.job.telemetry.pace import Pace
from pipeline.job.telemetry.progress import Progress
from pipeline.job.telemetry.run_log import PLAN, RunLog, load_estimate, make_report, put_status
from pipeline.job.telemetry.status import Status, status_line, work
from pipeline.job.telemetry.writer import Telemetry
from pipeline.report.features import drop_text
from pipeline.report.record.quality_stats import QualityStats
from pipeline.report.record.row_stats import Computed
from pipeline.report.record.run_record import RunRecord
from pipeline.report.run_report import RunReport
from pipeline.stores.filesystem import is_url
from pipeline.stores.redaction import shown_url

if TYPE_CHECKING:
    from pipeline.job.telemetry.metrics import MetricsServer

WAITING = "waiting: "  # phase in which no engine can work, with the reason
TICK_S = 1.0  # interval of progress checks
STORE_TICK_S = 10.0  # interval of records in an object store, where each write is a paid request
LOG_S = 10.0  # interval of progress lines in the driver's log
WRITING_SHARE = 0.05  # largest share of the time for writing statuses and records

Show = Callable[[Status], None]


class RunReporter:
    """Reporter of one run. Used by the driver's main thread; `note` and `warn` by any thread."""

    def __init__(
        self,
        plan: JobPlan,
        store: PartStore,
        log: RunLog,
        *,
        totals: OutputTotals,
        earlier: list[RunRecord],
        telemetry: Telemetry,
        show: Show,
        logs: LogOptions,
        sample: int | None = None,
        metrics: str | None = None,
    ) -> None:
        """`earlier`: records of the job's earlier runs. `show`: called with each status. `sample`: number of rows of a
        run with --sample. `metrics`: address of /metrics."""
        self._plan, self._log, self._totals, self._earlier = plan, log, totals, earlier
        self._telemetry, self._show = telemetry, show
        self._num_rows = plan.num_rows if sample is None else min(plan.num_rows, totals.now().rows + sample)
        self.phase = "starting"
        self.report: RunReport  # set by `end`
        self._warning = ""
        self._write_every_s = STORE_TICK_S if is_url(plan.job.config.output.path) else 0.0
        self._wrote_at = self._updated_at = 0.0
        self._pace = Pace()
        self.logs = LogFolder(store, log.run_id)
        self.logs.prune()
        self._driver_log = self.logs.log(DRIVER, logs.level)
        self._show_line, self._logged, self._logged_at = logs.show, "", 0.0
        self.note(f"run {log.run_id}: {plan.num_rows} rows, {totals.now().rows} of them already written")
        self._estimate = load_estimate(store, plan.fingerprint.undated)
        if self._estimate is None and store.folder.has(PLAN):
            self.note(f"{PLAN} is the estimate of another job and is ignored; `pipeline plan` estimates this one")
        self._metrics = self._serve_metrics(metrics) if metrics is not None else None
        self.progress = Progress(plan.job.config.run.progress_timeout_s)
        self._notifier = Notifier(plan.job.config.run.notify, self.warn)
        self._drops: set[str] = set()  # measures of quality whose drop was already reported

    def _serve_metrics(self, address: str) -> "MetricsServer | None":
        """Start the server of /metrics, or warn: no run depends on it."""
        from pipeline.job.telemetry.metrics import MetricsServer

        try:
            return MetricsServer(address)
        except OSError as error:
            self.warn(f"--metrics {address}: {error.strerror or error}; this run shows no metrics")
            return None

    def note(self, text: str, level: Level = "info") -> None:
        """Add a line to the driver's log."""
        for line in self._driver_log.line(text, level):
            if self._show_line is not None:
                with contextlib.suppress(OSError):  # the terminal may be closed
                    self._show_line(line)

    def warn(self, text: str) -> None:
        """Report a problem without ending the run."""
        self._warning = text
        self.note(text, "warning")

    def begin_phase(self, phase: str) -> None:
        """Begin a phase, or end the run: show and write the status at once."""
        if phase != self.phase:
            self.note(phase)
        self.phase = phase
        if self._telemetry.failures and not self._warning:
            self.warn(f"status and records cannot be written: {self._telemetry.last_failure}")
        status = self.status()
        put_status(self._telemetry, status)
        self._show(status)
        self._measure(status)

    def update(self, phase: str) -> None:
        """Show progress within a phase; status and record are written as often as the output allows."""
        self.phase, now = phase, time.monotonic()
        self._updated_at = now
        status = self.status()
        self._log_progress(status)
        if now < self._wrote_at + max(self._write_every_s, self._telemetry.last_write_s / WRITING_SHARE):
            self._measure(status)
            return self._show(status)
        self._wrote_at = now
        self._log.save()
        self.begin_phase(phase)

    def _measure(self, status: Status) -> None:
        """Record progress, and update the snapshot for Prometheus."""
        log, config = self._log, self._plan.job.config
        units = log.written.units + log.lost.units
        phase = "" if status.phase.startswith(WAITING) else status.phase  # its reason may show the time
        self.progress.look((phase, work(status), units), log.actors)
        if self._metrics is None:
            return
        from pipeline.job.telemetry.metrics import Snapshot

        self._metrics.snapshot = Snapshot(
            job=config.name,
            status=status,
            actors=log.actors,
            rows=log.row_stats,
            error_rows=dict(log.written.error_rows),
            health=[self.progress.health(actor) for actor in log.actors],
            progress=self.progress,
            prices=config.cost.prices,
        )

    def _log_progress(self, status: Status) -> None:
        line, now = status_line(status), time.monotonic()
        if any(work(status)) and line != self._logged and now >= self._logged_at + LOG_S:
            self._logged, self._logged_at = line, now
            self.note(line)

    def counted(self, done: int, parts: int) -> None:
        """Call `update` about once a second while the output is counted."""
        if time.monotonic() >= self._updated_at + TICK_S:
            self.update(f"verifying: {done:,} of {parts:,} parts")

    def end(self) -> None:
        """Record how the run ended (`outcome` of its log) and write the job's report."""
        log, plan = self._log, self._plan
        finished = log.outcome == "finished"
        self.note(f"ended: {log.outcome}")
        self.phase = log.outcome
        log.save()
        record = log.record()
        if not record.redo:  # its completions are longer than those of other rows
            remember(plan, record)
        runs, held = [*self._earlier, record], self._totals.now()
        name, digest, rows = plan.job.config.name, plan.fingerprint.digest, plan.num_rows
        self.report = make_report(self._telemetry, name, digest, runs, held, rows, finished, self._estimate)
        self._notifier.close()
        self.begin_phase(log.outcome)
        close_telemetry(self._telemetry, self._show, self.status() if finished else None)
        self._driver_log.close()
        if self._metrics is not None:
            self._metrics.close()

    def notify(self, event: str, **details: object) -> None:
        """Send an event to `run.notify`."""
        config = self._plan.job.config
        common = {"event": event, "job": config.name, "run": self._log.run_id, "output": shown_url(config.output.path)}
        self._notifier.put({**common, **details})

    def look_at_quality(self) -> None:
        """Warn once for each measure of quality in which the compared rows show a drop."""
        found, max_drop = self._quality(), self._plan.job.config.quality.max_drop
        for details, drop in found.drops(max_drop).items():
            if details not in self._drops:
                self._drops.add(details)
                drop_message = drop_text(details, drop, max_drop)
                self.warn(f"quality: after {found.rows:,} rows of the sample {drop_message}: {found.to_text()}")
                self.notify("quality_drop", measure=details, drop=drop, max_drop=max_drop, rows=found.rows)

    def _quality(self) -> QualityStats:
        """Quality of all recorded runs of the job, this one included."""
        return sum((run.row_stats.quality for run in self._earlier), self._log.row_stats.quality)

    def status(self) -> Status:
        log, held, is_running = self._log, self._totals.now(), self._log.outcome == "running"
        # after the run, finished rows of open units are lost or saved for the next run
        finished = sum(actor.open_rows_done for actor in log.actors) if is_running else 0
        computed = sum((actor.record.computed for actor in log.actors), Computed())
        self._pace.add(time.monotonic(), computed)
        prompt_per_s, generated_per_s = self._pace.per_s()
        quality = self._quality()
        copied_before = sum(run.row_stats.copied.generated_tokens for run in self._earlier)
        copied = copied_before + log.row_stats.copied.generated_tokens
        held_computed = held - PartTotals(num_generated_tokens=copied)
        before_computed = self._totals.before - PartTotals(num_generated_tokens=copied_before)
        return Status(
            run_id=log.run_id,
            phase=self.phase,
            outcome=log.outcome,
            rows_total=self._num_rows,
            rows_done=min(self._num_rows, held.rows + log.sampled_rows + finished),
            rows_written=held.rows,
            error_rows=held.num_error_rows,
            units=held.units,
            actors=len(log.actors),
            input_tokens=computed.prompt,
            generated_tokens=computed.generated,
            input_tokens_per_s=prompt_per_s,
            generated_tokens_per_s=generated_per_s,
            eta_s=self._pace.eta_s(self._num_rows, held_computed, before_computed) if is_running else None,
            elapsed_s=log.wall_us / 1e6,
            warning=self._warning,
            quality_rows=quality.rows,
            token_agreement=quality.agreement,
            quality_drops=tuple(quality.drops(self._plan.job.config.quality.max_drop)),
        )


def close_telemetry(telemetry: Telemetry, show: Show, complete: Status | None) -> None:
    """Wait for pending files. `complete`: the status of a finished output, else None; it is shown again with a warning
    if a file could not be written."""
    written = telemetry.close()
    if complete is not None and (not written or telemetry.failures):
        reason = telemetry.last_failure or "writing to the output takes too long"
        warning = (
            f"The output is complete, but its report may be outdated: {reason}. Run the same command to write it again."
        )
        show(replace(complete, warning=warning))


def harmless(show: Show) -> Show:
    """Return `show` that becomes a no-op after an OSError, as when the terminal is closed."""
    failed = False

    def shown(status: Status) -> None:
        nonlocal failed
        if failed:
            return
        try:
            show(status)
        except OSError:
            failed = True

    return shown
