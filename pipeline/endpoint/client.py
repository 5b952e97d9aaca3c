"""HTTP to one server: its first answer, requests, and gauges."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pipeline.endpoint.answer import (
    BadAnswer,
    OtherModel,
    Overloaded,
    Rejected,
    StreamedAnswer,
    Unsupported,
    completion_of,
    message_of,
)
from pipeline.endpoint.body import NEUTRAL, probe_body
from pipeline.endpoint.meter import Bill, Meter, Reservation, usage_of
from pipeline.endpoint.spec import PATHS, EndpointConfig, EndpointRequest, base_url
from pipeline.endpoint.window import Window
from pipeline.engine.params import Completion, SamplingParams
from pipeline.errors import ConfigError
from pipeline.machine.host import now_us
from pipeline.stores.redaction import redacted, shown_url

PROBE_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 30.0
# Names by vLLM, SGLang and llama.cpp
_RUNNING = r"vllm:num_requests_running|sglang:num_running_reqs|llamacpp:requests_processing"
_WAITING = r"vllm:num_requests_waiting|sglang:num_queue_reqs|llamacpp:requests_deferred"
_TOKENS = r"vllm:generation_tokens_total|sglang:generation_tokens_total|llamacpp:tokens_predicted_total"
_GAUGES = tuple(re.compile(rf"^(?:{names})(?:\{{.*\}})? (\S+)", re.M) for names in (_RUNNING, _WAITING, _TOKENS))


class Disconnected(Exception):
    """The connection was refused, reset, or cut off in an answer."""


class NotSent(Disconnected):
    """There was no connection to send the request."""


class ModelNames:
    """Names of the model in answers, shared by all servers: the first one, that of the run which this one continues,
    and others that the job accepts."""

    def __init__(self, config: EndpointConfig) -> None:
        self.first = ""
        self._expected, self._accepted = config.expected_model, {*config.accept_models, config.expected_model}

    def check(self, answer: object, shown: str) -> None:
        """Check the name in an answer of the server `shown`, if it has one. Raises OtherModel."""
        name = str(answer.get("model") or "") if isinstance(answer, dict) else ""
        if not self.first and (self._expected is None or name in self._accepted):
            self.first = name
        if not name or name == self.first or name in self._accepted:
            return
        before = f"the first answer was of {self.first!r}"
        if self._expected is not None:
            before = f"the output was begun with {self._expected!r}"
        raise OtherModel(
            f"{shown} serves {name!r}, and {before}; one output must not mix two models. Use the same model again, or "
            f"choose a new output.path. If both are names of one model, list {name!r} in server.accept_models"
        )


class Client:
    """Client of one server. All methods run in one event loop."""

    def __init__(self, url: str, config: EndpointConfig, meter: Meter, names: ModelNames) -> None:
        self._base, self._config, self._meter, self._names = base_url(url), config, meter, names
        self.shown = shown_url(self._base)
        parts = urlsplit(self._base)
        self._root = f"{parts.scheme}://{parts.netloc}"
        self._secrets = frozenset({config.api_key} if config.api_key else ())
        self.model = config.requested_model or ""
        self.version = ""
        self.accepts_ids = False
        self._defaults: Mapping[str, Any] = {}  # fields of each request that does not have them
        self.num_open = self.num_rejected = 0
        self.window = Window(config.max_concurrency, time.monotonic())
        self.progress_s = time.monotonic()  # when a token was last generated, or the server had nothing to do
        self._tokens: float | None = None  # generated in all, by the server's own count
        self._streams = False  # without that count, the pieces of answers show progress
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        key = self._config.api_key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def probe(self) -> None:
        """Get one token as rows do, and what the server says about itself. Raises Disconnected, Overloaded or BadAnswer
        if it is not ready, ConfigError if it rejects the request, OtherModel."""
        config = self._config
        async with self._probing():
            if not self.model:
                self.model = await self._only_model()
            await self.read_gauges()
            self._streams = self._tokens is None and config.route != "embedding"
            first = self._first_request()
            await self._answer_to(first)
            if config.route != "embedding":
                await self._find_accepted(first)
            self.version = await self._find_version()
        self.progress_s = time.monotonic()

    async def repeat_probe(self) -> None:
        """Get one token, after the server rejected a row. Raises what `probe` raises."""
        async with self._probing():
            await self._answer_to(self._first_request())

    def rejects_all(self, rejected: Rejected) -> ConfigError:
        """Return the error for a rejection of all requests, with the key of the job file that may be wrong."""
        status = rejected.status
        key = "api_key" if status in (401, 402, 403) else "model" if self._config.serve else "url"
        return ConfigError(f"server.{key}: {self.shown} rejects all requests: status {status}: {rejected}")

    @contextlib.asynccontextmanager
    async def _probing(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                yield
        except TimeoutError:
            raise Disconnected(f"no answer in {PROBE_TIMEOUT_S:.0f} s") from None
        except Unsupported as error:
            raise ConfigError(f"server: {self.shown}: the first request failed: {error}") from None
        except Rejected as error:
            raise self.rejects_all(error) from None

    def reservation(self, request: EndpointRequest) -> Reservation:
        """Return the most that a request is expected to cost."""
        return self._meter.reserve(self._body(request), request.params.max_tokens)

    async def complete(self, request: EndpointRequest, added_us: int, bill: Bill) -> Completion:
        """Return the completion of a request, and settle its bill. Raises Disconnected, Overloaded, BadAnswer,
        Rejected, OtherModel."""
        sent_s = time.monotonic()
        if self.num_open == 0:
            self.progress_s = sent_s
        self.num_open += 1
        try:
            done, first_us = await self._exchange(request, bill)
            now_s = self.progress_s = time.monotonic()
            self.window.answered(now_s, done.num_prompt_tokens + done.num_generated_tokens, self.num_open)
            times = {"queued_us": added_us, "first_token_us": first_us, "last_token_us": now_us()}
            return replace(done, **times, samples=tuple(replace(sample, **times) for sample in done.samples))
        except Overloaded as rejected:
            self.num_rejected += 1
            self.window.overloaded(time.monotonic(), sent_s, rejected.wait_s, self.num_open)
            raise
        finally:
            self.num_open -= 1

    async def read_gauges(self) -> None:
        """Read /metrics, where it exists, for the window and for progress."""
        try:
            status, raw = await self._get(f"{self._root}/metrics")
        except Disconnected:
            return
        if status != 200:
            return
        text = raw.decode(errors="replace")
        running, waiting, tokens = (_sum(pattern.findall(text)) for pattern in _GAUGES)
        if tokens is not None:
            if tokens != self._tokens:
                self.progress_s = time.monotonic()
            self._tokens = tokens
        if running is not None and waiting is not None and self.num_open:
            self.window.add_gauges(running, waiting, self.num_open)

    def stalled_s(self, now_s: float) -> float:
        """Return for how long no token was generated while requests were open."""
        return now_s - self.progress_s if self.num_open else 0.0

    def _body(self, request: EndpointRequest) -> dict[str, Any]:
        body = {"model": self.model, **self._defaults, **request.body}
        if self.accepts_ids and request.prompt_token_ids:
            body["prompt"] = list(request.prompt_token_ids)
        if self._streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= self._config.extra_body
        return {name: value for name, value in body.items() if value is not None}

    def _first_request(self) -> EndpointRequest:
        params = SamplingParams(max_tokens=1, logprobs=self._config.logprobs)
        return EndpointRequest(None, probe_body(self._config.route, params, self._config.dimensions), params)

    async def _answer_to(self, request: EndpointRequest) -> None:
        """Send a request that is no row, and check its answer."""
        done, _ = await self._exchange(request, self._meter.open(self.reservation(request)))
        if done.error is not None:
            raise ConfigError(f"server: {self.shown}: the first request failed: {done.error_message}")

    async def _exchange(self, request: EndpointRequest, bill: Bill) -> tuple[Completion, int]:
        """Send a request. Return its completion, and when its first token came. Its tokens are counted before the
        answer is judged. Messages that quote the server do not show the key."""
        try:
            status, headers, raw, first_us = await self._post(self._body(request))
        except NotSent:
            bill.void()
            raise
        except BaseException as error:  # also if it is cancelled
            bill.lose(str(error) or "given up")
            raise
        answer = _parsed(raw)
        if (usage := usage_of(answer, self._config.route == "embedding")) is not None:
            bill.pay(usage)
        elif status == 200:
            bill.lose("the answer has no usage")
        else:
            bill.void()
        try:
            if status == 200:
                self._names.check(answer, self.shown)
            done = completion_of(status, headers, raw, request, self._config.has_tools)
        except (Overloaded, BadAnswer, Rejected, OtherModel) as error:
            error.args = (self._redacted(error),)
            raise
        return replace(done, error_message=done.error_message and self._redacted(done.error_message)), first_us

    async def _find_accepted(self, first: EndpointRequest) -> None:
        """Find out whether the server accepts NEUTRAL and prompts as tokens: both in one request if it does."""
        body = first.body
        as_ids = {**body, "prompt": [1]} if self._config.route == "completion" else body
        accepts_both = await self._accepts(first, {**NEUTRAL, **as_ids})
        accepts_neutral = accepts_both or (as_ids is not body and await self._accepts(first, {**NEUTRAL, **body}))
        self.accepts_ids = as_ids is not body and (accepts_both or await self._accepts(first, as_ids))
        self._defaults = NEUTRAL if accepts_neutral else {}
        if not accepts_neutral:
            print(f"{self.shown} rejects {', '.join(NEUTRAL)}: its own defaults apply")

    async def _accepts(self, first: EndpointRequest, body: Mapping[str, Any]) -> bool:
        try:
            await self._answer_to(replace(first, body=body))
        except (ConfigError, BadAnswer):
            return False
        return True

    async def _only_model(self) -> str:
        status, raw = await self._get(f"{self._base}/models")
        if status in (401, 403, 404):
            raise Rejected(status, self._redacted(message_of(raw)))
        try:
            names = [str(model["id"]) for model in json.loads(raw)["data"]]
        except (ValueError, KeyError, TypeError):
            raise BadAnswer(self._redacted(f"{self.shown}/models: status {status}: {message_of(raw)}")) from None
        if len(names) != 1:
            found = ", ".join(names[:20]) or "none"
            raise ConfigError(f"server.model: required, since {self.shown} has {len(names)} models: {found}")
        return names[0]

    async def _find_version(self) -> str:
        """Return the server's version; empty if it shows none."""
        for path in ("/version", "/get_server_info", "/props"):
            try:
                status, raw = await self._get(f"{self._root}{path}")
                found = json.loads(raw) if status == 200 else None
            except (ValueError, Disconnected):
                continue
            if isinstance(found, dict) and (version := found.get("version") or found.get("build_info")):
                return str(version)[:100]
        return ""

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes, int]:
        """Return status, headers and body of an answer, and when its first token came."""
        assert self._session is not None
        try:
            async with self._session.post(self._base + PATHS[self._config.route], json=body) as response:
                if not body.get("stream") or response.status != 200 or "event-stream" not in response.content_type:
                    raw = await response.read()
                    return response.status, response.headers, raw, now_us()
                answer, first_us = StreamedAnswer(), 0
                async for line in response.content:
                    if answer.add(line):
                        first_us, self.progress_s = first_us or now_us(), time.monotonic()
                    if answer.has_failed:
                        break
                return response.status, response.headers, answer.raw(), first_us or now_us()
        except BadAnswer as error:
            raise BadAnswer(self._redacted(error)) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotSent(self._redacted(f"{type(error).__name__}: {error}")) from None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Disconnected(self._redacted(f"{type(error).__name__}: {error}")) from None

    async def _get(self, url: str) -> tuple[int, bytes]:
        assert self._session is not None
        try:
            async with self._session.get(url) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Disconnected(self._redacted(f"{type(error).__name__}: {error}")) from None

    def _redacted(self, text: object) -> str:
        return redacted(str(text), self._secrets)


def _parsed(raw: bytes) -> object:
    """Return the value of a body; None if it is not JSON."""
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _sum(values: list[str]) -> float | None:
    """Return the sum of a metric over its labels; None if the server has no such metric."""
    return sum(map(float, values)) if values else None
