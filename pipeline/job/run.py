"""One run of a job: resume -> execute -> verify -> publish -> report. The order in which anything becomes true is here.

plan (nothing written) -> the output is ours -> one listing -> the units that are left, through the dataflow
  -> count -> _SUCCESS -> record, report and status say "finished"
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline import errors
from pipeline.config import JobConfig
from pipeline.data.output.inventory import what_is_wrong
from pipeline.data.output.parts import SUCCESS, PartStore, Progress
from pipeline.data.output.records import PartTotals
from pipeline.errors import EnvironmentFailed, Interrupted, PipelineError, TooManyRowErrors
from pipeline.job.actor.ledger import Order
from pipeline.job.actor.partial import remove_all
from pipeline.job.actor.spot import SpotNotice
from pipeline.job.actor.worker import Backend
from pipeline.job.actor_specs import flow_spec, provenance, resolve_device
from pipeline.job.dataflow.spec import FlowSpec
from pipeline.job.fingerprint import check_dated, claim, record_numerics
from pipeline.job.plan import JobPlan, make_plan, what_is_left
from pipeline.job.retry_failed import split_totals, tasks_with_failed
from pipeline.job.stall import Stall
from pipeline.job.stop import Stopped, StopSignals
from pipeline.job.success import read_success, verify, write_empty_part, write_success
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.logs import DRIVER, RAY, LogFolder, RotatedLog, collect_ray_logs
from pipeline.job.telemetry.pace import Pace
from pipeline.job.telemetry.run_log import RunLog, load_runs, make_report, put_status, totals_so_far, versions
from pipeline.job.telemetry.status import Status
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.job.telemetry.writer import Telemetry
from pipeline.machine.host import wall_time
from pipeline.report.cost import RunReport
from pipeline.report.records import Computed, RunRecord, SkippedInput
from pipeline.stores.storage import RetryCounts

if TYPE_CHECKING:
    from pipeline.job.dataflow.graph import Dataflow

TICK_S = 1.0
STORE_TICK_S = 10.0  # between records in an object store, where each is a request that is paid for
WRITING_SHARE = 0.05  # of the time, at most, in which a status or record is being written
GIVE_UP_S = 10.0  # to keep what is finished of open units, at the end of a drain

Show = Callable[[Status], None]


def run_job(
    config: JobConfig,
    *,
    accept_numerics: bool = False,
    retry_failed: bool = False,
    progress: Show | None = None,
    backend: Backend | None = None,
) -> RunReport:
    """Run a job, or go on with it, until its output is complete; of a finished job only the report is made
    again.

    `retry_failed` computes the error rows of what is there again. `progress` is called about once a second.
    Raises the exceptions of `pipeline.errors`; whenever one comes, what is written is whole and the same call
    goes on from there. In the main thread SIGINT, SIGTERM and SIGHUP end the run with Interrupted: while rows are
    computed after at most `run.drain_s`, or at a second one; at any other time at once (`stop.py`).
    """
    show = _harmless(progress or (lambda status: None))
    with StopSignals() as stop:
        phase = "planning"

        def planning(what: str = "") -> None:
            show(Status(phase=f"planning: {what}" if what else "planning"))

        try:
            planning()
            began = time.monotonic_ns()
            retries = RetryCounts()
            device = resolve_device(config)
            plan = make_plan(config, device, planning, retries)
            store = PartStore(config.output.path, config.output.storage, retries)
            claimed = claim(store, config.name, plan.fingerprint, accept_numerics, versions(), wall_time())
            plan = replace(plan, fingerprint=claimed)
            done = store.list(plan.fingerprint.short)
            tasks = what_is_left(plan, done)
            failed, before = [], PartTotals()
            if retry_failed:
                store.probe_rewrite()
                failed, before = split_totals(store.parts(done))
                tasks = tasks_with_failed(plan, done, failed)
            earlier = load_runs(store)
            if not tasks and SUCCESS in store.names(""):
                wrong = what_is_wrong(store)
                if wrong is None:
                    return _already_complete(plan, store, done, earlier, show)
                planning(f"all parts are counted again: {wrong}")
            if tasks:
                check_dated(store, plan.fingerprint)
            if accept_numerics:
                record_numerics(store, plan.fingerprint)
            store.remove(SUCCESS)  # it is of the parts as they were: some are to be made or replaced, or are damaged
            if not retry_failed:
                before = totals_so_far(store, earlier, done)
            phase = "telling how the run ended"
            telemetry = Telemetry(store)
            log = RunLog(store, config.free(), config.cost.hourly_usd, {"device": device}, telemetry, retries)
            log.skipped_files = [SkippedInput(f.relative, f.size, f.reason) for f in plan.source.skipped]
            log.driver_us["planning"] = (time.monotonic_ns() - began) // 1000
            stood = None if retry_failed else done
            run = _Run(plan, store, log, before, stood, earlier, show, stop, telemetry)
            with run.recorded():
                store.clean_tmp()
                if not plan.windows:
                    write_empty_part(plan, store, provenance(plan))
                run.check_error_rate()
                if tasks:
                    some_part = next(done.parts(), None)
                    if some_part is not None:
                        plan = plan.with_types_of(store.footer(some_part).schema.to_arrow_schema())
                    spec = flow_spec(plan, tuple(tasks), backend or Backend(), log.run_id, retry_failed=bool(failed))
                    run.execute(spec)
                run.publish()
            return run.report
        except Stopped:
            raise _interrupted(stop, phase) from None


def _interrupted(stop: StopSignals, phase: str) -> Interrupted:
    return Interrupted(f"Stopped by {stop.why} while {phase}.")


def _already_complete(plan: JobPlan, store: PartStore, done: Progress, runs: list[RunRecord], show: Show) -> RunReport:
    """Nothing is left to compute or to count. What tells of the job is written again: a run may have ended between
    `_SUCCESS` and that."""
    rows = plan.num_rows
    status = Status(
        run_id=runs[-1].run_id if runs else "",
        phase="already complete",
        outcome="finished",
        rows_total=rows,
        rows_done=rows,
        rows_written=rows,
    )
    show(status)
    totals = read_success(store) or store.totals(done)
    telemetry = Telemetry(store)
    report = make_report(telemetry, plan.config.name, plan.fingerprint.digest, runs, totals, rows, finished=True)
    put_status(telemetry, replace(status, phase="finished", units=totals.units, error_rows=totals.num_error_rows))
    remove_all(store)
    _tell_failures(telemetry, show, status)
    return report


def _tell_failures(telemetry: Telemetry, show: Show, status: Status) -> None:
    """Wait for what tells of a complete output; what could not be written is said, and the next run writes it."""
    written = telemetry.close()
    if not written or telemetry.failures:
        why = telemetry.last_failure or "the output takes too long to write to"
        show(replace(status, warning=f"The output is complete, but its report may be an older one: {why}. The same "
                                     "command writes it again."))  # fmt: skip


def _harmless(show: Show) -> Show:
    """`show`, until the terminal is gone."""
    gone = False

    def shown(status: Status) -> None:
        nonlocal gone
        if gone:
            return
        try:
            show(status)
        except OSError:
            gone = True

    return shown


def _phase_of(actors: list[ActorState]) -> str:
    if any(actor.record.stats.get("num_steps") for actor in actors):
        return "running"
    what = next((actor.loading for actor in actors if actor.loading), "")
    return f"loading the model: {what}" if what else "loading the model"


class _Run:
    """The part of a run that goes on in time. Lives in the driver's main thread."""

    def __init__(
        self,
        plan: JobPlan,
        store: PartStore,
        log: RunLog,
        before: PartTotals,
        stood: Progress | None,
        earlier: list[RunRecord],
        show: Show,
        stop: StopSignals,
        telemetry: Telemetry,
    ) -> None:
        """`before`: about what the parts hold that stood at the start, `stood`; None where it is exact."""
        self._plan = plan
        self._store = store
        self._log = log
        self._before = before
        self._stood = stood
        self._earlier = earlier
        self._show = show
        self._stop = stop
        self._telemetry = telemetry
        self.phase = "starting"
        self.report: RunReport
        self._counted: PartTotals | None = None  # what the output holds, once every part was looked at
        self._write_every_s = STORE_TICK_S if "://" in plan.config.output.path else 0.0
        self._wrote_at = 0.0
        self._warning = ""
        self._pace = Pace()
        self._logs = LogFolder(store, log.run_id)
        self._logs.prune()
        self._driver_log = RotatedLog(self._logs.path / DRIVER)

    # -- beginning and end

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Around all that may fail: record, report and status say how the run ended, whatever it was. They say
        "finished" only where `publish` came to its end."""
        log = self._log
        self.note(f"run {log.run_id}: {self._plan.num_rows} rows, {self._done().rows} of them written before")
        try:
            log.save()
            self.say("starting")
            yield
            log.outcome = "finished"
        except TooManyRowErrors:
            log.outcome = "stopped"
            raise
        except Interrupted:
            log.outcome = "interrupted"
            raise
        except Stopped:
            log.outcome = "interrupted"
            raise _interrupted(self._stop, self.phase) from None
        except EnvironmentFailed as error:
            log.outcome = "failed"
            self.note(str(error))
            raise EnvironmentFailed(f"{error}\nThe logs of this run: {self._logs.shown()}") from error
        except BaseException as error:
            log.outcome = "failed"
            self.note("".join(traceback.format_exception(error)))
            raise
        finally:
            self.note(f"ended: {log.outcome}")
            self._tell_the_end()

    def _tell_the_end(self) -> None:
        log, plan = self._log, self._plan
        finished = log.outcome == "finished"
        log.save()
        runs = [*self._earlier, log.record()]
        self.report = make_report(
            self._telemetry, plan.config.name, plan.fingerprint.digest, runs, self._done(), plan.num_rows, finished
        )
        self.say(log.outcome)
        if finished:
            _tell_failures(self._telemetry, self._show, self._status())
        else:
            self._telemetry.close()
        self._driver_log.close()
        self._logs.close()

    def publish(self) -> None:
        """Count every row of the output, and say that it is complete: `_SUCCESS`, and after that all else."""
        self.say("verifying")
        started = time.monotonic_ns()
        totals = verify(self._plan, self._store, self.say_verified)
        self.check_error_rate(totals)
        self._log.driver_us["verify"] = (time.monotonic_ns() - started) // 1000
        self.say("publishing")
        try:
            write_success(self._plan, self._store, totals)
        except PipelineError as error:
            raise type(error)(
                f"All {totals.rows} rows are written, but not _SUCCESS, which says so: {error}"
            ) from error
        self._counted = totals
        with contextlib.suppress(PipelineError):  # rows kept for a next run that will not come
            remove_all(self._store)

    def note(self, text: str) -> None:
        """Add a line to the driver's log."""
        self._driver_log.line(text)

    def _done(self) -> PartTotals:
        """What the output holds, as far as this run knows."""
        return self._counted or self._before + self._log.written + self._log.lost

    # -- the dataflow

    def execute(self, spec: FlowSpec) -> None:
        """Compute what is left. Returns when each unit has its part."""
        from pipeline.job.dataflow.graph import Dataflow, EndOfUnits

        self.say("starting Ray")
        started = time.monotonic_ns()
        flow = Dataflow(spec, self._log.began_us)
        self._log.driver_us["ray_start"] = (time.monotonic_ns() - started) // 1000
        with self._stop.draining():
            self.say("loading the model")
            cloud = self._plan.config.run.spot_notice
            notice = None if cloud == "off" else SpotNotice(cloud, self._on_notice, self._warn)
            try:
                self._consume(flow)
            except EndOfUnits:
                pass
            except PipelineError:
                if flow.session_logs is not None:
                    collect_ray_logs(flow.session_logs, self._logs.path / RAY)
                raise
            finally:
                if notice is not None:
                    notice.close()
                self._log.actors = flow.actors(end=True) or self._log.actors
                started = time.monotonic_ns()
                flow.close()
                self._log.driver_us["ray_stop"] = (time.monotonic_ns() - started) // 1000

    def _on_notice(self) -> None:
        self._stop.ask("a spot notice: this machine is to be taken away")

    def _warn(self, text: str) -> None:
        """Tell what went wrong without ending the run."""
        self._warning = text
        self.note(f"warning: {text}")

    def _consume(self, flow: "Dataflow") -> None:
        next_tick = 0.0
        stall = Stall(self._plan.config.run.progress_timeout_s)
        while True:
            summary = flow.next(timeout_s=0.2)
            if summary is not None:
                self._take(summary)
            if self._stop.count:
                return self._drain(flow)
            if time.monotonic() >= next_tick:
                self._tick(flow)
                stall.look(self._log.written.units + self._log.lost.units, self._log.actors)
                next_tick = time.monotonic() + TICK_S

    def _take(self, summary: UnitSummary) -> None:
        if summary.failure_kind is not None:
            self.note(f"unit {summary.unit} of window {summary.window}: {summary.failure_message}")
            kind = getattr(errors, summary.failure_kind or "PipelineError", PipelineError)
            raise kind(summary.failure_message)
        self._log.add(summary)
        self.check_error_rate()

    def _drain(self, flow: "Dataflow") -> None:
        """Take no more units, let the open ones finish within `run.drain_s`, keep what is finished of the rest.

        A second signal ends it at once. Always raises: Interrupted, or EndOfUnits if it got to the end.
        """
        seen = self._stop.count
        self.note(f"draining: {self._stop.why}")
        for order, limit_s in (
            (Order.ADMIT_NO_MORE, self._plan.config.run.drain_s),
            (Order.GIVE_UP, GIVE_UP_S),
        ):
            flow.order(order)
            given = time.monotonic()
            heard = 3 * TICK_S if order is Order.ADMIT_NO_MORE else TICK_S  # each actor has reported since
            next_tick = given
            while self._stop.count == seen and time.monotonic() < given + limit_s:
                summary = flow.next(timeout_s=0.2)
                if summary is not None:
                    self._take(summary)
                if time.monotonic() >= next_tick:
                    self.phase = "draining"
                    self._tick(flow)
                    next_tick = time.monotonic() + TICK_S
                    if time.monotonic() > given + heard and not any(a.open_units for a in self._log.actors):
                        break
        raise Interrupted(
            f"Stopped by {self._stop.why} with {self._done().rows} of {self._plan.num_rows} rows written."
        )

    # -- what is told

    def _tick(self, flow: "Dataflow") -> None:
        self._log.actors = flow.actors() or self._log.actors
        if self.phase != "draining":
            self.phase = _phase_of(self._log.actors)
        every_s = max(self._write_every_s, self._telemetry.last_write_s / WRITING_SHARE)
        if time.monotonic() < self._wrote_at + every_s:
            self._show(self._status())
            return
        self._wrote_at = time.monotonic()
        self._log.save()
        self.say(self.phase)

    def check_error_rate(self, totals: PartTotals | None = None) -> None:
        """Raise TooManyRowErrors as soon as the limit cannot be kept any more, however the rest goes."""
        limit, rows = self._plan.config.run.max_error_rate, self._plan.num_rows
        failed = (totals or self._done()).num_error_rows
        if totals is None and self._stood is not None and failed and failed / rows > limit:  # recorded: now look, once
            self._before, self._stood = self._store.totals(self._stood), None
            failed = self._done().num_error_rows
        if failed and failed / rows > limit:
            first = "".join(f"\n  {line}" for line in self._log.first_errors)
            raise TooManyRowErrors(
                f"{failed} error rows of {rows} rows are more than run.max_error_rate {limit:g} allows."
                f"{' The first ones:' + first if first else ' See the error column of the parts.'}\n"
                "Mend the input or raise the limit."
            )

    def say_verified(self, done: int, parts: int) -> None:
        if time.monotonic() >= self._wrote_at + max(TICK_S, self._write_every_s):
            self._wrote_at = time.monotonic()
            self.phase = f"verifying: {done:,} of {parts:,} parts"
            self.say(self.phase)

    def say(self, phase: str) -> None:
        if phase != self.phase:
            self.note(phase)
        self.phase = phase
        if self._telemetry.failures and not self._warning:
            self._warn(f"status and records cannot be written: {self._telemetry.last_failure}")
        status = self._status()
        put_status(self._telemetry, status)
        self._show(status)

    def _status(self) -> Status:
        log, held, goes_on = self._log, self._done(), self._log.outcome == "running"
        finished = sum(actor.open_rows_done for actor in log.actors) if goes_on else 0  # else lost, or for the next run
        computed = sum((actor.record.computed for actor in log.actors), Computed())
        self._pace.add(time.monotonic(), computed)
        prompt_per_s, generated_per_s = self._pace.per_s()
        return Status(
            run_id=log.run_id,
            phase=self.phase,
            outcome=log.outcome,
            rows_total=self._plan.num_rows,
            rows_done=min(self._plan.num_rows, held.rows + finished),
            rows_written=held.rows,
            error_rows=held.num_error_rows,
            units=held.units,
            actors=len(log.actors),
            input_tokens=computed.prompt,
            generated_tokens=computed.generated,
            input_tokens_per_s=prompt_per_s,
            generated_tokens_per_s=generated_per_s,
            eta_s=self._pace.eta_s(self._plan.num_rows, held, self._before) if goes_on else None,
            elapsed_s=log.wall_us / 1e6,
            warning=self._warning,
        )
