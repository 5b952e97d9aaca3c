"""Rows of an engine's process, and the search for rows that crash it.

When a process ends, its rows go to the next one. Rows that were inside two ended processes are suspects: they run
without other rows, in halves (bisection), until the row that ends the process is found. It becomes an error row, and
the rest continue.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pipeline.endpoint.spec import EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.engine.request import Request
from pipeline.errors import EnvironmentFailed, RowError
from pipeline.job.process.child import Ended

MAX_CRASHES_ALONE = 2  # one end may have an outside cause: a kill by hand, or the kernel's for another process's memory
MAX_POISON_ROWS = 5  # poison rows in a row without a completion between them: the engine is broken, not the rows


class Steps(Protocol):
    """Rows with further requests."""

    @property
    def num_ended(self) -> int: ...
    @property
    def poll_s(self) -> float | None:
        """Interval of calls of `follow_up` without completions, while rows wait for something else than a request;
        None: none does."""
        ...

    def follow_up(self, completions: Sequence[Completion]) -> Sequence[Request | EndpointRequest]:
        """Return the requests that follow from finished ones."""
        ...


class Ticket:
    """Rows of one call of `generate`, with an event that is set when none is open. steps: its rows have further
    requests; the event is then set for each completion too, until it is consumed."""

    def __init__(self, num_open: int, steps: "Steps | None" = None) -> None:
        self.num_open = num_open
        self.steps = steps
        self.completions: list[Completion] = []
        self.done = threading.Event()
        self.is_released = False
        if num_open == 0:
            self.done.set()

    @property
    def num_done(self) -> int:
        """Number of finished rows."""
        return len(self.completions) if self.steps is None else self.steps.num_ended

    @property
    def is_open(self) -> bool:
        """True if completions may follow, or were not consumed."""
        return bool(self.completions) or (self.num_open > 0 and not self.is_released)

    def consume(self) -> list[Completion]:
        """Return the new completions."""
        new, self.completions = self.completions, []
        self.done.clear()
        return new


@dataclass
class _OpenRow:
    request: Request | EndpointRequest  # its row_id is the key in OpenRows
    row_id: object  # the caller's id
    ticket: Ticket
    crashes: int = 0  # number of processes that ended with this row inside
    crashes_alone: int = 0  # of these, those with no other row inside


class OpenRows:
    """Open rows of a supervisor. Not thread-safe: the supervisor's lock guards it."""

    def __init__(self, note: Callable[[str], None], see_log: str) -> None:
        """note: logs each poison row. see_log: end of the message if the engine is at fault."""
        self._note, self._see_log = note, see_log
        self._rows: dict[int, _OpenRow] = {}  # by key, in order of arrival
        self._waiting: list[int] = []  # not in the process; sent when no group is tested
        self._inside: dict[int, None] = {}  # in the process, in the order they were sent
        self._groups: list[list[int]] = []  # groups of suspects to test; the last one is being tested
        self._next_key = 0
        self._num_consecutive = 0  # poison rows without a completion between them

    @property
    def any_inside(self) -> bool:
        return bool(self._inside)

    @property
    def num_done(self) -> int:
        """Number of finished rows in open calls of `generate`."""
        return sum(ticket.num_done for ticket in self._tickets())

    def add(self, requests: Sequence[Request | EndpointRequest], steps: Steps | None = None) -> Ticket:
        """Open a call. steps: see `Ticket`."""
        ticket = Ticket(len(requests), steps)
        self._open(requests, ticket)
        return ticket

    def add_follow_ups(self, requests: Sequence[Request | EndpointRequest], ticket: Ticket) -> None:
        """Add requests to an open call."""
        ticket.num_open += len(requests)
        self._open(requests, ticket)

    def _open(self, requests: Sequence[Request | EndpointRequest], ticket: Ticket) -> None:
        for key, request in enumerate(requests, self._next_key):
            self._rows[key] = _OpenRow(replace(request, row_id=key), request.row_id, ticket)
            self._waiting.append(key)
        self._next_key += len(requests)

    def admit(self) -> tuple[Request | EndpointRequest, ...]:
        """Return the requests to send now: the group under test alone, or all waiting rows."""
        if self._groups:
            if self._inside:
                return ()
            group = [key for key in self._groups[-1] if key in self._rows]
            if not group:
                self._groups.pop()
                return self.admit()
        else:
            group, self._waiting = self._waiting, []
        self._inside.update(dict.fromkeys(group))
        return tuple(self._rows[key].request for key in group)

    def finish(self, completions: tuple[Completion, ...]) -> None:
        """Record rows that the process has computed."""
        for completion in completions:
            self._settle(completion.row_id, completion)
        self._num_consecutive = 0

    def process_ended(self, ended: Ended) -> None:
        """Record the end of the process. Raises EnvironmentFailed when rows can no longer be the cause."""
        inside, self._inside = list(self._inside), {}
        for key in inside:
            row = self._rows[key]
            row.crashes += 1
            row.request = replace(row.request, quality=None)  # the comparison may have ended it
        if self._groups:
            return self._split(self._groups.pop(), ended)
        suspects = [key for key in inside if self._rows[key].crashes >= 2]
        cleared = [key for key in inside if self._rows[key].crashes < 2]
        self._waiting = cleared + self._waiting
        if suspects:
            self._split(suspects, ended)

    def release(self) -> None:
        """Return all open calls of `generate`, with their finished rows."""
        for ticket in self._tickets():
            ticket.is_released = True
            ticket.done.set()
        self._rows.clear()
        self._waiting.clear()
        self._inside.clear()
        self._groups.clear()

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
        if row.ticket.num_open == 0 or row.ticket.steps is not None:
            row.ticket.done.set()

    def _split(self, group: list[int], ended: Ended) -> None:
        """Halve the group that was inside when the process ended, without its finished rows. A row that repeatedly
        ended the process on its own becomes an error row."""
        group = [key for key in group if key in self._rows]
        if len(group) != 1:
            half = len(group) // 2
            self._groups += [part for part in (group[half:], group[:half]) if part]
            return
        row = self._rows[group[0]]
        row.crashes_alone += 1
        if row.crashes_alone < MAX_CRASHES_ALONE:
            self._groups.append(group)
            return
        self._num_consecutive += 1
        if self._num_consecutive >= MAX_POISON_ROWS:
            raise EnvironmentFailed(
                f"{self._num_consecutive} rows in a row ended the engine's process ({ended}). "
                f"The engine or its device is at fault, not the rows.{self._see_log}"
            )
        self._note("a row ended the process each time, even alone: it becomes an error row")
        code, length = RowError.ENGINE_FAILURE.value, len(row.request.prompt_token_ids)
        message = "the engine's process ended each time it computed this row, even when alone"
        self._settle(group[0], Completion(None, [], "", "error", length, error=code, error_message=message))
