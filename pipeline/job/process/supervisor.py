"""Keeps one engine process alive for an actor and hands rows to it: the bookkeeping that outlives any engine.

One thread, the keeper, starts the process, reads what it says and notices its end: by itself, by a crash, or
by our own kill when a step takes longer than allowed. Rows that were in a process when it ended are handed to
the next one. Rows that were there twice are suspects: they are tried in halves, alone, until the one that
ends the process is found; it becomes an error row and the rest go on. What cannot be blamed on rows ends the
actor with a typed error.
"""

import pickle
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pipeline import errors
from pipeline.engine.params import Completion, Request
from pipeline.errors import EnvironmentFailed, PipelineError, RowError
from pipeline.job.process.child import Child, Ended, Launch
from pipeline.job.process.messages import (
    Add,
    Crashed,
    Finished,
    Loading,
    Progress,
    Ready,
    StartFailed,
)
from pipeline.job.process.timeline import Timeline
from pipeline.job.telemetry.logs import RotatedLog
from pipeline.machine.host import now_us
from pipeline.report.run_record import Computed

MAX_START_DEATHS = 3  # in a row, without a word why
MAX_DEATHS_ALONE = 2  # one may come from outside: a kill by hand, the kernel's for another process's memory
MAX_CONVICTIONS = 5  # rows found guilty in a row, without one completion between them: the engine is broken, not they
MAX_REASONS = 10  # of restarts, kept for the report
POLL_S = 0.25


class Ticket:
    """The rows of one call of `generate`, and the event that tells when none is open."""

    def __init__(self, num_open: int) -> None:
        self.num_open = num_open
        self.completions: list[Completion] = []
        self.failure: PipelineError | None = None
        self.done = threading.Event()
        if num_open == 0:
            self.done.set()


@dataclass
class _Row:
    request: Request  # its row_id is our key
    row_id: object  # the caller's
    ticket: Ticket
    deaths: int = 0  # processes that ended with this row inside
    deaths_alone: int = 0  # of these, the ones with no other row inside


@dataclass(frozen=True)
class Deaths:
    """What the engine processes that ended have cost so far, and how the first of them ended."""

    count: int = 0
    reasons: tuple[str, ...] = ()
    lost: Computed = field(default_factory=Computed)  # work on rows that were inside, as far as it was told
    restart_us: int = 0
    died_us: int = 0
    convicted_rows: int = 0


def computed(completions: Iterable[Completion]) -> Computed:
    """What the engine computed for these rows. Of an error row it is not known."""
    fine = [c for c in completions if c.error is None]
    return Computed(sum(c.num_prompt_tokens - c.num_cached_tokens for c in fine), sum(len(c.token_ids) for c in fine))


class Supervisor:
    """Thread-safe. `generate` may be called from several threads, so that units overlap in the engine."""

    def __init__(
        self, launch: Launch, birth_us: int | None = None, log: RotatedLog | None = None, log_place: str = ""
    ) -> None:
        """`log` gets what the engine's processes print and how they end; messages name it as `log_place`."""
        self._launch = launch
        self._log, self._log_place = log, log_place
        self._lock = threading.Lock()  # guards everything below but `_child`'s process
        self._rows: dict[int, _Row] = {}  # open rows by key, in the order they came
        self._waiting: list[int] = []  # not in the process; sent when no trial is on
        self._inside: dict[int, None] = {}  # in the process, in the order they were sent
        self._trials: list[list[int]] = []  # groups of suspects still to try; the last one is being tried
        self._next_key = 0
        self._convictions = 0  # in a row
        self._convicted_rows = 0
        self._failure: PipelineError | None = None
        self._interrupted = False
        self._closed = False
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
        ticket = Ticket(len(requests))
        with self._lock:
            if self._failure is not None:
                raise _again(self._failure)
            if self._interrupted:
                return []
            for request in requests:
                key = self._next_key
                self._next_key += 1
                self._rows[key] = _Row(replace(request, row_id=key), request.row_id, ticket)
                self._waiting.append(key)
            self._admit()
        ticket.done.wait()
        if ticket.failure is not None:
            raise _again(ticket.failure)
        return ticket.completions

    def interrupt(self) -> None:
        """Give up all open rows: calls of `generate` return with what is finished, now and from now on."""
        with self._lock:
            self._interrupted = True
            self._release(None)

    def phases(self) -> dict[str, int]:
        with self._lock:
            return self._timeline.phases(now_us())

    def stats(self) -> dict[str, int]:
        """The engine's counters, summed over all processes of this actor."""
        with self._lock:
            return _sum(self._past_stats, self._stats)

    def deaths(self) -> Deaths:
        with self._lock:
            return Deaths(
                self._restarts,
                tuple(self._reasons),
                self._lost,
                self._timeline.restart_us(now_us()),
                self._timeline.died_us,
                self._convicted_rows,
            )

    def at_rest(self) -> str:
        """The phase the actor's time goes to while nothing more is heard of it."""
        with self._lock:
            return self._timeline.at_rest

    def open_rows_done(self) -> int:
        """Rows that are finished, of calls of `generate` that are still open."""
        with self._lock:
            return sum(len(ticket.completions) for ticket in {row.ticket for row in self._rows.values()})

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
                        idle = "" if self._inside else ", with no rows in it"  # so Ray ends it with the run
                        self._note(f"process {child.process.pid} ended{idle}: {ended}")
                if self._closed:
                    break
                start_deaths = 0 if child.ready else start_deaths + 1
                if start_deaths >= MAX_START_DEATHS:
                    raise EnvironmentFailed(
                        f"The engine's process ended {start_deaths} times while it loaded "
                        f"{self._launch.config.model} ({ended}).{ended.advice()}{self._see_log()}"
                    )
                self._after_death(ended)
            raise EnvironmentFailed("The engine was closed.")
        except PipelineError as error:
            self._fail(error)
        except Exception:
            self._fail(PipelineError(f"The engine's supervisor failed.\n{traceback.format_exc()}"))

    def _note(self, text: str) -> None:
        if self._log is not None:
            self._log.line(text)

    def _see_log(self) -> str:
        return f"\nWhat it printed is in {self._log_place}" if self._log_place else ""

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
        return silent_s > self._launch.step_timeout_s and bool(self._inside)

    def _hung(self, child: Child) -> str:
        if not child.ready:
            return f"nothing heard while it loaded for run.load_timeout_s, {self._launch.load_timeout_s:g} s"
        return f"no step for run.step_timeout_s, {self._launch.step_timeout_s:g} s"

    def _receive(self, child: Child, message: object) -> None:
        with self._lock:
            match message:
                case Loading(now_us=now, what=what):
                    self._timeline.enter("load", now)
                    self.loading = what
                case Ready(now_us=now, resolved=resolved):
                    self._timeline.enter(None, now)
                    self.resolved = resolved
                    self.loading = ""
                    child.ready = True
                    self._admit()
                case StartFailed(kind=kind, message=text):
                    raise _typed(kind, text)
                case Finished(completions=completions):
                    self._given += computed(completions)
                    for completion in completions:
                        self._settle(completion.row_id, completion)
                    self._convictions = 0
                    self._admit()
                case Progress(now_us=now, busy_us=busy_us, idle_us=idle_us, stats=stats):
                    self._timeline.progress(now, busy_us, idle_us, stats)
                    self._stats = stats
                case Crashed():
                    child.crash = message

    # -- under the lock

    def _admit(self) -> None:
        """Send what may go in: the group on trial alone, or all that waits."""
        child = self._child
        if child is None or not child.ready:
            return
        if self._trials:
            if self._inside:
                return
            group = [key for key in self._trials[-1] if key in self._rows]
            if not group:
                self._trials.pop()
                return self._admit()
        else:
            group, self._waiting = self._waiting, []
        if group:
            self._inside.update(dict.fromkeys(group))
            child.send(Add(tuple(self._rows[key].request for key in group)))

    def _settle(self, key: object, completion: Completion) -> None:
        assert isinstance(key, int)
        row = self._rows.pop(key, None)
        self._inside.pop(key, None)
        if row is None:
            return
        row.ticket.completions.append(replace(completion, row_id=row.row_id))
        row.ticket.num_open -= 1
        if row.ticket.num_open == 0:
            row.ticket.done.set()

    def _after_death(self, ended: Ended) -> None:
        with self._lock:
            inside = list(self._inside)
            self._inside = {}
            self._child = None
            self.loading = "starting"
            self._restarts += 1
            self._reasons += [ended.short()][: MAX_REASONS - len(self._reasons)]
            self._lost += Computed.by(self._stats).less(self._given)
            self._given = Computed()
            self._past_stats, self._stats = _sum(self._past_stats, self._stats), {}
            self._timeline.lost(now_us(), had_rows=bool(inside))
            for key in inside:
                self._rows[key].deaths += 1
            if self._trials:
                self._split(self._trials.pop(), ended)
                return
            suspects = [key for key in inside if self._rows[key].deaths >= 2]
            cleared = [key for key in inside if self._rows[key].deaths < 2]
            self._waiting = cleared + self._waiting
            if suspects:
                self._split(suspects, ended)

    def _split(self, group: list[int], ended: Ended) -> None:
        """The process ended with exactly these rows inside (those that had finished are gone from
        `_rows`)."""
        group = [key for key in group if key in self._rows]
        if len(group) != 1:
            half = len(group) // 2
            self._trials += [part for part in (group[half:], group[:half]) if part]
            return
        row = self._rows[group[0]]
        row.deaths_alone += 1
        if row.deaths_alone < MAX_DEATHS_ALONE:
            self._trials.append(group)
            return
        self._convictions += 1
        if self._convictions >= MAX_CONVICTIONS:
            raise EnvironmentFailed(
                f"{self._convictions} rows in a row ended the engine's process ({ended}). "
                f"The engine or its device is at fault, not the rows.{self._see_log()}"
            )
        self._convicted_rows += 1
        self._note("a row ended it each time, also alone: it becomes an error row")
        self._settle(
            group[0],
            Completion(
                row_id=None,
                token_ids=[],
                text="",
                finish_reason="error",
                num_prompt_tokens=len(row.request.prompt_token_ids),
                error=RowError.ENGINE_FAILURE.value,
                error_message="the engine's process ended each time it computed this row, also when alone",
            ),
        )

    def _fail(self, error: PipelineError) -> None:
        with self._lock:
            self._failure = error
            if self._child is not None and not self._closed:
                self._timeline.lost(now_us(), had_rows=bool(self._inside))
            self._release(error)

    def _release(self, failure: PipelineError | None) -> None:
        """Let all open calls of `generate` go."""
        for ticket in {row.ticket for row in self._rows.values()}:
            ticket.failure = failure
            ticket.done.set()
        self._rows.clear()
        self._waiting.clear()
        self._inside.clear()
        self._trials.clear()


def _typed(kind: str, message: str) -> PipelineError:
    """The exception that the engine's process named."""
    error = getattr(errors, kind, None) if kind else None
    if isinstance(error, type) and issubclass(error, PipelineError):
        return error(message)
    return PipelineError(f"The engine could not be built.\n{message}")


def _again(error: PipelineError) -> PipelineError:
    """A fresh exception for each thread: one raised in several threads would mix their tracebacks."""
    return type(error)(str(error))


def _sum(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
