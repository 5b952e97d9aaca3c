"""HTTP to one server: its first answer, requests, and gauges."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp

from pipeline.endpoint.answer import completion_of
from pipeline.endpoint.body import MAX_SEED, NEUTRAL, probe_body
from pipeline.endpoint.connection import lost_because, open_session, proxy_of, speaks_tls
from pipeline.endpoint.errors import OVERLOADED, BadAnswer, OtherModel, Overloaded, Rejected, Reply, Unsupported
from pipeline.endpoint.meter import Bill, Meter, Reservation, usage_of
from pipeline.endpoint.spec import PATHS, EndpointConfig, EndpointRequest, base_url
from pipeline.endpoint.stream import StreamedAnswer
from pipeline.endpoint.window import Window
from pipeline.engine.completion import Completion
from pipeline.engine.samples import with_samples
from pipeline.errors import ConfigError, EnvironmentFailed, PipelineError
from pipeline.machine.host import now_us
from pipeline.stores.redaction import redacted, shown_url

PROBE_TIMEOUT_S = 60.0
REDIRECTS = (301, 302, 307, 308)
MAX_REDIRECTS = 5
# Names by vLLM, SGLang and llama.cpp
_RUNNING = r"vllm:num_requests_running|sglang:num_running_reqs|llamacpp:requests_processing"
_WAITING = r"vllm:num_requests_waiting|sglang:num_queue_reqs|llamacpp:requests_deferred"
_TOKENS = r"vllm:generation_tokens_total|sglang:generation_tokens_total|llamacpp:tokens_predicted_total"
_LASTING = (
    aiohttp.ClientConnectorCertificateError,
    aiohttp.ClientConnectorDNSError,
    aiohttp.ClientConnectorSSLError,
    aiohttp.ClientProxyConnectionError,
    aiohttp.ClientResponseError,  # no HTTP, or a proxy that refuses
    aiohttp.InvalidURL,
)
_GAUGES = tuple(re.compile(rf"^(?:{names})(?:\{{.*\}})? (\S+)", re.M) for names in (_RUNNING, _WAITING, _TOKENS))


class Disconnected(Exception):
    """The connection was refused, reset, or cut off in an answer. is_lasting: no later one is likely to work, as with
    an unknown host or a wrong certificate."""

    def __init__(self, reason: str, is_lasting: bool = False) -> None:
        super().__init__(reason)
        self.is_lasting = is_lasting


class NotSent(Disconnected):
    """There was no connection to send the request."""


class _FirstRefused(Exception):
    """The server refuses the form of the first request."""


@dataclass(frozen=True)
class _Form:
    """Form of all requests: what a server may refuse, and rows can do without."""

    streams: bool = False
    counts_streams: bool = True  # with stream_options
    splits_samples: bool = False  # into requests of one


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
        self._config, self._meter, self._names = config, meter, names
        self._use(url)
        self._proxy = proxy_of(url)
        self.model = config.requested_model or ""
        self.version = ""
        self.accepts_ids = False
        self._defaults: Mapping[str, Any] = {}  # fields of each request that does not have them
        self.num_open = self.num_rejected = 0
        self.window = Window(config.max_concurrency, time.monotonic())
        self.progress_s = time.monotonic()  # when a token was last generated, or the server had nothing to do
        self._tokens: float | None = None  # generated in all, by the server's own count
        self._form = _Form()
        self._has_form = False
        self.refusal = ""  # why the server pauses, and until when
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        key = {"Authorization": f"Bearer {self._config.api_key}"} if self._config.api_key else {}
        self._session = open_session({**key, **self._config.headers})

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
            first = self._first_request()
            await self._find_form(first)
            if config.route != "embedding":
                await self._find_accepted(first)
            self.version = await self._find_version()
        self.progress_s = time.monotonic()

    async def repeat_probe(self) -> None:
        """Get one token, after the server rejected a row. Raises what `probe` raises."""
        async with self._probing():
            await self._answer_to(self._first_request())

    def rejects_all(self, rejected: Rejected) -> PipelineError:
        """Return the error for a rejection of all requests, with the key of the job file that may be wrong."""
        status = rejected.status
        reason = f"{self.shown} rejects all requests: status {status}: {rejected}"
        if rejected.is_unpaid:
            return EnvironmentFailed(reason)
        key = "api_key" if status in (401, 403) else "model" if self._config.serve else "url"
        return ConfigError(f"server.{key}: {reason}")

    @contextlib.asynccontextmanager
    async def _probing(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                yield
        except TimeoutError:
            raise Disconnected(f"no answer in {PROBE_TIMEOUT_S:.0f} s") from None
        except Disconnected as error:
            if not isinstance(error, NotSent) and self._base.startswith("http://") and await speaks_tls(self._base):
                raise Disconnected(f"{error}; the server expects https://", is_lasting=True) from None
            raise
        except (Unsupported, _FirstRefused) as error:
            raise ConfigError(f"server: {self.shown}: the first request failed: {error}{self._remedy(error)}") from None
        except Rejected as error:
            raise self.rejects_all(error) from None

    def reservation(self, request: EndpointRequest) -> Reservation:
        """Return the most that a request is expected to cost."""
        return self._meter.reserve(self._body(request), request.params.max_tokens)

    async def complete(
        self, request: EndpointRequest, added_us: int, bill: Bill, finished: dict[int, tuple[Completion, int]]
    ) -> Completion:
        """Return the completion of a request, and settle its bill. finished: samples that earlier tries computed one by
        one, with the time of their first token. Raises Disconnected, Overloaded, BadAnswer, Rejected, OtherModel."""
        sent_s = time.monotonic()
        if self.num_open == 0:
            self.progress_s = sent_s
        self.num_open += 1
        try:
            if self._form.splits_samples and request.params.n > 1:
                done, first_us = await self._exchange_samples(request, bill, finished)
            else:
                done, first_us = await self._exchange(request, bill)
            now_s = self.progress_s = time.monotonic()
            self.window.answered(now_s, done.num_prompt_tokens + done.num_generated_tokens, self.num_open)
            times = {"queued_us": added_us, "first_token_us": first_us, "last_token_us": now_us()}
            return replace(done, **times, samples=tuple(replace(sample, **times) for sample in done.samples))
        except Overloaded as rejected:
            self.num_rejected += 1
            now_s = time.monotonic()
            self.window.overloaded(now_s, sent_s, rejected.wait_s, self.num_open)
            until = time.strftime("%H:%M:%S", time.gmtime(time.time() + self.window.paused_s(now_s)))
            self.refusal = f"{self.shown} pauses until {until} UTC: {rejected}"
            raise
        finally:
            self.num_open -= 1

    async def read_gauges(self) -> None:
        """Read /metrics, where it exists, for the window and for progress."""
        try:
            status, _, raw = await self._get(f"{self._root}/metrics")
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
        if self._form.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True} if self._form.counts_streams else None}
        body |= self._config.extra_body
        if not body.get("stream"):
            body.pop("stream_options", None)
        return {name: value for name, value in body.items() if value is not None}

    def _use(self, url: str) -> None:
        self._base, self._query = base_url(url)
        self.shown = shown_url(self._base)
        parts = urlsplit(self._base)
        self._root = f"{parts.scheme}://{parts.netloc}"

    def _first_request(self) -> EndpointRequest:
        params = replace(self._config.params, max_tokens=1, min_tokens=0)
        return EndpointRequest(None, probe_body(self._config.route, params, self._config.dimensions), params)

    async def _find_form(self, first: EndpointRequest) -> None:
        """Send the first request as rows are sent. Leave out what the server refuses and rows can do without. Later
        probes keep the form, in which rows are sent meanwhile."""
        if self._has_form:
            return await self._answer_to(first)
        # Without the server's own count of tokens, the pieces of answers show progress.
        streams = self._tokens is None and self._config.route != "embedding"
        forms = [_Form(True), _Form(True, False), _Form()] if streams else [_Form()]
        if first.params.n > 1:
            forms += [replace(form, splits_samples=True) for form in forms]
        refused: Exception | None = None
        for self._form in forms:
            if isinstance(refused, Unsupported) and not self._form.splits_samples:
                continue  # n was ignored, not refused
            try:
                await self._answer_to(first)
            except (_FirstRefused, Unsupported) as error:
                refused = refused or error
                continue
            self._has_form = True
            if refused is not None:
                left_out = ["stream"] if streams and not self._form.streams else []
                left_out += ["stream_options"] if self._form.streams and not self._form.counts_streams else []
                left_out += ["n"] if self._form.splits_samples else []
                print(f"{self.shown} refuses {' and '.join(left_out)}, so rows are sent without: {refused}", flush=True)
            return
        self._form = forms[0]
        assert refused is not None
        raise refused

    def _remedy(self, refused: Exception) -> str:
        """Return how to leave out the fields of a request that the message of its refusal names."""
        sent, text = self._body(self._first_request()), str(refused)
        names = [name for name in sent if name not in ("model", "messages", "prompt", "input")]
        named = {name: "null" for name in names if re.search(rf"\b{re.escape(name)}\b", text)}
        if "max_tokens" in named and "max_completion_tokens" in text:
            named["max_completion_tokens"] = str(self._config.params.max_tokens)
        fields = ", ".join(f"{name}: {value}" for name, value in named.items())
        return f". To send requests without: server.extra_body: {{{fields}}}" if named else ""

    async def _answer_to(self, request: EndpointRequest) -> None:
        """Send a request that is no row, and check its answer. Raises _FirstRefused if it is an error."""
        if self._form.splits_samples:
            request = _single(request, 0)
        done, _ = await self._exchange(request, self._meter.open(self.reservation(request)))
        if done.error is not None:
            raise _FirstRefused(done.error_message)

    async def _exchange_samples(
        self, request: EndpointRequest, bill: Bill, finished: dict[int, tuple[Completion, int]]
    ) -> tuple[Completion, int]:
        """Send a request for each sample that is not finished, to a server that computes one at a time."""
        missing = [index for index in range(request.params.n) if index not in finished]
        bills = bill.split(len(missing))
        each = [self._exchange(_single(request, index), part) for index, part in zip(missing, bills, strict=True)]
        ended = await asyncio.gather(*each, return_exceptions=True)  # answers that arrive are read, since they are paid
        for index, one in zip(missing, ended, strict=True):
            if not isinstance(one, BaseException):
                finished[index] = one
        if error := next((one for one in ended if isinstance(one, BaseException)), None):
            raise error
        samples = [finished[index][0] for index in range(request.params.n)]
        failed = next((one for one in samples if one.error is not None), None)
        return failed or with_samples(samples), min(first_us for _, first_us in finished.values())

    async def _exchange(self, request: EndpointRequest, bill: Bill) -> tuple[Completion, int]:
        """Send a request. Return its completion, and when its first token came. Its tokens are counted before the
        answer is judged. Messages that quote the server do not show the key."""
        try:
            reply, first_us = await self._post(self._body(request))
        except NotSent:
            bill.void()
            raise
        except BaseException as error:  # also if it is cancelled
            bill.lose(str(error) or "given up")
            raise
        if (usage := usage_of(reply.value, self._config.route == "embedding")) is not None:
            bill.pay(usage)
        elif reply.is_success:
            bill.lose("the answer has no usage")
        else:
            bill.void()
        try:
            if reply.is_success:
                self._names.check(reply.value, self.shown)
            done = completion_of(reply, request, self._config.has_tools)
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
        except (_FirstRefused, BadAnswer):
            return False
        return True

    async def _only_model(self) -> str:
        reply = Reply.parse(*await self._get(f"{self._base}/models{self._query}"))
        status, message = reply.status, self._redacted(reply.message)
        if status in (401, 403, 404):
            raise Rejected(status, message)
        try:
            listed = reply.value["data"] if isinstance(reply.value, dict) else reply.value
            names = [str(model["id"]) for model in listed]  # type: ignore[union-attr]
        except (KeyError, TypeError):
            if status in OVERLOADED:
                raise Overloaded(f"{self.shown}/models: status {status}: {message}") from None
            raise BadAnswer(f"{self.shown}/models: status {status}: {message}") from None
        if len(names) != 1:
            found = ", ".join(names[:20]) or "none"
            raise ConfigError(f"server.model: required, since {self.shown} has {len(names)} models: {found}")
        return names[0]

    async def _find_version(self) -> str:
        """Return the server's version; empty if it shows none."""
        for path in ("/version", "/get_server_info", "/props"):
            try:
                status, _, raw = await self._get(f"{self._root}{path}")
                found = json.loads(raw) if status == 200 else None
            except (ValueError, Disconnected):
                continue
            if isinstance(found, dict) and (version := found.get("version") or found.get("build_info")):
                return str(version)[:100]
        return ""

    async def _post(self, body: Mapping[str, Any]) -> tuple[Reply, int]:
        """Return an answer, and when its first token came."""
        for _ in range(MAX_REDIRECTS):
            url = self._base + PATHS[self._config.route] + self._query
            limit = asyncio.timeout(self._config.request_timeout_s)
            try:
                async with limit:
                    found = await self._post_to(url, body, limit)
            except BadAnswer as error:
                raise BadAnswer(self._redacted(error)) from None
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                if limit.expired():
                    raise Disconnected(
                        f"no answer within {self._config.request_timeout_s:g} s (server.request_timeout), or no next "
                        f"piece of it within {self._config.stall_timeout_s:g} s (run.stall_timeout)"
                    ) from None
                raise self._lost(error) from None
            reply = found[0]
            if reply.status not in REDIRECTS or "Location" not in reply.headers:
                return found
            target = urljoin(url, reply.headers["Location"])
            if urlsplit(target).hostname != urlsplit(url).hostname:  # it would receive the key
                raise Rejected(reply.status, f"it redirects to {shown_url(target)}")
            self._use(target)
        raise Rejected(reply.status, f"it redirects more than {MAX_REDIRECTS} times")

    async def _post_to(self, url: str, body: Mapping[str, Any], limit: asyncio.Timeout) -> tuple[Reply, int]:
        """Return the answer of a url, and when its first token came. limit: is extended by each piece of a stream."""
        assert self._session is not None
        async with self._session.post(url, json=body, proxy=self._proxy, allow_redirects=False) as response:
            status, headers, answer = response.status, response.headers, StreamedAnswer()
            is_stream = body.get("stream") and status == 200
            if not is_stream or "event-stream" not in response.content_type:
                raw = await response.read()
                if is_stream and raw.lstrip().startswith((b"data:", b"event:", b":")):  # as another type
                    for line in raw.splitlines():
                        answer.add(line)
                    return Reply(status, headers, answer.answer()), now_us()
                return Reply.parse(status, headers, raw), now_us()
            first_us, loop = 0, asyncio.get_running_loop()
            async for line in response.content:
                if answer.add(line):
                    first_us, self.progress_s = first_us or now_us(), time.monotonic()
                    limit.reschedule(loop.time() + self._config.stall_timeout_s)
                if answer.has_failed:
                    break
            return Reply(status, headers, answer.answer()), first_us or now_us()

    async def _get(self, url: str) -> tuple[int, Mapping[str, str], bytes]:
        assert self._session is not None
        try:
            async with self._session.get(url, proxy=self._proxy) as response:
                return response.status, response.headers, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> Disconnected:
        """Return the reason why a request has no answer."""
        was_sent = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        return (Disconnected if was_sent else NotSent)(self._redacted(lost_because(error)), isinstance(error, _LASTING))

    def _redacted(self, text: object) -> str:
        return redacted(str(text), self._config.secrets)


def _single(request: EndpointRequest, index: int) -> EndpointRequest:
    """Return the request for one of a row's samples, each with a seed of its own."""
    body = {name: value for name, value in request.body.items() if name != "n"}
    if "seed" in body:
        body["seed"] = (body["seed"] + index) % MAX_SEED
    return replace(request, body=body, params=replace(request.params, n=1))


def _sum(values: list[str]) -> float | None:
    """Return the sum of a metric over its labels; None if the server has no such metric."""
    return sum(map(float, values)) if values else None
