"""The driver's loop while rows are computed: count finished units, observe the actors, and drain on request."""

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.sections.run import RunSection
from pipeline.errors import Interrupted, LimitReached, PipelineError, error_named
from pipeline.formatting import counted
from pipeline.job.actor.actor_registry import Order
from pipeline.job.dataflow.in_process import InProcessDataflow
from pipeline.job.dataflow.spec import EndOfUnits, FlowSpec
from pipeline.job.running.limits import BUDGET, RESERVE_S, Limit, RunLimits, must_drain
from pipeline.job.running.reporter import TICK_S, WAITING, RunReporter
from pipeline.job.running.totals import OutputTotals
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.run_log import RunLog
from pipeline.machine.signals import StopSignals

if TYPE_CHECKING:
    from pipeline.job.dataflow.graph import Dataflow

NEXT_S = 0.2  # longest wait for a finished unit between checks of signals and actors
RUNNING = "running"
GIVE_UP_S = 10.0  # for saving the finished rows of open units, at the end of a drain


@dataclass(frozen=True)
class Driver:
    """Driver's loop of one run, in its main thread."""

    settings: RunSection
    log: RunLog
    totals: OutputTotals
    reporter: RunReporter
    stop: StopSignals
    limits: RunLimits
    num_rows: int

    def compute(self, spec: FlowSpec) -> None:
        """Compute the remaining units. Returns when each has its part."""
        flow = self._flow(spec)
        with self.stop.draining():
            self.reporter.begin_phase("loading the model")
            try:
                self._consume(flow)
            except EndOfUnits:
                self.log.stopped_by = ""
            except PipelineError as error:
                if flow.session_logs is not None:
                    self.reporter.logs.collect_ray(flow.session_logs)
                if not isinstance(error, Interrupted):  # else they are saved already
                    self._save_open_rows(flow)
                raise
            finally:
                self.log.actors = flow.actors(end=True) or self.log.actors
                self.log.observe()
                started = time.monotonic_ns()
                flow.close()
                self.log.driver_us["ray_stop"] = (time.monotonic_ns() - started) // 1000

    def _flow(self, spec: FlowSpec) -> "Dataflow | InProcessDataflow":
        if not spec.needs_ray:
            return InProcessDataflow(spec, self.log.began_us)
        from pipeline.job.dataflow.graph import Dataflow

        self.reporter.begin_phase("starting Ray")
        started = time.monotonic_ns()
        flow = Dataflow(spec, self.log.began_us)
        self.log.driver_us["ray_start"] = (time.monotonic_ns() - started) // 1000
        return flow

    def _consume(self, flow: "Dataflow | InProcessDataflow") -> None:
        next_look, began = 0.0, None
        while True:
            self._count_next(flow)
            if self.stop.count:
                return self._drain(flow)
            if time.monotonic() >= next_look:
                self._look(flow)
                phase = _phase_of(self.log.actors)
                if phase.startswith(WAITING) and not self.reporter.phase.startswith(WAITING):
                    self.reporter.note(phase)
                if phase == RUNNING and began is None:
                    began = time.monotonic()
                    self.log.save()  # with the engines' resolved values, which a resumed run must have too
                if limit := self._limit_that_stops(time.monotonic() - began if began is not None else 0.0):
                    return self._drain_for(limit, flow)
                self.reporter.update(phase)
                self.reporter.progress.check(self.log.actors)
                next_look = time.monotonic() + TICK_S

    def _count_next(self, flow: "Dataflow | InProcessDataflow") -> None:
        """Count the next finished unit, if one finishes soon."""
        summary = flow.next(timeout_s=NEXT_S)
        if summary is None:
            return
        if summary.failure_kind is not None:
            self.reporter.note(f"unit {summary.unit} of window {summary.window}: {summary.failure_message}", "warning")
            raise error_named(summary.failure_kind, summary.failure_message)
        self.log.add(summary)
        self.reporter.look_at_quality()
        rows, errors = counted(summary.totals.rows, "row"), counted(summary.totals.num_error_rows, "error row")
        self.reporter.note(f"unit {summary.unit} of window {summary.window}: {rows}, {errors}", "debug")
        self.totals.check_error_rate()

    def _look(self, flow: "Dataflow | InProcessDataflow") -> None:
        """Read the actors' states. They keep their last state if the registry does not answer."""
        before = _lost_machines(self.log.actors)
        self.log.actors = flow.actors() or self.log.actors
        if (grants := self.limits.grants(self.log.actors)) is not None:
            flow.grant(grants)
        self.log.observe()
        for machine in sorted(_lost_machines(self.log.actors) - before):
            self.reporter.warn(f"{machine} has left the cluster; its open units are computed elsewhere")

    def _limit_that_stops(self, running_s: float) -> Limit | None:
        """Return the limit that further units would exceed. Warns before it is reached, once."""
        limit = self.limits.nearest(self.log.actors, self.log.wall_us / 1e6)
        if warning := self.limits.warning(limit):
            self.reporter.warn(warning)
            self.reporter.notify("limit_near", limit=limit and limit.key, used=limit and limit.used)
        if limit is None or not must_drain(limit, self.log.actors, self.log.written.units, running_s):
            return None
        return limit

    def _drain_for(self, limit: Limit, flow: "Dataflow | InProcessDataflow") -> None:
        """Drain within the remaining time of a limit; a signal in the meantime drains as usual. Always raises:
        LimitReached, Interrupted or EndOfUnits."""
        self.reporter.warn(f"draining: {limit.key}, {limit.used} used")
        self.reporter.notify("limit_reached", limit=limit.key, used=limit.used)
        self.log.stopped_by = limit.key
        self._wind_down(flow, Order.ADMIT_NO_MORE, max(0.0, limit.left_s - RESERVE_S))
        if self.stop.count:
            self.log.stopped_by = ""
            return self._drain(flow)
        advice = "Raise it to continue." if limit.key == BUDGET else "The next run continues."
        if limit.key != BUDGET and not self.log.written.rows:
            advice = "Raise it if the next run ends before any unit too."
        raise LimitReached(
            f"{limit.key} reached: another unit would have exceeded it, so the run stopped {self._so_far()}. {advice}"
        )

    def _drain(self, flow: "Dataflow | InProcessDataflow") -> None:
        """Begin no more rows, let those that run finish within `run.drain_timeout`, and save the finished rows of open
        units.

        A second signal ends it at once. Always raises: Interrupted, or EndOfUnits if all units finished.
        """
        self.reporter.note(f"draining: {self.stop.reason}")
        self._wind_down(flow, Order.DRAIN, self.settings.drain_timeout)
        raise Interrupted(f"Stopped by {self.stop.reason} {self._so_far()}.")

    def _so_far(self) -> str:
        """Return the numbers of rows that the next run need not compute. No unit is open."""
        written = f"with {self.totals.now().rows:,} of {self.num_rows:,} rows written"
        saved = sum(actor.saved_rows for actor in self.log.actors)
        return written + f", and {counted(saved, 'finished row')} of open units saved" * (saved > 0)

    def _wind_down(self, flow: "Dataflow | InProcessDataflow", order: Order, finish_s: float) -> None:
        """Give an order; after finish_s stop midway through open units. A signal ends it at once."""
        seen = self.stop.count
        self._order(flow, order, finish_s, heard_s=3 * flow.report_s)
        if self.stop.count == seen:
            self._order(flow, Order.GIVE_UP, GIVE_UP_S, heard_s=flow.report_s)

    def _order(self, flow: "Dataflow | InProcessDataflow", order: Order, limit_s: float, heard_s: float) -> None:
        """Give an order and wait up to limit_s until no unit is open. A signal ends the wait. heard_s: after that time
        each actor has reported since it received the order."""
        seen = self.stop.count
        flow.order(order)
        ordered_at = next_look = time.monotonic()
        while self.stop.count == seen and time.monotonic() < ordered_at + limit_s:
            self._count_next(flow)
            if time.monotonic() >= next_look:
                self._look(flow)
                self.reporter.update("draining")
                next_look = time.monotonic() + TICK_S
                working = any(actor.record.units_in_progress for actor in self.log.actors)
                if time.monotonic() > ordered_at + heard_s and not working:
                    break

    def _save_open_rows(self, flow: "Dataflow | InProcessDataflow") -> None:
        """Save the finished rows of open units after a failure: they were computed, and a server's are paid."""
        flow.order(Order.GIVE_UP)
        deadline = time.monotonic() + GIVE_UP_S
        with contextlib.suppress(EndOfUnits):
            while time.monotonic() < deadline and flow.actors() is not None:
                self._look(flow)
                if not any(actor.record.units_in_progress for actor in self.log.actors):
                    return
                with contextlib.suppress(PipelineError):  # other units end with the same failure
                    self._count_next(flow)


def _lost_machines(actors: list[ActorState]) -> set[str]:
    return {actor.record.node for actor in actors if actor.record.node_lost}


def _phase_of(actors: list[ActorState]) -> str:
    if actors and all(actor.waits_for for actor in actors):
        return WAITING + actors[0].waits_for
    if any(actor.record.stats.get("num_steps") for actor in actors):
        return RUNNING
    activity = next((actor.loading for actor in actors if actor.loading), "")
    return f"loading the model: {activity}" if activity else "loading the model"
