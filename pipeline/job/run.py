"""One run of a job: resume -> execute -> verify -> report. The order in which anything becomes true is here.

plan (nothing written) -> the output is ours -> one listing -> the units that are left, through the dataflow
  -> count -> report -> _SUCCESS
"""

import contextlib
import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipeline import errors
from pipeline.config import JobConfig
from pipeline.cost import RunReport
from pipeline.data.parts import SUCCESS, PartStore
from pipeline.data.records import PartTotals
from pipeline.data.storage import retry_counts
from pipeline.errors import EnvironmentFailed, Interrupted, PipelineError, TooManyRowErrors
from pipeline.job.actors import FlowSpec, flow_spec, provenance, resolve_device
from pipeline.job.fingerprint import claim, record_numerics
from pipeline.job.ledger import ActorState, Order
from pipeline.job.partial import remove_all
from pipeline.job.plan import Plan, make_plan, what_is_left
from pipeline.job.record import STATUS, RunLog, make_report, totals_so_far, versions
from pipeline.job.retry import split_totals, tasks_with_failed
from pipeline.job.spot import SpotNotice
from pipeline.job.stages import UnitSummary
from pipeline.job.status import Status
from pipeline.job.verify import read_success, verify, write_empty_part, write_success
from pipeline.job.worker import Backend
from pipeline.metrics import SkippedInput

if TYPE_CHECKING:
    from pipeline.job.dataflow import Dataflow

TICK_S = 1.0
STORE_TICK_S = 10.0  # between records in an object store, where each is a request that is paid for
RATE_WINDOW_S = 30.0
GIVE_UP_S = 10.0  # to keep what is finished of open units, at the end of a drain
SIGNALS = (signal.SIGINT, signal.SIGTERM)

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
    goes on from there. SIGINT and SIGTERM end the run with Interrupted after at most `run.drain_s`, a second one
    at once (main thread only).
    """
    show = progress or (lambda status: None)
    show(Status(phase="planning"))
    began = time.monotonic_ns()
    retries_before = retry_counts()
    device = resolve_device(config)
    plan = make_plan(config, device, lambda what: show(Status(phase=f"planning: {what}")))
    store = PartStore(config.output.path, config.output.storage)
    claim(store, config.name, plan.fingerprint, accept_numerics, versions())
    done = store.list(plan.fingerprint.short)
    tasks = what_is_left(plan, done)
    failed, before = [], PartTotals()
    if retry_failed:
        store.probe_rewrite()
        failed, before = split_totals(store.parts())
        tasks = tasks_with_failed(plan, done, failed)
    if not tasks and SUCCESS in store.names(""):
        show(
            Status(
                phase="already complete",
                outcome="finished",
                rows_total=plan.num_rows,
                rows_done=plan.num_rows,
                rows_written=plan.num_rows,
            )
        )
        totals = read_success(store) or store.totals()
        return make_report(store, config.name, plan.fingerprint.digest, totals, plan.num_rows, finished=True)
    if accept_numerics:
        record_numerics(store, plan.fingerprint)
    if not retry_failed:
        before = totals_so_far(store, done)
    log = RunLog(store, config.free(), config.cost.hourly_usd, {"device": device})
    log.retries_before = retries_before
    log.skipped_files = [SkippedInput(f.relative, f.size, f.reason) for f in plan.source.skipped]
    log.driver_us["planning"] = (time.monotonic_ns() - began) // 1000
    run = _Run(plan, store, log, before, show)
    with run.recorded():
        store.clean_tmp()
        if not plan.windows:
            write_empty_part(plan, store, provenance(plan))
        run.check_error_rate()
        if tasks:
            store.remove(SUCCESS)  # parts are to be replaced, or were removed by hand since
            run.execute(flow_spec(plan, tuple(tasks), backend or Backend(), retry_failed=bool(failed)))
        run.say("verifying")
        started = time.monotonic_ns()
        totals = verify(plan, store)
        run.check_error_rate(totals)
        log.driver_us["verify"] = (time.monotonic_ns() - started) // 1000
    report = make_report(store, config.name, plan.fingerprint.digest, totals, plan.num_rows, finished=True)
    remove_all(store)
    write_success(plan, store, totals)
    run.say("finished")
    return report


def _phase_of(actors: list[ActorState]) -> str:
    if any(actor.record.stats.get("num_steps") for actor in actors):
        return "running"
    what = next((actor.loading for actor in actors if actor.loading), "")
    return f"loading the model: {what}" if what else "loading the model"


class _Stall:
    """Notices that nothing moves any more: no unit ends, no engine steps, none is loading."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = time.monotonic()
        self._seen: object = None

    def look(self, units: int, actors: list[ActorState]) -> None:
        """Raise EnvironmentFailed once it has been so for the limit."""
        now = (
            units,
            sum(actor.record.stats.get("num_steps", 0) for actor in actors),
            # an engine that loads steps nothing; its time goes on only while its actor lives
            sum(a.record.phases_us["startup"] + a.record.phases_us["load"] for a in actors),
        )
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        elif time.monotonic() - self._since > self._limit_s:
            raise EnvironmentFailed(self._why(actors))

    def _why(self, actors: list[ActorState]) -> str:
        idle = f"Nothing has moved for {self._limit_s:g} s (run.progress_timeout_s)"
        if not actors:
            return (
                f"{idle}: no engine actor could be started. Has the cluster the CPUs and GPUs that run.actors, "
                "run.cpus_per_actor and run.gpus_per_actor ask for?"
            )
        return f"{idle}: {len(actors)} engine actors were seen, none of them works. Are their machines gone?"


class _Run:
    """The part of a run that goes on in time. Lives in the driver's main thread."""

    def __init__(self, plan: Plan, store: PartStore, log: RunLog, before: PartTotals, show: Show) -> None:
        self._plan = plan
        self._store = store
        self._log = log
        self._before = before
        self._show = show
        self._phase = "starting"
        self._signals = 0
        self._why_stopped = "a signal"
        self._write_every_s = STORE_TICK_S if "://" in plan.config.output.path else 0.0
        self._wrote_at = 0.0
        self._rates: deque[tuple[float, int, int]] = deque()  # time, tokens in, tokens out

    # -- beginning and end

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Around all that may fail: the run's record says how it ended, whatever it was."""
        with self._handling_signals():
            try:
                self._log.save()
                self.say("starting")
                yield
                self._log.outcome = "finished"
            except TooManyRowErrors:
                self._log.outcome = "stopped"
                raise
            except Interrupted:
                self._log.outcome = "interrupted"
                raise
            except BaseException:
                self._log.outcome = "failed"
                raise
            finally:
                with contextlib.suppress(PipelineError):  # a full disk must not hide why the run ended
                    self._log.save()
                    if self._log.outcome != "finished":
                        self._report_so_far()
                        self.say(self._log.outcome)

    def _report_so_far(self) -> None:
        plan = self._plan
        make_report(self._store, plan.config.name, plan.fingerprint.digest, self._done(), plan.num_rows, finished=False)

    def _done(self) -> PartTotals:
        """What the output holds, as far as this run knows."""
        return self._before + self._log.written + self._log.lost

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {number: signal.getsignal(number) for number in SIGNALS}
        self._install_handlers()
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _install_handlers(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _on_notice(self) -> None:
        self._why_stopped = "a spot notice: this machine is to be taken away"
        self._signals += 1

    # -- the dataflow

    def execute(self, spec: FlowSpec) -> None:
        """Compute what is left. Returns when each unit has its part."""
        from pipeline.job.dataflow import Dataflow, EndOfUnits

        self.say("starting Ray")
        started = time.monotonic_ns()
        flow = Dataflow(spec, self._log.began_us)
        self._install_handlers()  # Ray puts its own handler for SIGTERM in the place of ours
        self._log.driver_us["ray_start"] = (time.monotonic_ns() - started) // 1000
        self.say("loading the model")
        cloud = self._plan.config.run.spot_notice
        notice = None if cloud == "off" else SpotNotice(cloud, self._on_notice)
        try:
            self._consume(flow)
        except EndOfUnits:
            pass
        finally:
            if notice is not None:
                notice.close()
            self._log.actors = flow.actors(end=True) or self._log.actors
            started = time.monotonic_ns()
            flow.close()
            self._log.driver_us["ray_stop"] = (time.monotonic_ns() - started) // 1000

    def _consume(self, flow: "Dataflow") -> None:
        next_tick = 0.0
        stall = _Stall(self._plan.config.run.progress_timeout_s)
        while True:
            summary = flow.next(timeout_s=0.2)
            if summary is not None:
                self._take(summary)
            if self._signals:
                return self._drain(flow)
            if time.monotonic() >= next_tick:
                self._tick(flow)
                stall.look(self._log.written.units + self._log.lost.units, self._log.actors)
                next_tick = time.monotonic() + TICK_S

    def _take(self, summary: UnitSummary) -> None:
        if summary.failure_kind is not None:
            kind = getattr(errors, summary.failure_kind or "PipelineError", PipelineError)
            raise kind(summary.failure_message)
        self._log.add(summary)
        self.check_error_rate()

    def _drain(self, flow: "Dataflow") -> None:
        """Take no more units, let the open ones finish within `run.drain_s`, keep what is finished of the rest.

        A second signal ends it at once. Always raises: Interrupted, or EndOfUnits if it got to the end.
        """
        seen = self._signals
        for order, limit_s in (
            (Order.ADMIT_NO_MORE, self._plan.config.run.drain_s),
            (Order.GIVE_UP, GIVE_UP_S),
        ):
            flow.order(order)
            given = time.monotonic()
            heard = 3 * TICK_S if order is Order.ADMIT_NO_MORE else TICK_S  # each actor has reported since
            next_tick = given
            while self._signals == seen and time.monotonic() < given + limit_s:
                summary = flow.next(timeout_s=0.2)
                if summary is not None:
                    self._take(summary)
                if time.monotonic() >= next_tick:
                    self._phase = "draining"
                    self._tick(flow)
                    next_tick = time.monotonic() + TICK_S
                    if time.monotonic() > given + heard and not any(a.open_units for a in self._log.actors):
                        break
        raise Interrupted(
            f"Stopped by {self._why_stopped} with {self._done().rows} of {self._plan.num_rows} rows done. "
            "The same command goes on from here."
        )

    # -- what is told

    def _tick(self, flow: "Dataflow") -> None:
        self._log.actors = flow.actors() or self._log.actors
        if self._phase != "draining":
            self._phase = _phase_of(self._log.actors)
        if time.monotonic() < self._wrote_at + self._write_every_s:
            self._show(self._status())
            return
        self._wrote_at = time.monotonic()
        self._log.save()
        self.say(self._phase)

    def check_error_rate(self, totals: PartTotals | None = None) -> None:
        """Raise TooManyRowErrors as soon as the limit cannot be kept any more, however the rest goes."""
        limit, rows = self._plan.config.run.max_error_rate, self._plan.num_rows
        failed = (totals or self._done()).num_error_rows
        if totals is None and failed and failed / rows > limit:  # as far as is recorded: now look
            there = self._store.totals()
            self._before = there - self._log.written - self._log.lost
            failed = there.num_error_rows
        if failed and failed / rows > limit:
            first = "".join(f"\n  {line}" for line in self._log.first_errors)
            raise TooManyRowErrors(
                f"{failed} error rows of {rows} rows are more than run.max_error_rate {limit:g} allows."
                f"{' The first ones:' + first if first else ' See the error column of the parts.'}\n"
                "Mend the input or raise the limit; what is done is kept and the same command goes on."
            )

    def say(self, phase: str) -> None:
        self._phase = phase
        status = self._status()
        self._store.replace(STATUS, json.dumps(status.to_json(), indent=1).encode())
        self._show(status)

    def _eta_s(self, held: PartTotals, tokens_of_run: int, tokens_per_s: float) -> float | None:
        """From tokens, since long rows come first: what a written row took on average, for all rows. None until the
        first unit is written."""
        if not held.rows or tokens_per_s <= 0:
            return None
        per_row = (held.num_input_tokens + held.num_generated_tokens) / held.rows
        earlier = self._before.num_input_tokens + self._before.num_generated_tokens
        return max(0.0, per_row * self._plan.num_rows - earlier - tokens_of_run) / tokens_per_s

    def _status(self) -> Status:
        log, now = self._log, time.monotonic()
        held = self._done()
        done = min(self._plan.num_rows, held.rows + sum(actor.open_rows_done for actor in log.actors))
        read, generated = (
            sum(actor.record.stats.get(name, 0) for actor in log.actors)
            for name in ("prompt_tokens", "generated_tokens")
        )
        self._rates.append((now, read, generated))
        while len(self._rates) > 2 and self._rates[0][0] < now - RATE_WINDOW_S:
            self._rates.popleft()
        then, *before = self._rates[0]
        span = now - then
        rates = [(a - b) / span if span > 0 else 0.0 for a, b in zip((read, generated), before, strict=True)]
        return Status(
            run_id=log.run_id,
            phase=self._phase,
            outcome=log.outcome,
            rows_total=self._plan.num_rows,
            rows_done=done,
            rows_written=held.rows,
            error_rows=held.num_error_rows,
            units=held.units,
            actors=len(log.actors),
            input_tokens=read,
            generated_tokens=generated,
            input_tokens_per_s=rates[0],
            generated_tokens_per_s=rates[1],
            eta_s=self._eta_s(held, read + generated, sum(rates)),
            elapsed_s=log.wall_us / 1e6,
        )
