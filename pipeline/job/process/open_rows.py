"""The rows that an engine's process is to compute, and which of them it can be blamed on when the process ends.

Rows that were in a process when it ended are handed to the next one. Rows that were there twice are suspects: they are
tried in halves, alone, until the one that ends the process is found; it becomes an error row and the rest go on.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.engine.params import Completion, Request
from pipeline.errors import EnvironmentFailed, PipelineError, RowError
from pipeline.job.process.child import Ended

MAX_DEATHS_ALONE = 2  # one may come from outside: a kill by hand, the kernel's for another process's memory
MAX_CONVICTIONS = 5  # rows found guilty in a row, without one completion between them: the engine is broken, not they


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


class OpenRows:
    """Not thread-safe: the supervisor's lock guards it."""

    def __init__(self, note: Callable[[str], None], see_log: str) -> None:
        """note: told of each row that is found guilty. see_log: ends the message where the engine is at fault."""
        self._note, self._see_log = note, see_log
        self._rows: dict[int, _Row] = {}  # by key, in the order they came
        self._waiting: list[int] = []  # not in the process; sent when no trial is on
        self._inside: dict[int, None] = {}  # in the process, in the order they were sent
        self._trials: list[list[int]] = []  # groups of suspects still to try; the last one is being tried
        self._next_key = 0
        self._convictions = 0  # in a row
        self.num_convicted = 0

    @property
    def any_inside(self) -> bool:
        return bool(self._inside)

    @property
    def num_done(self) -> int:
        """Rows that are finished, of calls of `generate` that are still open."""
        return sum(len(ticket.completions) for ticket in self._tickets())

    def add(self, requests: list[Request]) -> Ticket:
        ticket = Ticket(len(requests))
        for key, request in enumerate(requests, self._next_key):
            self._rows[key] = _Row(replace(request, row_id=key), request.row_id, ticket)
            self._waiting.append(key)
        self._next_key += len(requests)
        return ticket

    def admit(self) -> tuple[Request, ...]:
        """What is to be sent into the process now: the group on trial alone, or all that waits."""
        if self._trials:
            if self._inside:
                return ()
            group = [key for key in self._trials[-1] if key in self._rows]
            if not group:
                self._trials.pop()
                return self.admit()
        else:
            group, self._waiting = self._waiting, []
        self._inside.update(dict.fromkeys(group))
        return tuple(self._rows[key].request for key in group)

    def finish(self, completions: tuple[Completion, ...]) -> None:
        """The process has computed these."""
        for completion in completions:
            self._settle(completion.row_id, completion)
        self._convictions = 0

    def process_ended(self, ended: Ended) -> None:
        """Raises EnvironmentFailed when it can no longer be blamed on rows."""
        inside, self._inside = list(self._inside), {}
        for key in inside:
            row = self._rows[key]
            row.deaths += 1
            row.request = replace(row.request, quality=None)  # it may be the comparison that ended it
        if self._trials:
            return self._split(self._trials.pop(), ended)
        suspects = [key for key in inside if self._rows[key].deaths >= 2]
        cleared = [key for key in inside if self._rows[key].deaths < 2]
        self._waiting = cleared + self._waiting
        if suspects:
            self._split(suspects, ended)

    def release(self, failure: PipelineError | None) -> None:
        """Let all open calls of `generate` go."""
        for ticket in self._tickets():
            ticket.failure = failure
            ticket.done.set()
        self._rows.clear()
        self._waiting.clear()
        self._inside.clear()
        self._trials.clear()

    def _tickets(self) -> set[Ticket]:
        return {row.ticket for row in self._rows.values()}

    def _settle(self, key: object, completion: Completion) -> None:
        assert isinstance(key, int)
        row = self._rows.pop(key, None)
        self._inside.pop(key, None)
        if row is None:
            return
        samples = tuple(replace(sample, row_id=row.row_id) for sample in completion.samples)
        row.ticket.completions.append(replace(completion, row_id=row.row_id, samples=samples))
        row.ticket.num_open -= 1
        if row.ticket.num_open == 0:
            row.ticket.done.set()

    def _split(self, group: list[int], ended: Ended) -> None:
        """The process ended with exactly these rows inside (those that had finished are gone from `_rows`)."""
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
                f"The engine or its device is at fault, not the rows.{self._see_log}"
            )
        self.num_convicted += 1
        self._note("a row ended it each time, also alone: it becomes an error row")
        code, why = RowError.ENGINE_FAILURE.value, "the engine's process ended each time it computed this row, also"
        length = len(row.request.prompt_token_ids)
        self._settle(group[0], Completion(None, [], "", "error", length, error=code, error_message=f"{why} when alone"))
