"""Servers as an engine: the interface of `job/process/main.py`'s EngineProtocol, over HTTP.

Rows wait in one queue, from which each server pulls within its window. A request that a server rejects for load is
sent again. A server that ends, or generates no token for the stall timeout, raises EnvironmentFailed: the process ends,
and its supervisor starts a new one, which counts how often a row was inside. EngineUnusable is raised if that would not
help: all servers reject all requests, or one answers as another model. Finished rows are returned before any error.
"""

import asyncio
import collections
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.endpoint.client import PROBE_TIMEOUT_S, Client, Disconnected, ModelNames, NotSent
from pipeline.endpoint.errors import BadAnswer, OtherModel, Overloaded, Rejected, failed
from pipeline.endpoint.images.pool import ImagePool, ImageRefused
from pipeline.endpoint.meter import NANO_USD, Bill, Meter, Reservation
from pipeline.endpoint.rate_limit import RateLimit
from pipeline.endpoint.server import Server, alone, command_of, free_port
from pipeline.endpoint.spec import EndpointConfig, EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.errors import ConfigError, EngineUnusable, EnvironmentFailed, RowError
from pipeline.formatting import duration
from pipeline.machine.host import now_us

TURN_S = 0.25  # maximum time of a step
GATHER_S = 0.005  # after an answer, for others that arrive at about the same time
PROBE_S = 1.0  # between probes while no server is up
LOOK_S = 0.5  # between reads of the servers' gauges
RETRY_S = 0.5  # before a failed request is sent again; doubles with each try
MAX_RETRY_S = 30.0
PROBES = 5  # of a server after its failure, and at the start if no wait is likely to help
MAX_IMAGE_BYTES = 128 << 20  # of decoded images, sent and waiting ones together
MAX_READING = 64  # rows whose images are read from paths and urls at once
MAX_REFUSED_S = 600.0  # of a row that a server refuses for load again and again, while it answers others
MANY_OTHERS = 100
MAX_PAUSE = 5.0  # of a server, in stall timeouts: after six, the run ends
REJOIN_S = 5.0  # between probes of a server that is down, while others work


@dataclass
class _WaitingRow:
    request: EndpointRequest
    added_us: int
    tries: int = 0
    finished: dict[int, tuple[Completion, int]] = field(default_factory=dict)  # samples, if computed one by one
    refused: tuple[float, int] | None = None  # when a server first refused it for load, and answers until then
    image_bytes: int = 0  # of its decoded images


@dataclass(frozen=True)
class _SentRow:
    """A row that a server computes, or that waits to be sent to it again: then its bill is settled."""

    client: Client
    row: _WaitingRow
    bill: Bill
    reserved: Reservation


class EndpointEngine:
    """Engine of one actor. Not thread-safe."""

    def __init__(self, config: EndpointConfig, log: Callable[[str], None]) -> None:
        """Connect to the servers, or start one, and wait for a first token. log: receives progress. Raises ConfigError
        if a server rejects the first request, EnvironmentFailed if none answers in time."""
        self._config, self._log = config, log
        self._loop = asyncio.new_event_loop()
        self._rows: collections.deque[_WaitingRow] = collections.deque()  # waiting
        self._undecoded: collections.deque[_WaitingRow] = collections.deque()  # rows whose images are not decoded yet
        self._decoding: set[asyncio.Task[None]] = set()
        self._images = ImagePool(config.images, config.storage_options)
        self._image_bytes = 0
        self._finished: list[Completion] = []
        self._tasks: dict[asyncio.Task[bool], _SentRow] = {}
        self._has_finished = asyncio.Event()
        self._failure: BaseException | None = None  # raised as soon as finished rows have been returned
        self._unusable: EngineUnusable | None = None  # raised once no request is open either
        self._is_draining = False
        self._background: set[asyncio.Task[object]] = set()
        self._probes: dict[Callable[[], Awaitable[None]], asyncio.Task[str]] = {}  # of servers that work
        self._counts = dict.fromkeys(("num_steps", "batch_sum", "num_retries"), 0)
        self._meter = Meter(config.prices, config.has_budget)
        self._rate_limit = RateLimit(config.requests_per_minute, config.tokens_per_minute, time.monotonic())
        self._names = ModelNames(config)
        self._looked_s = 0.0
        self._server: Server | None = None
        with contextlib.ExitStack() as lock:
            if config.serve:
                lock.enter_context(alone(log))
                port = free_port()
                command = command_of(config.serve, config.requested_model, port)
                log(f"starting {command[0]}")
                self._server = Server(command, port, config.secrets)
                urls: tuple[str, ...] = (self._server.url,)
            else:
                urls = config.urls
            self._clients = [Client(url, config, self._meter, self._names) for url in urls]
            self._up: list[Client] = []
            self._refusing: dict[Client, str] = {}  # servers that are used no more, with the reason
            self._num_sent = dict.fromkeys(self._clients, 0)  # with those that wait to be sent again
            self._probed_s = dict.fromkeys(self._clients, 0.0)
            self._loop.run_until_complete(self._start())
        first = self._up[0]
        if config.expected_model is not None and config.expected_version != first.version:
            before = config.expected_version
            print(f"the server's version is {first.version!r}, and {before!r} in the run before: texts may differ")
        self.resolved: dict[str, str | int] = {
            "device": "server",
            "endpoint": ", ".join(client.shown for client in self._clients),
            "model": self._names.first or first.model,
            "server": first.version,
            "prompts": "tokens" if first.accepts_ids else "text",
        }

    @property
    def has_unfinished(self) -> bool:
        is_decoding = self._undecoded or self._decoding
        return bool(self._rows or self._tasks or is_decoding or self._finished or self._failure or self._unusable)

    @property
    def needed_usd(self) -> float:
        """Cost of the next row, if it waits only because it does not fit into the grant; else 0."""
        if self._sends_no_more or self._tasks or not self._rows:  # a task may wait to send its row again
            return 0.0
        reserved = [client.reservation(self._rows[0].request) for client in self._up]
        return max((self._meter.usd(each) for each in reserved if not self._meter.fits(each)), default=0.0)

    @property
    def waits_for(self) -> str:
        """Reason why all servers pause; empty if one does not."""
        now_s = time.monotonic()
        if not self._up or self._sends_no_more or any(client.window.paused_s(now_s) < 1 for client in self._up):
            return ""
        return "; ".join(client.refusal for client in self._up)

    def warm_up(self) -> None:
        """Do nothing: the first token was computed already."""

    def paused(self, ns: int) -> None:
        """Do nothing: no step is timed."""

    def counters(self) -> dict[str, int]:
        """Return the sums so far. num_steps and num_requests count answers and batch_sum the open requests at each, so
        that their ratio is the mean number of open requests. client_us: processor time of this process. Tokens are
        those of all answers, also of answers that become no row; see `Meter`."""
        return {
            **self._counts,
            **self._meter.counts,
            "num_open": self._meter.num_open,
            "num_rejected": sum(client.num_rejected for client in self._clients),
            "num_requests": self._counts["num_steps"],
            "num_first_frames": self._images.num_first_frames,
            "needed_nanousd": math.ceil(self.needed_usd / NANO_USD),
            "client_us": time.process_time_ns() // 1000,
        }

    def add(self, request: EndpointRequest) -> None:
        if self._is_draining:
            return
        as_ids = request.prompt_token_ids and all(client.accepts_ids for client in self._up)
        if request.control_token and not as_ids and not self._config.allow_control_tokens:
            self._finished.append(failed(request, RowError.CONTROL_TOKENS, _control_message(request)))
        elif request.images:
            self._undecoded.append(_WaitingRow(request, now_us()))
        else:
            (self._rows.appendleft if request.is_follow_up else self._rows.append)(_WaitingRow(request, now_us()))

    def step(self) -> list[Completion]:
        """Return the rows that ended within a moment. If there are none, raises EnvironmentFailed if no server works,
        EngineUnusable if no restart would change that."""
        if self._failure is None:
            self._loop.run_until_complete(self._turn())
        finished, self._finished = self._finished, []
        if not finished and self._failure is not None:
            raise self._failure
        if not finished and self._unusable is not None and not self._tasks:
            raise self._unusable
        return finished

    def grant(self, usd: float) -> None:
        """Set the most that this process may spend in all, at the config's prices."""
        self._meter.grant(usd)

    def drain(self) -> None:
        """Send nothing more, and forget the rows that are not sent. Rows of open requests end as usual, or are
        forgotten if these fail."""
        self._is_draining = True
        self._rows.clear()
        self._undecoded.clear()
        self._end_waits()

    def abandon(self) -> None:
        """Give up the open requests at once."""
        self.drain()
        for task in self._tasks:
            task.cancel()
        while tasks := [*self._tasks, *self._decoding, *self._background, *self._probes.values()]:
            self._loop.run_until_complete(asyncio.wait(tasks))

    def stream(self, requests: Iterable[EndpointRequest]) -> Iterator[Completion]:
        """Yield the completions of requests in the order in which they finish."""
        for request in requests:
            self.add(request)
        while self.has_unfinished:
            yield from self.step()

    def close(self) -> None:
        """Close the connections, and end a server that was started."""
        self.abandon()
        self._loop.run_until_complete(self._images.close())
        for client in self._clients:
            self._loop.run_until_complete(client.close())
        if self._server is not None:
            self._server.close()

    # -- start

    async def _start(self) -> None:
        """Wait until a server answers. Others join later."""
        for client in self._clients:
            await client.open()
        deadline_s = time.monotonic() + self._config.start_timeout_s
        hopeless = dict.fromkeys(self._clients, 0)  # tries that failed for a reason that no wait changes
        while True:
            try:
                reasons = await asyncio.gather(*(self._join(client, hopeless) for client in self._clients))
            except OtherModel as error:
                raise ConfigError(f"server: {error}") from None
            if self._up:
                return
            reason = "; ".join(filter(None, reasons))
            if self._server is not None and self._server.has_ended:
                raise EnvironmentFailed(f"The server ended while starting. Its last lines:\n{self._server.tail()}")
            if self._server is None and min(hopeless.values()) >= PROBES:
                raise ConfigError(f"server.base_url: {reason}")
            if time.monotonic() >= deadline_s:
                advice = "" if self._server is not None else ". Start the server, or correct server.base_url"
                raise EnvironmentFailed(
                    f"No server answered within {self._config.start_timeout_s:,.0f} s (server.start_timeout). "
                    f"{reason}{advice}"
                )
            line = self._server.last_line if self._server is not None else ""
            left = duration(round(deadline_s - time.monotonic()))
            self._log(line or f"waiting for a server, at most {left} more (server.start_timeout): {reason}")
            await asyncio.sleep(PROBE_S)

    async def _join(self, client: Client, hopeless: dict[Client, int]) -> str:
        """Probe a server, and use it if it answers. Return why it does not, or an empty text. Raises ConfigError,
        EnvironmentFailed and OtherModel."""
        try:
            await client.probe()
        except (Disconnected, Overloaded, BadAnswer) as error:
            lasts = isinstance(error, BadAnswer) or (isinstance(error, Disconnected) and error.is_lasting)
            hopeless[client] = hopeless[client] + 1 if lasts else 0
            if isinstance(error, Overloaded) and self._is_too_long(error):
                raise EnvironmentFailed(self._pauses_too_long(client, error)) from None
            return f"{client.shown}: {error}"
        if client not in self._up:
            self._up.append(client)
        return ""

    def _is_too_long(self, error: Overloaded) -> bool:
        return error.wait_s is not None and error.wait_s > MAX_PAUSE * self._config.stall_timeout_s

    def _pauses_too_long(self, client: Client, error: Overloaded) -> str:
        return f"{client.shown} accepts no request for {error.wait_s:,.0f} s: {error}. The same command continues then"

    # -- a step

    async def _turn(self) -> None:
        self._launch()
        self._look_after_servers()
        if not (self._finished or self._failure):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_finished.wait(), TURN_S)
            await asyncio.sleep(GATHER_S)
        self._has_finished.clear()

    @property
    def _sends_no_more(self) -> bool:
        return self._is_draining or self._unusable is not None

    def _launch(self) -> None:
        """Send waiting rows to the servers with room in their windows, the one with the most room first."""
        if self._sends_no_more:
            return
        self._decode_ahead()
        now_s = time.monotonic()
        room = {client: client.window.size(now_s) - self._num_sent[client] for client in self._up}
        while self._rows and room and room[client := max(room, key=room.__getitem__)] > 0:
            reserved = client.reservation(self._rows[0].request)
            if not (self._rate_limit.allows(now_s) and self._meter.fits(reserved)):
                return
            self._rate_limit.sent(reserved.tokens, now_s)
            room[client] -= 1
            self._num_sent[client] += 1
            sent = _SentRow(client, self._rows.popleft(), self._meter.open(reserved), reserved)
            task = self._loop.create_task(self._compute(sent))
            self._tasks[task] = sent
            task.add_done_callback(self._task_ended)

    def _decode_ahead(self) -> None:
        """Read and decode images until they fill the memory for them. Three rows for each process keep it busy: two are
        in it, one waits."""
        while self._undecoded and self._image_bytes < MAX_IMAGE_BYTES:
            is_read = any(isinstance(image, str) for image in self._undecoded[0].request.images)
            if len(self._decoding) >= (MAX_READING if is_read else 3 * self._config.images.processes):
                return
            task = self._loop.create_task(self._decode(self._undecoded.popleft()))
            self._decoding.add(task)
            task.add_done_callback(self._decoding_ended)

    def _decoding_ended(self, task: "asyncio.Task[None]") -> None:
        self._decoding.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        self._launch()

    async def _decode(self, row: _WaitingRow) -> None:
        request = row.request
        try:
            body, row.image_bytes = await self._images.body_with(request.body, request.images)
        except ImageRefused as error:
            self._finish(failed(request, error.code, str(error)))
            return
        row.request = replace(request, body=body, images=())
        self._image_bytes += row.image_bytes
        self._rows.append(row)

    def _task_ended(self, task: "asyncio.Task[bool]") -> None:
        sent = self._tasks.pop(task)
        sent.bill.void()  # still open if it was cancelled before its first statement: nothing was sent
        self._rate_limit.settle(sent.reserved.tokens - sent.bill.tokens, time.monotonic())
        self._num_sent[sent.client] -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        elif (task.cancelled() or not task.result()) and not self._is_draining:
            self._rows.appendleft(sent.row)
        else:
            self._image_bytes -= sent.row.image_bytes
        if not self._tasks:
            self._has_finished.set()
        self._launch()

    async def _compute(self, sent: _SentRow) -> bool:
        """Send a row. Return True if it has ended, False if it must wait again."""
        client, row = sent.client, sent.row
        try:
            done = await client.complete(row.request, row.added_us, sent.bill, row.finished)
        except Rejected as error:
            return await self._is_rejected(client, row, error)
        except OtherModel as error:
            self._stop(str(error))
            return False
        except Overloaded as error:
            return await self._is_overloaded(client, row, error)
        except Disconnected as error:
            problem = await self._problem_of(client, client.probe)
            if problem and client in self._up and not self._sends_no_more:
                self._down(client, problem if problem == str(error) else f"{error}; then {problem}")
            if not problem and isinstance(error, NotSent):  # it answers on its open connections only
                await asyncio.sleep(RETRY_S)
                return False
            return not problem and await self._has_failed(client, row, str(error))
        except BadAnswer as error:
            return await self._has_failed(client, row, str(error))
        self._counts["num_steps"] += 1
        self._counts["batch_sum"] += client.num_open + 1
        self._finish(done)
        return True

    async def _is_rejected(self, client: Client, row: _WaitingRow, error: Rejected) -> bool:
        """Find out whether the server rejects only this row. Return True if the row has ended."""
        if error.status == 401:
            self._refuse(client, str(client.rejects_all(error)))
            return False
        problem = await self._problem_of(client, client.repeat_probe)
        if client not in self._up:  # others compute the row
            return False
        message = f"the server rejects the request (status {error.status}): {error}"
        if problem:
            return await self._has_failed(client, row, message)
        self._finish(failed(row.request, RowError.REJECTED, message))
        return True

    async def _is_overloaded(self, client: Client, row: _WaitingRow, error: Overloaded) -> bool:
        """Send the row again later. Return True if it has ended, since the server refuses no other row."""
        now_s, num_answers = time.monotonic(), self._counts["num_steps"]
        if self._is_too_long(error):
            self._refuse(client, self._pauses_too_long(client, error))
            return False
        row.refused = row.refused or (now_s, num_answers)
        since_s, before = row.refused
        if now_s - since_s > MAX_REFUSED_S and num_answers - before > MANY_OTHERS:
            row.refused = None
            return await self._has_failed(client, row, str(error))
        self._loop.call_later(client.window.paused_s(now_s), self._launch)
        return False

    async def _has_failed(self, client: Client, row: _WaitingRow, reason: str) -> bool:
        """Count a failed try. Return True if it was the last one, False after a pause."""
        if self._sends_no_more:
            return False
        row.tries += 1
        if row.tries > self._config.max_retries:
            message = f"{client.shown}: each of {row.tries} tries failed; the last: {reason}"
            self._finish(failed(row.request, RowError.SERVER_ERROR, message))
            return True
        self._counts["num_retries"] += 1
        await asyncio.sleep(min(MAX_RETRY_S, RETRY_S * 2 ** (row.tries - 1)))
        return False

    def _finish(self, done: Completion) -> None:
        self._finished.append(done)
        self._has_finished.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._has_finished.set()

    def _stop(self, reason: str) -> None:
        """Send nothing more, and fail once the open requests have ended."""
        if not self._sends_no_more:
            self._unusable = EngineUnusable(reason)
            self._end_waits()
            self._has_finished.set()

    def _end_waits(self) -> None:
        """Cancel everything but the open requests of rows."""
        waiting = [task for task, sent in self._tasks.items() if not sent.bill.is_open]
        for task in (*waiting, *self._decoding, *self._probes.values(), *self._background):
            task.cancel()

    # -- servers

    def _look_after_servers(self) -> None:
        now_s = time.monotonic()
        if self._server is not None and self._server.has_ended and not self._sends_no_more:
            self._fail(EnvironmentFailed(f"The server ended. Its last lines:\n{self._server.tail()}"))
        for client in self._clients:
            if client.stalled_s(now_s) > self._config.stall_timeout_s:
                self._down(client, f"no token for {self._config.stall_timeout_s:g} s (run.stall_timeout)")
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            for client in self._clients:
                if client in self._up or client.num_open:
                    self._in_background(client.read_gauges())
                elif self._may_rejoin(client) and now_s - self._probed_s[client] >= REJOIN_S:
                    self._probed_s[client] = now_s
                    self._in_background(self._join_again(client))

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(asyncio.wait_for(work, PROBE_TIMEOUT_S))
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: "asyncio.Task[object]") -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TimeoutError):
            self._fail(error)

    def _may_rejoin(self, client: Client) -> bool:
        return client not in self._refusing and not self._sends_no_more

    async def _join_again(self, client: Client) -> None:
        """Use a server again if it answers."""
        if not await self._probe(client, client.probe) and self._may_rejoin(client) and client not in self._up:
            self._up.append(client)

    async def _problem_of(self, client: Client, probe: Callable[[], Awaitable[None]]) -> str:
        """Probe a server a few times, once for all requests that failed together. Return why it does not work, or an
        empty text."""
        if client not in self._up or self._sends_no_more:
            return "it is not used"
        task = self._probes.get(probe)
        if task is None:
            task = self._probes[probe] = self._loop.create_task(self._probe_often(client, probe))
            task.add_done_callback(lambda _: self._probes.pop(probe))
        return await asyncio.shield(task)

    async def _probe_often(self, client: Client, probe: Callable[[], Awaitable[None]]) -> str:
        problem = ""
        for _ in range(PROBES):
            problem = await self._probe(client, probe)
            if not problem or client not in self._up or self._sends_no_more:
                break
            await asyncio.sleep(RETRY_S)
        return problem

    async def _probe(self, client: Client, probe: Callable[[], Awaitable[None]]) -> str:
        """Probe a server. Return why it does not work, or an empty text. If it rejects the probe, it is used no
        more."""
        try:
            await probe()
        except (Disconnected, Overloaded, BadAnswer) as error:
            return str(error)
        except (ConfigError, EnvironmentFailed) as error:
            self._refuse(client, str(error))
            return str(error)
        except OtherModel as error:
            self._stop(str(error))
            return str(error)
        return ""

    def _down(self, client: Client, reason: str) -> None:
        """Stop using a server until it answers again. Its rows wait again."""
        print(f"{client.shown} is down: {reason}", flush=True)  # to the log; `_log` is for loading only
        self._probed_s[client] = time.monotonic()
        self._remove(client, f"{client.shown}: {reason}")
        for task, sent in self._tasks.items():
            if sent.client is client:
                task.cancel()

    def _refuse(self, client: Client, reason: str) -> None:
        """Use a server no more. Its open requests may end."""
        if client not in self._refusing:
            print(f"{client.shown} is used no more: {reason}", flush=True)
            self._refusing[client] = reason
            self._remove(client, reason)

    def _remove(self, client: Client, reason: str) -> None:
        """Send nothing to a server. Without another one, the engine fails: a restart helps if no server rejects all
        requests."""
        if client in self._up:
            self._up.remove(client)
        if self._up or self._sends_no_more:
            return
        if self._refusing:
            self._stop("; ".join(dict.fromkeys([*self._refusing.values(), reason])))
        else:
            self._fail(EnvironmentFailed(reason))


def _control_message(request: EndpointRequest) -> str:
    return (
        f"the text holds {request.control_token!r}, which the server would parse as a control token; remove it from "
        "the data, or set server.allow_control_tokens"
    )
