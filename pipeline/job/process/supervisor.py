"""Keep one engine process alive for an actor and hand rows to it. Its bookkeeping outlives any engine.

One thread, the keeper, starts the process, reads its messages and notices its end: a normal exit, a crash, or our own
kill of a step that takes too long. `open_rows.py` decides which rows the next process gets. Failures that no row can
cause end the actor with a typed error.
"""

import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.endpoint.spec import EndpointConfig, EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.engine.request import Request
from pipeline.errors import EnvironmentFailed, PipelineError, error_named
from pipeline.job.process.child import Child, ChildSpec, Ended
from pipeline.job.process.messages import (
    Add,
    Crashed,
    Drain,
    Drained,
    Failed,
    Finished,
    Grant,
    Loading,
    Ready,
    StartFailed,
    Stop,
    Worked,
)
from pipeline.job.process.open_rows import OpenRows, Steps
from pipeline.job.process.timeline import Timeline
from pipeline.job.telemetry.logs import Level, RotatedLog
from pipeline.machine.host import now_us
from pipeline.report.record.row_stats import Computed
from pipeline.report.record.run_record import summed, with_open_as_unmetered

MAX_START_DEATHS = 3  # consecutive, without a reported reason
MAX_REASONS = 10  # restart reasons in the report
POLL_S = 0.25
STOP_GRACE_S = 1.0  # from the message to stop to the end of the process by a signal
COUNTERS_US = 10_000_000  # interval of the engine's counters in the log, at level debug


@dataclass(frozen=True)
class Crashes:
    """Cost of the ended engine processes, and how the first of them ended."""

    count: int = 0
    reasons: tuple[str, ...] = ()
    lost: Computed = field(default_factory=Computed)  # reported work on rows that were inside
    restart_us: int = 0
    crashed_us: int = 0


def computed(completions: Iterable[Completion]) -> Computed:
    """Return the computed tokens of these rows, over all samples. Error rows do not count: theirs are unknown."""
    fine = [one for c in completions if c.error is None for one in c.each]
    return Computed(sum(c.num_prompt_tokens - c.num_cached_tokens for c in fine), sum(c.num_tokens for c in fine))


class Supervisor:
    """Supervisor of one actor's engine. Thread-safe. `generate` may be called from several threads, so that units
    overlap in the engine."""

    def __init__(
        self,
        launch: ChildSpec,
        birth_us: int | None = None,
        log: RotatedLog | None = None,
        log_path: str = "",
        check: Callable[[Mapping[str, str | int]], None] = lambda resolved: None,
    ) -> None:
        """`log`: receives the output of the engine's processes and how they end; messages refer to it as
        `log_path`. `check`: raises a PipelineError if an engine with these resolved settings must not compute rows."""
        self._launch, self._log, self._check = launch, log, check
        self._see_log = f"\nIts output is in {log_path}" if log_path else ""
        self._lock = threading.Lock()  # guards everything below except `_child`'s process
        self._rows = OpenRows(self._note, self._see_log)
        self.failure: PipelineError | None = None  # the error that ended the engine for good
        self._draining = False
        self._kill_at_s: float | None = None  # once no more rows are wanted
        self._closed = False
        self._granted_usd: float | None = None  # over all processes of this supervisor
        self._counted_us = 0
        self._timeline = Timeline(now_us() if birth_us is None else birth_us)
        self._past_stats: dict[str, int] = {}  # counters of ended processes
        self._stats: dict[str, int] = {}  # counters of the running process
        self._given = Computed()  # for rows that the running process has finished
        self._restarts = 0
        self._reasons: list[str] = []
        self._lost = Computed()
        self.resolved: dict[str, str | int] = {}
        self.loading = "starting"
        self.waits_for = ""  # why the engine cannot work; empty if it can
        self._child: Child | None = None
        self._keeper = threading.Thread(target=self._keep, daemon=True, name="engine keeper")
        self._keeper.start()

    # -- for the actor's threads

    def generate(self, requests: Sequence[Request | EndpointRequest]) -> list[Completion]:
        """Return the completions of `requests` in the order in which they finish. After `drain`, `interrupt` or a
        failure of the engine (`failure`) only those that have finished.

        Blocks.
        """
        with self._lock:
            if self.failure is not None or self._draining:
                return []
            ticket = self._rows.add(requests)
            self._admit()
        ticket.done.wait()
        return ticket.completions

    def generate_steps(self, requests: Sequence[Request | EndpointRequest], steps: Steps) -> None:
        """Compute `requests`, and those that follow from their completions by `steps`, until none follows. After
        `drain`, `interrupt` or a failure of the engine none is added, and `steps` receives those that have finished.

        Blocks.
        """
        with self._lock:
            if self.failure is not None or self._draining:
                return
            ticket = self._rows.add(requests, steps)
            self._admit()
        while ticket.is_open or (steps.poll_s is not None and self.failure is None and not self._draining):
            ticket.done.wait(steps.poll_s)
            with self._lock:
                finished = ticket.consume()
            follow_ups = steps.follow_up(finished)
            with self._lock:
                if self.failure is None and not self._draining:
                    self._rows.add_follow_ups(follow_ups, ticket)
                    self._admit()

    def raise_failure(self) -> None:
        """Raise the error that ended the engine for good, if there is one: a new exception for each thread, since
        raising one in several threads would mix their tracebacks."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def drain(self) -> None:
        """Begin no more rows. Calls of `generate` return when their rows have finished, or when none is running."""
        with self._lock:
            if self._draining:
                return
            self._draining = True
            if self._child is not None and self._child.ready and self._rows.any_inside:
                self._child.send(Drain())
            else:
                self._rows.release()

    def interrupt(self) -> None:
        """Give up all open rows and end the engine: calls of `generate` return their finished rows, now and later."""
        with self._lock:
            self._draining = True
            self._rows.release()
            self._stop()

    def grant(self, usd: float) -> None:
        """Allow requests to a server up to this cost in US dollars, since the supervisor began."""
        with self._lock:
            if usd != self._granted_usd:
                self._granted_usd = usd
                self._send_grant()

    def phases(self) -> dict[str, int]:
        with self._lock:
            return self._timeline.phases(now_us())

    def stats(self) -> dict[str, int]:
        """Return the engine's counters, summed over all processes of this actor."""
        with self._lock:
            return summed([self._past_stats, self._stats])

    def deaths(self) -> Crashes:
        with self._lock:
            restart_us, crashed_us = self._timeline.restart_us(now_us()), self._timeline.crashed_us
            return Crashes(self._restarts, tuple(self._reasons), self._lost, restart_us, crashed_us)

    def tail_us(self) -> int:
        """Return the idle time since the engine last computed."""
        with self._lock:
            return self._timeline.tail_us

    def at_rest(self) -> str:
        """Return the phase of the actor's time until the next message."""
        with self._lock:
            return self._timeline.at_rest

    def open_rows_done(self) -> int:
        """Return the number of finished rows in open calls of `generate`."""
        with self._lock:
            return self._rows.num_done

    def close(self) -> None:
        """End the engine. Open calls of `generate` return."""
        self._closed = True  # the keeper sees it within POLL_S
        with self._lock:
            self._stop()
        self._keeper.join()

    # -- the keeper's thread

    def _keep(self) -> None:
        start_deaths = 0
        try:
            while not self._closed:
                child = self._child = Child(self._launch, self._log)
                self._note(f"process {child.process.pid} started for {self._launch.config.model}")
                try:
                    self._attend(child)
                finally:
                    ended = child.reap()
                    if not self._closed:
                        # Ray kills processes without rows at the end of a run: no warning
                        idle = "" if self._rows.any_inside else ", with no rows in it"
                        level: Level = "info" if idle and ended.killed else "warning"
                        self._note(f"process {child.process.pid} ended{idle}: {ended}", level)
                if self._closed or self._kill_at_s is not None:
                    break
                start_deaths = 0 if child.ready else start_deaths + 1
                if start_deaths >= MAX_START_DEATHS:
                    raise EnvironmentFailed(
                        f"The engine's process ended {start_deaths} times while loading "
                        f"{self._launch.config.model} ({ended}).{ended.advice()}{self._see_log}"
                    )
                self._after_death(ended)
                if self._draining:
                    break
            if self._closed:
                raise EnvironmentFailed("The engine was closed.")
        except PipelineError as error:
            self._fail(error)
        except Exception:
            self._fail(PipelineError(f"The engine's supervisor failed.\n{traceback.format_exc()}"))

    def _note(self, text: str, level: Level = "info") -> None:
        if self._log is not None:
            self._log.line(text, level)

    def _note_counters(self, now: int, stats: dict[str, int]) -> None:
        if now - self._counted_us >= COUNTERS_US:
            self._counted_us = now
            self._note(", ".join(f"{name} {count:,}" for name, count in stats.items() if count), "debug")

    def _attend(self, child: Child) -> None:
        """Read the process's messages until it ends."""
        while True:
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                child.kill("the run ended")  # the socket closes and the loop ends
            if child.connection.poll(POLL_S):
                try:
                    message = child.connection.recv()
                except (EOFError, OSError, pickle.UnpicklingError):
                    return
                child.heard_us = now_us()
                self._receive(child, message)
            elif self._is_hung(child):
                child.dump_stack()
                child.kill(self._hung(child))

    def _is_hung(self, child: Child) -> bool:
        silent_s = (now_us() - child.heard_us) / 1e6
        if not child.ready:
            return silent_s > self._launch.load_timeout_s
        return silent_s > self._launch.step_timeout_s and self._rows.any_inside

    def _hung(self, child: Child) -> str:
        if not child.ready:
            return f"no message while loading for {self._launch.load_timeout_s:g} s (run.stall_timeout)"
        return f"no step for {self._launch.step_timeout_s:g} s (run.stall_timeout)"

    def _receive(self, child: Child, message: object) -> None:
        with self._lock:
            match message:
                case Loading(now_us=now, activity=what):
                    self._timeline.enter("load", now)
                    if what != self.loading:
                        self._note(f"loading: {what}")
                    self.loading = what
                case Ready(now_us=now, resolved=resolved):
                    self._timeline.enter(None, now)
                    if self.resolved.get("model") != resolved.get("model") and self.resolved:
                        raise EnvironmentFailed(
                            f"The server has the model {resolved.get('model')!r} now, and had "
                            f"{self.resolved.get('model')!r} before it restarted; one output must not mix two models. "
                            "Start it with the first model again, or choose a new output.path"
                        )
                    self._check(resolved)
                    self.resolved = resolved
                    self.loading = ""
                    child.ready = True
                    self._note(f"ready: {', '.join(f'{name} {value}' for name, value in resolved.items())}")
                    self._send_grant()
                    self._admit()
                case StartFailed(kind=kind, message=text):
                    raise error_named(kind, text if kind else f"The engine could not be built.\n{text}")
                case Failed(kind=kind, message=text):
                    raise error_named(kind, text)
                case Drained():
                    self._rows.release()
                case Finished(completions=completions):
                    self._given += computed(completions)
                    self._rows.finish(completions)
                    self._admit()
                case Worked(now_us=now, busy_us=busy_us, idle_us=idle_us, stats=stats, waits_for=reason):
                    self.waits_for = reason
                    self._timeline.progress(now, busy_us, idle_us, stats)
                    self._stats = stats
                    self._note_counters(now, stats)
                case Crashed():
                    child.crash = message

    # -- under the lock

    def _admit(self) -> None:
        child = self._child
        if child is not None and child.ready and not self._draining and (requests := self._rows.admit()):
            child.send(Add(requests))

    def _send_grant(self) -> None:
        """Send the process the grant, less what earlier processes spent."""
        config = self._launch.config
        if self._child is None or not self._child.ready or self._granted_usd is None:
            return
        assert isinstance(config, EndpointConfig)
        self._child.send(Grant(self._granted_usd - config.prices.committed_usd(self._past_stats)))

    def _stop(self) -> None:
        """End the process, at the latest after STOP_GRACE_S."""
        if self._kill_at_s is None:
            is_up = self._child is not None and self._child.ready
            self._kill_at_s = time.monotonic() + (STOP_GRACE_S if is_up else 0.0)
            if self._child is not None and is_up:
                self._child.send(Stop())

    def _after_death(self, ended: Ended) -> None:
        with self._lock:
            self._child = None
            self.loading, self.waits_for = "starting", ""
            self._restarts += 1
            self._reasons += [ended.short()][: MAX_REASONS - len(self._reasons)]
            self._lost += Computed.from_stats(self._stats).less(self._given)
            self._given = Computed()
            # Nothing is known of the requests that were open.
            self._past_stats, self._stats = summed([self._past_stats, with_open_as_unmetered(self._stats)]), {}
            self._timeline.lost(now_us(), had_rows=self._rows.any_inside)
            if self._draining:
                self._rows.release()
            else:
                self._rows.process_ended(ended)

    def _fail(self, error: PipelineError) -> None:
        with self._lock:
            self.failure = error
            self._stats = with_open_as_unmetered(self._stats)
            if self._child is not None and self._kill_at_s is None:
                self._timeline.lost(now_us(), had_rows=self._rows.any_inside)
            self._rows.release()
