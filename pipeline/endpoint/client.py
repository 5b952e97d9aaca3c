"""HTTP to one server: its first answer, requests, and gauges."""

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pipeline.endpoint.answer import (
    AllRejected,
    BadAnswer,
    Overloaded,
    StreamedAnswer,
    Unsupported,
    completion_of,
    message_of,
)
from pipeline.endpoint.body import NEUTRAL, probe_body
from pipeline.endpoint.spec import PATHS, EndpointConfig, EndpointRequest, base_url
from pipeline.endpoint.window import Window
from pipeline.engine.params import Completion, SamplingParams
from pipeline.errors import ConfigError, EnvironmentFailed
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


class Client:
    """Client of one server. All methods run in one event loop."""

    def __init__(self, url: str, config: EndpointConfig) -> None:
        self._base, self._config = base_url(url), config
        self.shown = shown_url(self._base)
        parts = urlsplit(self._base)
        self._root = f"{parts.scheme}://{parts.netloc}"
        self._secrets = frozenset({config.api_key} if config.api_key else ())
        self.model = config.requested_model or ""
        self.answered_model = self.version = ""
        self.accepts_ids = False
        self._defaults: Mapping[str, Any] = {}  # fields of each request that does not have them
        self.num_open = self.num_rejected = 0
        self.window = Window(config.max_concurrency, time.monotonic())
        self.progress_s = time.monotonic()  # when a token was last generated, or the server had nothing to do
        self._tokens: float | None = None  # generated in all, by the server's own count
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
        """Get one token, and what the server says about itself. Raises Disconnected, Overloaded or BadAnswer if it is
        not ready, ConfigError if it rejects the request."""
        config, params = self._config, SamplingParams(max_tokens=1, logprobs=self._config.logprobs)
        body = probe_body(config.route, params, config.dimensions)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                if not self.model:
                    self.model = await self._only_model()
                answered = await self._answer_to(EndpointRequest(None, body, params))
                if config.route != "embedding":
                    await self._find_accepted(body, params)
                if self.answered_model:  # it was down
                    self._check_model(answered)
                self.answered_model = answered
                self.version = await self._find_version()
                await self.read_gauges()
        except TimeoutError:
            raise Disconnected(f"no answer in {PROBE_TIMEOUT_S:.0f} s") from None
        except Unsupported as error:
            raise ConfigError(f"server: {self.shown}: the first request failed: {error}") from None
        except AllRejected as refused:
            key = "api_key" if refused.status in (401, 402, 403) else "model" if config.serve else "url"
            reason = f"{self.shown}: status {refused.status}: {self._redacted(refused)}"
            raise ConfigError(f"server.{key}: {reason}") from None
        self.progress_s = time.monotonic()

    async def complete(self, request: EndpointRequest, added_us: int) -> Completion:
        """Return the completion of a request. Raises Disconnected, Overloaded, BadAnswer, AllRejected."""
        sent_s, streams = time.monotonic(), self._tokens is None and self._config.route != "embedding"
        if self.num_open == 0:
            self.progress_s = sent_s
        self.num_open += 1
        try:
            status, headers, raw, first_us = await self._post(self._body(request, streams), streams)
            done = self._completion_of(status, headers, raw, request)
            if status == 200:
                self._check_model(str(json.loads(raw).get("model") or ""))
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

    def _body(self, request: EndpointRequest, streams: bool) -> dict[str, Any]:
        body = {"model": self.model, **self._defaults, **request.body}
        if self.accepts_ids and request.prompt_token_ids:
            body["prompt"] = list(request.prompt_token_ids)
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= self._config.extra_body
        return {name: value for name, value in body.items() if value is not None}

    async def _answer_to(self, request: EndpointRequest) -> str:
        """Send a request and check its answer. Return the name of the model in the answer."""
        status, headers, raw, _ = await self._post(self._body(request, False), False)
        done = self._completion_of(status, headers, raw, request)
        if done.error is not None:
            raise ConfigError(f"server: {self.shown}: the first request failed: {done.error_message}")
        return str(json.loads(raw).get("model") or "")

    def _completion_of(
        self, status: int, headers: Mapping[str, str], raw: bytes, request: EndpointRequest
    ) -> Completion:
        """Return the completion of an answer. Messages that quote the server do not show the key."""
        try:
            done = completion_of(status, headers, raw, request)
        except (Overloaded, BadAnswer, AllRejected) as error:
            error.args = (self._redacted(error),)
            raise
        return replace(done, error_message=done.error_message and self._redacted(done.error_message))

    async def _find_accepted(self, body: Mapping[str, Any], params: SamplingParams) -> None:
        """Find out whether the server accepts NEUTRAL and prompts as tokens: both in one request if it does."""
        as_ids = {**body, "prompt": [1]} if self._config.route == "completion" else body
        accepts_both = await self._accepts({**NEUTRAL, **as_ids}, params)
        accepts_neutral = accepts_both or (as_ids is not body and await self._accepts({**NEUTRAL, **body}, params))
        self.accepts_ids = as_ids is not body and (accepts_both or await self._accepts(as_ids, params))
        self._defaults = NEUTRAL if accepts_neutral else {}
        if not accepts_neutral:
            print(f"{self.shown} rejects {', '.join(NEUTRAL)}: its own defaults apply")

    async def _accepts(self, body: Mapping[str, Any], params: SamplingParams) -> bool:
        try:
            await self._answer_to(EndpointRequest(None, body, params))
        except (ConfigError, BadAnswer):
            return False
        return True

    def _check_model(self, found: str) -> None:
        if found != self.answered_model:
            raise EnvironmentFailed(
                f"{self.shown} answers as model {found!r}, and answered as {self.answered_model!r} before; one output "
                "must not mix two models. Start the server with the first model again, or use a new output.path"
            )

    async def _only_model(self) -> str:
        status, raw = await self._get(f"{self._base}/models")
        if status in (401, 403, 404):
            raise AllRejected(status, message_of(raw))
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

    async def _post(self, body: Mapping[str, Any], streams: bool) -> tuple[int, Mapping[str, str], bytes, int]:
        """Return status, headers and body of an answer, and when its first token came."""
        assert self._session is not None
        try:
            async with self._session.post(self._base + PATHS[self._config.route], json=body) as response:
                if not streams or response.status != 200 or "event-stream" not in response.content_type:
                    raw = await response.read()
                    return response.status, response.headers, raw, now_us()
                answer, first_us = StreamedAnswer(), 0
                async for line in response.content:
                    if answer.add(line):
                        first_us, self.progress_s = first_us or now_us(), time.monotonic()
                return response.status, response.headers, answer.raw(), first_us or now_us()
        except BadAnswer as error:
            raise BadAnswer(self._redacted(error)) from None
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


def _sum(values: list[str]) -> float | None:
    """Return the sum of a metric over its labels; None if the server has no such metric."""
    return sum(map(float, values)) if values else None
