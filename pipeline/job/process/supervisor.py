"""Keeps one engine process alive for an actor and hands rows to it: the bookkeeping that outlives any engine.

One thread, the keeper, starts the process, reads what it says and notices its end: by itself, by a crash, or
by our own kill when a step takes longer than allowed. `open_rows.py` says which rows go into the next one. What cannot
be blamed on rows ends the actor with a typed error.
"""

import pickle
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.engine.params import Completion, Request
from pipeline.errors import EnvironmentFailed, PipelineError, error_named
from pipeline.job.process.child import Child, Ended, Launch
from pipeline.job.process.messages import Add, Crashed, Finished, Loading, Ready, StartFailed, Worked
from pipeline.job.process.open_rows import OpenRows
from pipeline.job.process.timeline import Timeline
from pipeline.job.telemetry.logs import Level, RotatedLog
from pipeline.machine.host import now_us
from pipeline.report.record.row_stats import Computed
from pipeline.report.record.run_record import summed

MAX_START_DEATHS = 3  # in a row, without a word why
MAX_REASONS = 10  # of restarts, kept for the report
POLL_S = 0.25
COUNTERS_US = 10_000_000  # between two lines of the engine's counters in a log of level debug


@dataclass(frozen=True)
class Deaths:
    """What the engine processes that ended have cost so far, and how the first of them ended."""

    count: int = 0
    reasons: tuple[str, ...] = ()
    lost: Computed = field(default_factory=Computed)  # work on rows that were inside, as far as it was told
    restart_us: int = 0
    crashed_us: int = 0
    poison_rows: int = 0


def computed(completions: Iterable[Completion]) -> Computed:
    """What the engine computed for these rows, all samples of them. Of an error row it is not known."""
    fine = [one for c in completions if c.error is None for one in c.each]
    return Computed(sum(c.num_prompt_tokens - c.num_cached_tokens for c in fine), sum(len(c.token_ids) for c in fine))


class Supervisor:
    """Thread-safe. `generate` may be called from several threads, so that units overlap in the engine."""

    def __init__(
        self, launch: Launch, birth_us: int | None = None, log: RotatedLog | None = None, log_place: str = ""
    ) -> None:
        """`log` gets what the engine's processes print and how they end; messages name it as `log_place`."""
        self._launch, self._log = launch, log
        self._see_log = f"\nWhat it printed is in {log_place}" if log_place else ""
        self._lock = threading.Lock()  # guards everything below but `_child`'s process
        self._rows = OpenRows(self._note, self._see_log)
        self._failure: PipelineError | None = None
        self._interrupted = False
        self._closed = False
        self._counted_us = 0
        self._timeline = Timeline(now_us() if birth_us is None else birth_us)
        self._past_stats: dict[str, int] = {}  # of processes that ended
        self._stats: dict[str, int] = {}  # of the one that runs
        self._given = Computed()  # of rows that the one that runs has finished
        self._restarts = 0
        self._reasons: list[str] = []
        self._lost = Computed()
        self.resolved: dict[str, str | int] = {}
        self.loading = "starting"
        self._child: Child | None = None
        self._keeper = threading.Thread(target=self._keep, daemon=True, name="engine keeper")
        self._keeper.start()

    # -- for the actor's threads

    def generate(self, requests: list[Request]) -> list[Completion]:
        """The completions of `requests`, in the order they finished; after `interrupt` those that are there.

        Blocks. Raises what ended the engine for good.
        """
        with self._lock:
            if self._failure is not None:
                raise _again(self._failure)
            if self._interrupted:
                return []
            ticket = self._rows.add(requests)
            self._admit()
        ticket.done.wait()
        if ticket.failure is not None:
            raise _again(ticket.failure)
        return ticket.completions

    def interrupt(self) -> None:
        """Give up all open rows: calls of `generate` return with what is finished, now and from now on."""
        with self._lock:
            self._interrupted = True
            self._rows.release(None)

    def phases(self) -> dict[str, int]:
        with self._lock:
            return self._timeline.phases(now_us())

    def stats(self) -> dict[str, int]:
        """The engine's counters, summed over all processes of this actor."""
        with self._lock:
            return summed([self._past_stats, self._stats])

    def deaths(self) -> Deaths:
        with self._lock:
            restart_us, crashed_us = self._timeline.restart_us(now_us()), self._timeline.crashed_us
            convicted = self._rows.num_convicted
            return Deaths(self._restarts, tuple(self._reasons), self._lost, restart_us, crashed_us, convicted)

    def tail_us(self) -> int:
        """The idle time since the engine last computed."""
        with self._lock:
            return self._timeline.tail_us

    def at_rest(self) -> str:
        """The phase the actor's time goes to while nothing more is heard of it."""
        with self._lock:
            return self._timeline.at_rest

    def open_rows_done(self) -> int:
        """Rows that are finished, of calls of `generate` that are still open."""
        with self._lock:
            return self._rows.num_done

    def close(self) -> None:
        """End the engine. Open calls of `generate` raise EnvironmentFailed."""
        self._closed = True  # the keeper sees it within POLL_S
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
                    ended = child.bury()
                    if not self._closed:
                        idle = "" if self._rows.any_inside else ", with no rows in it"  # so Ray ends it with the run
                        level: Level = "info" if idle and ended.killed else "warning"
                        self._note(f"process {child.process.pid} ended{idle}: {ended}", level)
                if self._closed:
                    break
                start_deaths = 0 if child.ready else start_deaths + 1
                if start_deaths >= MAX_START_DEATHS:
                    raise EnvironmentFailed(
                        f"The engine's process ended {start_deaths} times while it loaded "
                        f"{self._launch.config.model} ({ended}).{ended.advice()}{self._see_log}"
                    )
                self._after_death(ended)
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
        """Read what the process says until it ends."""
        while True:
            if child.connection.poll(POLL_S):
                try:
                    message = child.connection.recv()
                except (EOFError, OSError, pickle.UnpicklingError):
                    return
                child.heard_us = now_us()
                self._receive(child, message)
            elif self._closed:
                child.kill("the engine was closed")  # the socket closes and the loop ends
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
            return f"nothing heard while it loaded, for {self._launch.load_timeout_s:g} s (run.stall_timeout)"
        return f"no step for {self._launch.step_timeout_s:g} s (run.stall_timeout)"

    def _receive(self, child: Child, message: object) -> None:
        with self._lock:
            match message:
                case Loading(now_us=now, what=what):
                    self._timeline.enter("load", now)
                    if what != self.loading:
                        self._note(f"loading: {what}")
                    self.loading = what
                case Ready(now_us=now, resolved=resolved):
                    self._timeline.enter(None, now)
                    self.resolved = resolved
                    self.loading = ""
                    child.ready = True
                    self._note(f"ready: {', '.join(f'{name} {value}' for name, value in resolved.items())}")
                    self._admit()
                case StartFailed(kind=kind, message=text):
                    raise error_named(kind, text if kind else f"The engine could not be built.\n{text}")
                case Finished(completions=completions):
                    self._given += computed(completions)
                    self._rows.finish(completions)
                    self._admit()
                case Worked(now_us=now, busy_us=busy_us, idle_us=idle_us, stats=stats):
                    self._timeline.progress(now, busy_us, idle_us, stats)
                    self._stats = stats
                    self._note_counters(now, stats)
                case Crashed():
                    child.crash = message

    # -- under the lock

    def _admit(self) -> None:
        child = self._child
        if child is not None and child.ready and (requests := self._rows.admit()):
            child.send(Add(requests))

    def _after_death(self, ended: Ended) -> None:
        with self._lock:
            self._child = None
            self.loading = "starting"
            self._restarts += 1
            self._reasons += [ended.short()][: MAX_REASONS - len(self._reasons)]
            self._lost += Computed.from_stats(self._stats).less(self._given)
            self._given = Computed()
            self._past_stats, self._stats = summed([self._past_stats, self._stats]), {}
            self._timeline.lost(now_us(), had_rows=self._rows.any_inside)
            self._rows.process_ended(ended)

    def _fail(self, error: PipelineError) -> None:
        with self._lock:
            self._failure = error
            if self._child is not None and not self._closed:
                self._timeline.lost(now_us(), had_rows=self._rows.any_inside)
            self._rows.release(error)


def _again(error: PipelineError) -> PipelineError:
    """A fresh exception for each thread: one raised in several threads would mix their tracebacks."""
    return type(error)(str(error))
