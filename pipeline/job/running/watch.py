"""The driver's loop while rows are computed: takes finished units, looks at the actors, drains when it is asked to."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.sections.run import RunSection
from pipeline.errors import Interrupted, LimitReached, PipelineError, error_named
from pipeline.job.actor.ledger import Order
from pipeline.job.actor.spot import SpotNotice
from pipeline.job.dataflow.in_process import InProcessDataflow
from pipeline.job.dataflow.spec import EndOfUnits, FlowSpec
from pipeline.job.running.limits import BUDGET, RESERVE_S, Limit, RunLimits, must_drain
from pipeline.job.running.reporter import TICK_S, RunReporter
from pipeline.job.running.stop import StopSignals
from pipeline.job.running.totals import OutputTotals
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.logs import RAY, collect_ray_logs
from pipeline.job.telemetry.run_log import RunLog

if TYPE_CHECKING:
    from pipeline.job.dataflow.graph import Dataflow

NEXT_S = 0.2  # the longest wait for a finished unit before signals and actors are looked at again
RUNNING = "running"
GIVE_UP_S = 10.0  # for keeping the finished rows of open units, at the end of a drain


@dataclass(frozen=True)
class Watch:
    """Lives in the driver's main thread."""

    settings: RunSection
    log: RunLog
    totals: OutputTotals
    reporter: RunReporter
    stop: StopSignals
    limits: RunLimits
    num_rows: int

    def compute(self, spec: FlowSpec) -> None:
        """Compute what is left. Returns when each unit has its part."""
        flow = self._flow(spec)
        with self.stop.draining():
            self.reporter.say("loading the model")
            notice = self._spot_notice()
            try:
                self._consume(flow)
            except EndOfUnits:
                self.log.stopped_by = ""
            except PipelineError:
                if flow.session_logs is not None:
                    collect_ray_logs(flow.session_logs, self.reporter.logs.path / RAY)
                raise
            finally:
                if notice is not None:
                    notice.close()
                self.log.actors = flow.actors(end=True) or self.log.actors
                self.log.observe()
                started = time.monotonic_ns()
                flow.close()
                self.log.driver_us["ray_stop"] = (time.monotonic_ns() - started) // 1000

    def _flow(self, spec: FlowSpec) -> "Dataflow | InProcessDataflow":
        if not spec.needs_ray:
            return InProcessDataflow(spec, self.log.began_us)
        from pipeline.job.dataflow.graph import Dataflow

        self.reporter.say("starting Ray")
        started = time.monotonic_ns()
        flow = Dataflow(spec, self.log.began_us)
        self.log.driver_us["ray_start"] = (time.monotonic_ns() - started) // 1000
        return flow

    def _spot_notice(self) -> SpotNotice | None:
        cloud = self.settings.spot_notice
        if cloud == "off":
            return None
        asked = "a spot notice: this machine is to be taken away"
        return SpotNotice(cloud, lambda: self.stop.ask(asked), self.reporter.warn)

    def _consume(self, flow: "Dataflow | InProcessDataflow") -> None:
        next_look, began = 0.0, None
        while True:
            self._take_next(flow)
            if self.stop.count:
                return self._drain(flow)
            if time.monotonic() >= next_look:
                self._look(flow)
                phase = _phase_of(self.log.actors)
                if phase == RUNNING and began is None:
                    began = time.monotonic()
                if limit := self._limit_that_stops(time.monotonic() - began if began is not None else 0.0):
                    return self._drain_for(limit, flow)
                self.reporter.update(phase)
                self.reporter.progress.check(self.log.actors)
                next_look = time.monotonic() + TICK_S

    def _take_next(self, flow: "Dataflow | InProcessDataflow") -> None:
        """Count the next unit that ends, if one does soon."""
        summary = flow.next(timeout_s=NEXT_S)
        if summary is None:
            return
        if summary.failure_kind is not None:
            self.reporter.note(f"unit {summary.unit} of window {summary.window}: {summary.failure_message}", "warning")
            raise error_named(summary.failure_kind, summary.failure_message)
        self.log.add(summary)
        self.reporter.look_at_quality()
        rows, errors = summary.totals.rows, summary.totals.num_error_rows
        self.reporter.note(f"unit {summary.unit} of window {summary.window}: {rows:,} rows, {errors} errors", "debug")
        self.totals.check_error_rate()

    def _look(self, flow: "Dataflow | InProcessDataflow") -> None:
        """Hear what the actors say; they keep their last word where the ledger does not answer."""
        before = _lost_machines(self.log.actors)
        self.log.actors = flow.actors() or self.log.actors
        self.log.observe()
        for machine in sorted(_lost_machines(self.log.actors) - before):
            self.reporter.warn(f"{machine} has left the cluster; the units that were open there are computed elsewhere")

    def _limit_that_stops(self, running_s: float) -> Limit | None:
        """The limit of the job that would be passed if more units were begun; says so beforehand, once."""
        limit = self.limits.nearest(self.log.actors, self.log.wall_us / 1e6)
        if warning := self.limits.warning(limit):
            self.reporter.warn(warning)
            self.reporter.notify("limit_near", limit=limit and limit.key, used=limit and limit.used)
        if limit is None or not must_drain(limit, self.log.actors, self.log.written.units, running_s):
            return None
        return limit

    def _drain_for(self, limit: Limit, flow: "Dataflow | InProcessDataflow") -> None:
        """Drain in the time that a limit leaves; a signal on the way drains as it does at any time. Always raises:
        LimitReached, Interrupted or EndOfUnits."""
        self.reporter.warn(f"draining: {limit.key}, {limit.used} are used")
        self.reporter.notify("limit_reached", limit=limit.key, used=limit.used)
        self.log.stopped_by = limit.key
        self._wind_down(flow, max(0.0, limit.left_s - RESERVE_S))
        if self.stop.count:
            self.log.stopped_by = ""
            return self._drain(flow)
        so_far = f"{self.totals.now().rows} of {self.num_rows} rows written"
        what_now = "Raise it to go on." if limit.key == BUDGET else "The next run does more."
        if limit.key != BUDGET and not self.log.written.rows:
            what_now = "Raise it if the next run ends like this one, before any unit."
        raise LimitReached(
            f"{limit.key}: another unit would have passed it, so the run ended itself with {so_far}; finished "
            f"rows of units that were open are kept beside them. {what_now}"
        )

    def _drain(self, flow: "Dataflow | InProcessDataflow") -> None:
        """Take no more units, let the open ones finish within `run.drain_timeout`, keep what is finished of the rest.

        A second signal ends it at once. Always raises: Interrupted, or EndOfUnits if it got to the end.
        """
        self.reporter.note(f"draining: {self.stop.why}")
        self._wind_down(flow, self.settings.drain_timeout)
        written = self.totals.now().rows
        raise Interrupted(f"Stopped by {self.stop.why} with {written} of {self.num_rows} rows written.")

    def _wind_down(self, flow: "Dataflow | InProcessDataflow", finish_s: float) -> None:
        """Take no more units; after finish_s stop in the middle of those that are open. A signal ends it at once."""
        seen = self.stop.count
        # heard_s: by then each actor has reported since it got the order
        for order, limit_s, heard_s in (
            (Order.ADMIT_NO_MORE, finish_s, 3 * TICK_S),
            (Order.GIVE_UP, GIVE_UP_S, TICK_S),
        ):
            flow.order(order)
            given = next_look = time.monotonic()
            while self.stop.count == seen and time.monotonic() < given + limit_s:
                self._take_next(flow)
                if time.monotonic() >= next_look:
                    self._look(flow)
                    self.reporter.update("draining")
                    next_look = time.monotonic() + TICK_S
                    working = any(actor.record.units_in_progress for actor in self.log.actors)
                    if time.monotonic() > given + heard_s and not working:
                        break


def _lost_machines(actors: list[ActorState]) -> set[str]:
    return {actor.record.node for actor in actors if actor.record.node_lost}


def _phase_of(actors: list[ActorState]) -> str:
    if any(actor.record.stats.get("num_steps") for actor in actors):
        return RUNNING
    what = next((actor.loading for actor in actors if actor.loading), "")
    return f"loading the model: {what}" if what else "loading the model"
