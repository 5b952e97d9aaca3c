"""Servers as an engine: the interface of `job/process/main.py`'s EngineProtocol, over HTTP.

Rows wait in one queue, from which each server pulls within its window. A request that a server rejects for load is
sent again. A server that ends, or generates no token for the stall timeout, raises: the process ends, and its
supervisor starts a new one, which counts how often a row was inside.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.endpoint.answer import AllRejected, BadAnswer, Overloaded, failed
from pipeline.endpoint.client import PROBE_TIMEOUT_S, Client, Disconnected
from pipeline.endpoint.server import Server, alone, command_of, free_port
from pipeline.endpoint.spec import EndpointConfig, EndpointRequest
from pipeline.engine.params import Completion
from pipeline.errors import ConfigError, EnvironmentFailed, RowError
from pipeline.machine.host import now_us

TURN_S = 0.25  # maximum time of a step
GATHER_S = 0.005  # after an answer, for others that arrive at about the same time
PROBE_S = 1.0  # between probes while no server is up
LOOK_S = 0.5  # between reads of the servers' gauges
RETRY_S = 0.5  # before a failed request is sent again; doubles with each try
MAX_TRIES = 5
REJOIN_S = 5.0  # between probes of a server that is down, while others work


@dataclass
class _SentRow:
    request: EndpointRequest
    added_us: int
    tries: int = 0


class EndpointEngine:
    """Engine of one actor. Not thread-safe."""

    def __init__(self, config: EndpointConfig, log: Callable[[str], None]) -> None:
        """Connect to the servers, or start one, and wait for a first token. log: receives progress. Raises ConfigError
        if a server rejects the first request, EnvironmentFailed if none answers in time."""
        self._config, self._log = config, log
        self._loop = asyncio.new_event_loop()
        self._rows: collections.deque[_SentRow] = collections.deque()  # waiting
        self._finished: list[Completion] = []
        self._tasks: dict[asyncio.Task[bool], tuple[Client, _SentRow]] = {}
        self._has_finished = asyncio.Event()
        self._failure: BaseException | None = None
        self._background: set[asyncio.Task[object]] = set()
        self._probes: dict[Client, asyncio.Task[str]] = {}
        self._counts = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "generated_tokens", "num_steps", "batch_sum", "num_retries",
             "num_unmetered"), 0)  # fmt: skip
        self._looked_s = 0.0
        self._server: Server | None = None
        with contextlib.ExitStack() as lock:
            if config.serve:
                lock.enter_context(alone(log))
                port = config.port or free_port()
                command = command_of(config.serve, config.requested_model, port)
                log(f"starting {command[0]}")
                self._server = Server(command, port, frozenset({config.api_key} if config.api_key else ()))
                urls: tuple[str, ...] = (self._server.url,)
            else:
                urls = config.urls
            self._clients = [Client(url, config) for url in urls]
            self._up: list[Client] = []
            self._num_sent = dict.fromkeys(self._clients, 0)  # with those that wait to be sent again
            self._probed_s = dict.fromkeys(self._clients, 0.0)
            self._loop.run_until_complete(self._start())
        first = self._up[0]
        self._check_resumed(first)
        self.resolved: dict[str, str | int] = {
            "device": "server",
            "endpoint": ", ".join(client.shown for client in self._clients),
            "model": first.answered_model,
            "server": first.version,
            "prompts": "tokens" if first.accepts_ids else "text",
        }

    @property
    def has_unfinished(self) -> bool:
        return bool(self._rows or self._tasks or self._finished)

    def warm_up(self) -> None:
        """Do nothing: the first token was computed already."""

    def paused(self, ns: int) -> None:
        """Do nothing: no step is timed."""

    def counters(self) -> dict[str, int]:
        """Return the sums so far. num_steps and num_requests count answers and batch_sum the open requests at each, so
        that their ratio is the mean number of open requests. client_us: processor time of this process."""
        rejected = sum(client.num_rejected for client in self._clients)
        own = {"num_rejected": rejected, "num_requests": self._counts["num_steps"]}
        return {**self._counts, **own, "client_us": time.process_time_ns() // 1000}

    def add(self, request: EndpointRequest) -> None:
        as_ids = request.prompt_token_ids and all(client.accepts_ids for client in self._up)
        if request.control_token and not as_ids and not self._config.allow_control_tokens:
            self._finished.append(failed(request, RowError.CONTROL_TOKENS, _control_message(request)))
        else:
            self._rows.append(_SentRow(request, now_us()))

    def step(self) -> list[Completion]:
        """Return the rows that ended within a moment. Raises EnvironmentFailed if no server works."""
        self._loop.run_until_complete(self._turn())
        finished, self._finished = self._finished, []
        return finished

    def stream(self, requests: Iterable[EndpointRequest]) -> Iterator[Completion]:
        """Yield the completions of requests in the order in which they finish."""
        for request in requests:
            self.add(request)
        while self.has_unfinished:
            yield from self.step()

    def close(self) -> None:
        """Close the connections, and end a server that was started."""
        self._up.clear()  # rows of cancelled requests are not sent again
        for task in [*self._tasks, *self._background]:
            task.cancel()
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
        while True:
            reasons = await asyncio.gather(*(self._not_ready(client) for client in self._clients))
            if self._up:
                return
            if self._server is not None and self._server.has_ended:
                raise EnvironmentFailed(f"The server ended while starting. Its last lines:\n{self._server.tail()}")
            if time.monotonic() >= deadline_s:
                raise EnvironmentFailed(
                    f"No server answered within {self._config.start_timeout_s:,.0f} s (server.start_timeout). "
                    f"{'; '.join(filter(None, reasons))}"
                )
            line = self._server.last_line if self._server is not None else ""
            self._log(line or f"waiting for a server: {'; '.join(filter(None, reasons))}")
            await asyncio.sleep(PROBE_S)

    async def _not_ready(self, client: Client) -> str:
        """Probe a server, and use it if it answers. Return why it does not, or an empty text."""
        reason = await self._reason_not_ready(client)
        if not reason and client not in self._up:
            others = {other.answered_model for other in self._clients if other.answered_model}
            if len(others) > 1:
                raise ConfigError(f"server.url: the servers have different models: {', '.join(sorted(others))}")
            self._up.append(client)
        return reason

    async def _reason_not_ready(self, client: Client) -> str:
        try:
            await client.probe()
        except (Disconnected, Overloaded, BadAnswer) as error:
            return f"{client.shown}: {error}"
        return ""

    def _check_resumed(self, client: Client) -> None:
        """Refuse another model than that of earlier runs, and log another version."""
        model, version = self._config.expected_model, self._config.expected_version
        if model is not None and model != client.answered_model:
            raise ConfigError(
                f"server: {client.shown} serves {client.answered_model!r}, and the output was begun with "
                f"{model!r}; start a server with that model, or choose a new output.path"
            )
        if model is not None and version != client.version:
            print(f"the server's version is {client.version!r}, and {version!r} in the run before: texts may differ")

    # -- a step

    async def _turn(self) -> None:
        self._launch()
        await self._look_after_servers()
        if not self._finished:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_finished.wait(), TURN_S)
            await asyncio.sleep(GATHER_S)
        self._has_finished.clear()
        if self._failure is not None:
            raise self._failure

    def _launch(self) -> None:
        """Send waiting rows to the servers with room in their windows, the one with the most room first."""
        now_s = time.monotonic()
        room = {client: client.window.size(now_s) - self._num_sent[client] for client in self._up}
        while self._rows and room and room[client := max(room, key=room.__getitem__)] > 0:
            room[client] -= 1
            self._num_sent[client] += 1
            row = self._rows.popleft()
            task = self._loop.create_task(self._compute(client, row))
            self._tasks[task] = client, row
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: "asyncio.Task[bool]") -> None:
        client, row = self._tasks.pop(task)
        self._num_sent[client] -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        elif task.cancelled() or not task.result():  # cancelled, maybe before its first statement: the server is down
            self._rows.appendleft(row)
        self._launch()

    async def _compute(self, client: Client, row: _SentRow) -> bool:
        """Send a row. Return True if it has ended, False if it must wait again."""
        try:
            done = await client.complete(row.request, row.added_us)
        except AllRejected as error:
            raise EnvironmentFailed(f"{client.shown} rejects all requests: status {error.status}: {error}") from None
        except Overloaded:
            self._loop.call_later(client.window.paused_s(time.monotonic()), self._launch)
            return False
        except Disconnected as error:
            return await self._is_alive(client, str(error)) and await self._has_failed(client, row, error)
        except BadAnswer as error:
            return await self._has_failed(client, row, error)
        self._count(done, client.num_open + 1)
        self._finish(done)
        return True

    async def _has_failed(self, client: Client, row: _SentRow, error: Exception) -> bool:
        """Count a failed try. Return True if it was the last one, False after a pause."""
        row.tries += 1
        if row.tries == MAX_TRIES:
            message = f"{client.shown}: each of {MAX_TRIES} tries failed; the last: {error}"
            self._finish(failed(row.request, RowError.SERVER_ERROR, message))
            return True
        self._counts["num_retries"] += 1
        await asyncio.sleep(RETRY_S * 2 ** (row.tries - 1))
        return False

    def _count(self, done: Completion, num_open: int) -> None:
        counts = self._counts
        counts["num_steps"] += 1
        counts["batch_sum"] += num_open
        counts["prompt_tokens"] += done.num_prompt_tokens
        counts["cached_tokens"] += done.num_cached_tokens
        counts["generated_tokens"] += done.num_generated_tokens
        if done.error is None and done.result is None and any(sample.token_count is None for sample in done.each):
            counts["num_unmetered"] += 1

    def _finish(self, done: Completion) -> None:
        self._finished.append(done)
        self._has_finished.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._has_finished.set()

    # -- servers

    async def _look_after_servers(self) -> None:
        now_s = time.monotonic()
        if self._server is not None and self._server.has_ended:
            raise EnvironmentFailed(f"The server ended. Its last lines:\n{self._server.tail()}")
        for client in list(self._up):
            if client.stalled_s(now_s) > self._config.stall_timeout_s:
                self._down(client, f"no token for {self._config.stall_timeout_s:g} s (run.stall_timeout)")
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            for client in self._clients:
                if client in self._up:
                    self._in_background(client.read_gauges())
                elif now_s - self._probed_s[client] >= REJOIN_S:
                    self._probed_s[client] = now_s
                    self._in_background(self._not_ready(client))

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(asyncio.wait_for(work, PROBE_TIMEOUT_S))
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: "asyncio.Task[object]") -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TimeoutError):
            self._fail(error)

    async def _is_alive(self, client: Client, reason: str) -> bool:
        """Probe a server after a lost connection, once for all requests that were lost together."""
        if client not in self._up:
            return False
        probe = self._probes.get(client)
        if probe is None:
            probe = self._probes[client] = self._loop.create_task(self._last_reason(client))
        problem = await asyncio.shield(probe)
        self._probes.pop(client, None)
        if problem and client in self._up:
            self._down(client, f"{reason}; {problem}")
        return not problem

    async def _last_reason(self, client: Client) -> str:
        problem = ""
        for _ in range(MAX_TRIES):
            problem = await self._reason_not_ready(client)
            if not problem:
                break
            await asyncio.sleep(RETRY_S)
        return problem

    def _down(self, client: Client, reason: str) -> None:
        """Stop using a server, whose rows wait again. Without another one, the engine fails."""
        print(f"{client.shown} is down: {reason}", flush=True)  # to the log; `_log` is for loading only
        self._up.remove(client)
        self._probed_s[client] = time.monotonic()
        if not self._up:
            self._fail(EnvironmentFailed(f"{client.shown}: {reason}"))
        for task, (used, _) in self._tasks.items():
            if used is client:
                task.cancel()


def _control_message(request: EndpointRequest) -> str:
    return (
        f"the text holds {request.control_token!r}, which the server would parse as a control token; remove it from "
        "the data, or set server.allow_control_tokens"
    )
