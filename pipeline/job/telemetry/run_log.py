"""A run's record, `_pipeline/runs/<run id>.json`, and the job's report over all runs.

The record is replaced while the run continues, so that a killed run has one too.
"""

import json
import os
import platform
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pipeline
from pipeline.config.sections.limits import CostSection
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import DoneUnits, PartStore
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.run_id import next_run_id, run_number
from pipeline.job.telemetry.status import Status
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.job.telemetry.writer import Telemetry
from pipeline.machine.host import now_us, package_versions, process_mark
from pipeline.report.build import build_report
from pipeline.report.estimate import Estimate
from pipeline.report.record.data_warnings import DataWarning
from pipeline.report.record.row_stats import RowStats
from pipeline.report.record.run_record import Moments, Outcome, RunRecord, SkippedInput
from pipeline.report.render import markdown
from pipeline.report.run_report import RunReport
from pipeline.stores.retries import RetryCounts

RUNS = "_pipeline/runs"
SKIPPED = "_pipeline/skipped"  # damaged files that a run skipped, written once since there may be many
STATUS = "_pipeline/status.json"
PLAN = "_pipeline/plan.json"
REPORT_JSON = "_pipeline/report.json"
REPORT_MARKDOWN = "_pipeline/report.md"
NUM_SHOWN_ERRORS = 5
_PACKAGES = ("torch", "transformers", "tokenizers", "pyarrow", "ray", "triton", "numba")


def versions() -> dict[str, str]:
    """Return versions and process of this run, which identify whether a run recorded as running still does."""
    pid = os.getpid()
    found = {"pipeline": pipeline.__version__, "python": platform.python_version()} | package_versions(_PACKAGES)
    return found | {"host": socket.gethostname(), "pid": str(pid), "process": process_mark(pid)}


class RunLog:
    """State of the current run: sums the reports of units and actors. Used by the driver's main thread."""

    def __init__(
        self,
        store: PartStore,
        settings: Mapping[str, Any],
        cost: CostSection,
        resolved: Mapping[str, Any],
        telemetry: Telemetry,
        retries: RetryCounts,
        sample_rows: int = 0,
        retried_limits: Mapping[str, Any] | None = None,
        redo: Sequence[str] = (),
    ) -> None:
        self._telemetry = telemetry
        self._retries = retries  # this run's retried storage requests
        self.began_us = now_us()
        now = datetime.now(UTC)  # for display; runs are ordered by number
        self.run_id = next_run_id(store.folder.names(RUNS), now)
        self._begun = RunRecord(
            self.run_id,
            now.isoformat(timespec="seconds"),
            versions=versions(),
            settings=dict(settings),
            hourly_usd=cost.hourly_usd,
            usd_per_million=dict(cost.prices.usd_per_million),
            resolved=dict(resolved),
            sample_rows=sample_rows,
            retry_limits=dict(retried_limits or {}),
            redo=tuple(redo),
        )
        self.outcome: Outcome = "running"
        self.driver_us: dict[str, int] = {}
        self.actors: list[ActorState] = []
        self.written = PartTotals()  # in parts that this run wrote
        self.computed = PartTotals()  # of `written`, without rows copied from replaced parts
        self.lost = PartTotals()  # in units whose part already existed
        self.sampled_rows = 0
        self.found_units = 0  # units of `lost` whose part was found before any work
        self.row_stats = RowStats()  # of the parts that this run wrote
        self.sample_row_stats = RowStats()
        self.moments = Moments()
        self.write_us = 0
        self.first_errors: list[str] = []  # for the message of too many errors
        self.skipped_files: list[SkippedInput] = []
        self.warnings: list[DataWarning] = []  # warnings about the input
        self.stopped_by = ""
        self._skipped_saved = False

    @property
    def wall_us(self) -> int:
        return now_us() - self.began_us

    def add(self, unit: UnitSummary) -> None:
        """Count a finished unit."""
        self.write_us += unit.write_us
        self.sampled_rows += unit.sampled_rows
        shown = [example.line(code) for code, some in unit.row_stats.errors.items() for example in some]
        self.first_errors += shown[: NUM_SHOWN_ERRORS - len(self.first_errors)]
        if unit.sampled_rows:
            self.sample_row_stats += unit.row_stats
        elif unit.written:
            self.written += unit.totals
            self.computed += unit.renewed or unit.totals
            self.row_stats += unit.row_stats
        else:
            self.lost += unit.totals
            self.found_units += unit.found

    def observe(self) -> None:
        """Record the current state for plots of the run."""
        self.moments.add(self.wall_us, [actor.record for actor in self.actors])

    def record(self) -> RunRecord:
        resolved = dict(self._begun.resolved)
        for actor in self.actors:
            resolved |= actor.resolved
        computed = self.computed
        return replace(
            self._begun,
            outcome=self.outcome,
            wall_us=self.wall_us,
            driver_us=dict(self.driver_us),
            actors=[actor.record for actor in self.actors],
            rows_written=computed.rows,
            units_written=computed.units,
            duplicate_units=self.lost.units - self.found_units,
            units_already_written=self.found_units,
            input_tokens=computed.num_input_tokens,
            cached_tokens=computed.num_cached_tokens,
            generated_tokens=computed.num_generated_tokens,
            error_rows=dict(computed.error_rows),
            dropped_rows=dict(computed.dropped_rows),
            error_input_tokens=computed.num_error_input_tokens,
            extra_samples=computed.further_samples,
            write_us=self.write_us,
            resolved=resolved,
            row_stats=self.row_stats,
            storage_retries=self._retries.counted(),
            skipped_files=self.skipped_files,
            telemetry_failures=self._telemetry.failures,
            stopped_by=self.stopped_by,
            sample_row_stats=self.sample_row_stats,
            moments=list(self.moments.recorded),
            warnings=self.warnings,
        )

    def save(self) -> None:
        """Write the current record asynchronously. The list of skipped files is written once."""
        raw = self.record().to_json()
        if self.skipped_files:
            path = f"{SKIPPED}/{self.run_id}.json"
            if not self._skipped_saved:
                self._telemetry.put(path, json.dumps(raw["skipped_files"]).encode())
                self._skipped_saved = True
            raw |= {"skipped_files": [], "skipped_files_in": path}
        self._telemetry.put(f"{RUNS}/{self.run_id}.json", json.dumps(raw, indent=1).encode())


def load_runs(store: PartStore) -> list[RunRecord]:
    """Return the records of all runs in order. A run that is recorded as running but whose process is missing on this
    machine was killed."""
    names = sorted(store.folder.names(RUNS), key=lambda name: (run_number(name), name))
    runs = (load_run(store, name.removesuffix(".json")) for name in names)
    return [run for run in runs if run is not None]


def load_run(store: PartStore, run_id: str) -> RunRecord | None:
    """Return the record of one run, as in `load_runs`; None if it does not exist."""
    data = store.folder.read(f"{RUNS}/{run_id}.json") if run_id else None
    if data is None:
        return None
    raw = json.loads(data)
    if "skipped_files_in" in raw:
        raw["skipped_files"] = json.loads(store.folder.read(raw["skipped_files_in"]) or b"[]")
    record = RunRecord.from_json(raw)
    if record.outcome == "running" and _is_gone(record.versions):
        record = replace(record, outcome="killed")
    return record


def totals_so_far(store: PartStore, runs: Iterable[RunRecord], done: DoneUnits) -> PartTotals:
    """Estimate the totals of the parts without opening any: rows and units from their names, tokens and errors from the
    runs' records. A killed run lacks its last second or two.

    If the runs recorded more rows than exist, parts were removed or --retry-failed replaced rows: then the footers are
    read.
    """
    totals = PartTotals()
    for run in runs:
        tokens = run.input_tokens, run.cached_tokens, run.generated_tokens, run.error_input_tokens
        dropped = run.dropped_rows
        totals += PartTotals(run.rows_written, 0, run.error_rows, *tokens, run.extra_samples, dropped_rows=dropped)
    if totals.rows > done.num_rows:
        return store.totals(done)
    return replace(totals, rows=done.num_rows, units=done.num_units)


def _is_gone(recorded_versions: Mapping[str, str]) -> bool:
    """Return whether the recorded process is known to be missing on this machine. A pid alone is not enough: after a
    restart of the machine or container another process may have it."""
    pid = recorded_versions.get("pid", "")
    if recorded_versions.get("host") != socket.gethostname() or sys.platform != "linux" or not pid.isdigit():
        return False
    mark = process_mark(int(pid))
    return mark != recorded_versions["process"] if recorded_versions.get("process") else not mark


def make_report(
    telemetry: Telemetry,
    job_name: str,
    fingerprint: str,
    runs: Sequence[RunRecord],
    totals: PartTotals,
    input_rows: int,
    finished: bool,
    estimate: Estimate | None = None,
) -> RunReport:
    """Build the job's report over its runs, and write it asynchronously. `finished`: the output is complete, regardless
    of how its last run ended."""
    report = build_report(job_name, fingerprint, runs, totals, input_rows, estimate)
    if finished:
        report = replace(report, outcome="finished")
    telemetry.put(REPORT_JSON, json.dumps(report.to_json(), indent=1).encode())
    telemetry.put(REPORT_MARKDOWN, markdown(report).encode())
    return report


def load_estimate(store: PartStore, job: str) -> Estimate | None:
    """Return the estimate of `pipeline plan` for the job with this undated digest. None if `plan` did not run,
    estimated another job (other input, prompt, model, limit or length), or its file is unreadable."""
    with suppress(ValueError, TypeError, KeyError):
        raw = store.folder.read(PLAN)
        estimate = None if raw is None else Estimate.from_json(json.loads(raw))
        return estimate if estimate is not None and estimate.job == job else None
    return None


def put_status(telemetry: Telemetry, status: Status) -> None:
    """Write the status, with the current time for readers who find it later."""
    dated = replace(status, updated_at=datetime.now(UTC).isoformat(timespec="seconds"))
    telemetry.put(STATUS, json.dumps(dated.to_json(), indent=1).encode())


def silent_s(status: Status) -> float:
    """Return the seconds since the run wrote this status, by wall clocks (for display only); 0 if it was not
    written."""
    if not status.updated_at:
        return 0.0
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(status.updated_at)).total_seconds())
