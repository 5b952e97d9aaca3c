"""Fake OpenAI-compatible server: deterministic answers, a time model, and the failures of real servers.

In a test:     with FakeServer(slots=4, error={"status": 503, "every": 3}) as server: ... server.url
As a program:  python -m tests.endpoint.fake_server --host H --port N --model M --behaviour '{"start_s": 1}'
"""

import argparse
import asyncio
import json
import os
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from aiohttp import web

from tests.endpoint.dialects import DIALECTS, Dialect

PIECE = re.compile(r"\s*\S+|\s+$")  # a token: a word and the space before it
HTML = "<html><body>Welcome to the proxy</body></html>"
CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "weather"}}
MODEL_NAMES = {"empty": "", "absent": None}  # by kind; any other kind is the name
WRONG_COUNTS: dict[str, Any] = {"negative": -1, "text": "many", "too_large": 1_000_000}


@dataclass(kw_only=True)
class Fault:
    """Condition and settings of one misbehaviour, which hits the requests that meet all conditions."""

    match: str = ""  # the prompt contains this text; the counts below include only such requests
    after: int = 0  # not the first `after` requests
    first: int = 1 << 30  # only the first `first` of the remaining ones
    every: int = 1  # each n-th of them
    kind: str = ""  # variant, sentence or name
    status: int = 500  # for `error`, like `body` (default: OpenAI's) and `retry_after` (seconds)
    body: dict[str, Any] | str | None = None
    retry_after: float | None = None
    num_matching: int = field(default=0, init=False)

    def hits(self, prompt: str) -> bool:
        """Count one request; return True if it meets the conditions."""
        self.num_matching += self.match in prompt
        number = self.num_matching - self.after
        return self.match in prompt and 0 < number <= self.first and number % self.every == 0


@dataclass(kw_only=True)
class Behaviour:
    """Settings of a fake server. In `parse`, a fault is `True`, a dict of `Fault`'s fields, or its `kind`."""

    model: str = "fake-model"
    dialect: str = ""  # of DIALECTS, for chats
    other_models: Sequence[str] = ()  # listed next to it
    api_key: str | None = None  # 401 without it, on /v1/ only
    metrics: bool = True  # False: /metrics is a 404
    flags: Sequence[str] = ()  # further flags that the program accepts, each with any number of values
    start_s: float = 0.0  # time until the program listens
    slots: int = 1 << 30  # requests computed at once; the others wait in order of arrival
    seconds_per_request: float = 0.0
    seconds_per_token: float = 0.0  # of one step, which adds a token to each sample of a request
    batch_slowdown: float = 0.0  # a token takes 1 + batch_slowdown * (running requests - 1) times as long
    limit: int = 1 << 30  # 429 for requests beyond this number, waiting ones included
    limit_retry_after: float | None = None  # Retry-After of these 429s, in seconds
    too_long: int = 1 << 30  # 400 for prompts of more words
    too_long_style: str = "openai"  # error body: "openai", "vllm" or "llama.cpp"
    cached_tokens: int = 0  # reported in usage, up to the prompt's length
    refuse_connections: int = 0  # reset the first connections
    error: Fault | None = None  # answer `status` at once
    hang: Fault | None = None  # never answer, and keep the slot until the client disconnects
    die: Fault | None = None  # exit with code 1; in a thread: reset all connections and stop listening
    no_new_connections: Fault | None = None  # stop listening, and answer on the open connections
    truncate: Fault | None = None  # send half a body, or one token of a stream; kind "clean": end the stream well
    fewer_tokens: Fault | None = None  # half of the answer, with finish_reason "length"
    content_filter: Fault | None = None  # half of the answer, with finish_reason "content_filter"
    finish_reason: Fault | None = None  # finish_reason `kind`
    refusal: Fault | None = None  # no content, and the sentence `kind` as the refusal
    tool_calls: Fault | None = None  # no content, and a call with the words of the prompt
    choice_error: Fault | None = None  # half of the answer, and the error `kind` in each choice
    usage: Fault | None = None  # kind "missing", "negative", "text" or "too_large" (above max_tokens)
    html: Fault | None = None  # status 200 with an HTML page
    duplicate: Fault | None = None  # a second choice with index 0
    model_name: Fault | None = None  # the answer's model is `kind`, "empty" or "absent"
    stream_model: Fault | None = None  # the same in streamed answers only

    @classmethod
    def parse(cls, settings: dict[str, Any]) -> "Behaviour":
        parsed = dict(settings)
        for name in {item.name for item in fields(cls) if item.type == Fault | None and settings.get(item.name)}:
            value: Any = {} if settings[name] is True else settings[name]
            parsed[name] = Fault(kind=value) if isinstance(value, str) else Fault(**value)
        return cls(**parsed)

    def active_faults(self, prompt: str) -> dict[str, Fault]:
        """Count one request in all faults, and return by name those that hit it."""
        return {name: item for name, item in vars(self).items() if isinstance(item, Fault) and item.hits(prompt)}


class Sample(NamedTuple):
    index: int
    pieces: list[str]
    finish_reason: str
    field: str = "content"  # of a chat's message: what the pieces are
    error: str = ""


@dataclass
class Ledger:
    """Tokens that the server bills: of each request that it computes, also if its answer is not read."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def add(self, prompt: int, cached: int, generated: int) -> None:
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.generated_tokens += generated

    def usd(self, prices: dict[str, float]) -> float:
        """Return the cost. prices: of 1M tokens."""
        computed = (self.prompt_tokens - self.cached_tokens) * prices["input"]
        return (computed + self.cached_tokens * prices["cached_input"] + self.generated_tokens * prices["output"]) / 1e6


def answer_text(prompt: str, max_tokens: int | None, index: int = 0, seed: int | None = None, **options: Any) -> str:
    """Return the answer: the prompt's words in reverse order, up to `max_tokens`. Options: see `compute_sample`."""
    return "".join(compute_sample(prompt, max_tokens, index, seed, **options).pieces)


def compute_sample(
    prompt: str, max_tokens: int | None, index: int, seed: int | None, stop: Sequence[str] = (), schema: Any = None
) -> Sample:
    """Return a sample's tokens. With a JSON schema, the text is JSON, cut to `max_tokens` as well."""
    words = ([f"sample-{seed}-{index}"] if index or seed is not None else []) + prompt.split()[::-1]
    pieces = PIECE.findall(" ".join(words) if schema is None else json.dumps(json_value(schema, words)))
    text = "".join(pieces[:max_tokens])
    if ends := [text.find(item) for item in stop if item in text]:
        return Sample(index, PIECE.findall(text[: min(ends)]), "stop")
    return Sample(index, pieces[:max_tokens], "length" if pieces[:max_tokens] != pieces else "stop")


def json_value(schema: dict[str, Any], words: list[str]) -> Any:
    """Return a value that fits a simple schema: types, properties, items, enum."""
    if "enum" in schema:
        return schema["enum"][len(words) % len(schema["enum"])]
    if "properties" in schema:
        return {name: json_value(item, words) for name, item in schema["properties"].items()}
    scalars = {"integer": len(words), "number": len(words) / 2, "boolean": True, "null": None, "object": {}}
    values = {"array": [json_value(schema["items"], words)] if "items" in schema else [], **scalars}
    return values.get(schema.get("type", "string"), " ".join(words[:3]))


def embedding_vector(text: str, dimensions: int = 8) -> list[float]:
    return [zlib.crc32(text.encode(), index) % 256 / 128 - 1 for index in range(dimensions)]


def ranked_tokens(piece: str, num_top: int, as_ids: bool) -> list[tuple[str, float]]:
    """Return the token and its `num_top` - 1 alternatives, with their log-probabilities, best first."""
    word, texts = piece.strip(), [piece, *(f" other{rank}" for rank in range(1, num_top))]
    token_id = int(word) if word.isdecimal() else zlib.crc32(word.encode()) % 50_000
    names = [f"token_id:{token_id + rank}" for rank in range(len(texts))] if as_ids else texts
    return [(name, -(token_id % 97 + 1) / 100 - rank) for rank, name in enumerate(names)]


def messages_text(messages: list[dict[str, Any]]) -> str:
    """Return the prompt of a chat: the texts of all messages, joined by newlines."""
    contents = [message.get("content") or "" for message in messages]
    return "\n".join(item if isinstance(item, str) else "".join(p.get("text", "") for p in item) for item in contents)


class Received(NamedTuple):
    """POST request, with what its answer contains."""

    number: int  # from 1, in order of arrival
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    time_s: float  # of time.monotonic()

    @property
    def is_chat(self) -> bool:
        return "messages" in self.body

    @property
    def max_tokens(self) -> int | None:
        default = 16 if "prompt" in self.body else None
        return self.body.get("max_completion_tokens") or self.body.get("max_tokens") or default

    def prompts(self) -> list[str]:
        """Return the text of a chat; a completion or embedding may have a list of texts or token ids, too."""
        if self.is_chat:
            return [messages_text(self.body["messages"])]
        value: Any = self.body.get("prompt", self.body.get("input"))
        values = value if isinstance(value, list) and not isinstance(value[0], int) else [value]
        return [item if isinstance(item, str) else " ".join(map(str, item)) for item in values]

    def num_images(self) -> int:
        contents = [message.get("content") for message in self.body.get("messages", ())]
        return sum(part["type"] == "image_url" for item in contents if isinstance(item, list) for part in item)

    def schema(self) -> dict[str, Any] | None:
        requested = self.body.get("response_format") or {}
        any_object = {"properties": {"answer": {}}} if requested.get("type") == "json_object" else None
        return requested.get("json_schema", {}).get("schema", any_object)

    def samples(self, faults: dict[str, Fault]) -> list[Sample]:
        """Return the samples of each prompt in turn, as changed by the faults."""
        stop = self.body.get("stop") or []
        pairs = [(prompt, index) for prompt in self.prompts() for index in range(self.body.get("n") or 1)]
        options = (self.body.get("seed"), [stop] if isinstance(stop, str) else stop, self.schema())
        samples = [compute_sample(prompt, self.max_tokens, index, *options) for prompt, index in pairs]
        samples = [item._replace(index=index) for index, item in enumerate(samples)]
        for name, reason in ("fewer_tokens", "length"), ("content_filter", "content_filter"):
            if name in faults:
                samples = [Sample(item.index, item.pieces[: len(item.pieces) // 2], reason) for item in samples]
        if "finish_reason" in faults:
            samples = [item._replace(finish_reason=faults["finish_reason"].kind) for item in samples]
        if "refusal" in faults:
            sentence = PIECE.findall(faults["refusal"].kind)
            samples = [item._replace(pieces=sentence, field="refusal", finish_reason="stop") for item in samples]
        if "tool_calls" in faults:
            samples = [item._replace(field="tool_calls", finish_reason="tool_calls") for item in samples]
        if "choice_error" in faults:
            samples = [
                Sample(item.index, item.pieces[: len(item.pieces) // 2], "error", error=faults["choice_error"].kind)
                for item in samples
            ]
        return samples + samples[:1] if "duplicate" in faults else samples

    def choice(self, sample: Sample, tokens: slice, reason: str | None, key: str = "message") -> dict[str, Any]:
        """Return a choice with some of a sample's tokens. The key of a chat's chunks is "delta"."""
        content: dict[str, Any] = {"text": "".join(sample.pieces[tokens])}
        if self.is_chat:
            role = {} if tokens.start else {"role": "assistant"}
            content = {key: {**role, "content": None, "refusal": None, **self.message(sample, tokens, key)}}
        logprobs = self.logprobs(sample.pieces, tokens)
        error = {"error": {"code": 502, "message": sample.error}} if sample.error and reason else {}
        return {"index": sample.index, **content, "logprobs": logprobs, "finish_reason": reason, **error}

    def message(self, sample: Sample, tokens: slice, key: str) -> dict[str, Any]:
        """Return the fields of a message with some of a sample's tokens."""
        text = "".join(sample.pieces[tokens])
        if sample.field != "tool_calls":
            return {sample.field: text}
        if key == "message":
            return {"tool_calls": [{**CALL, "function": {**CALL["function"], "arguments": text}}]}
        if not text:
            return {}
        if tokens.start:
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        return {"tool_calls": [{"index": 0, **CALL, "function": {**CALL["function"], "arguments": text}}]}

    def logprobs(self, pieces: list[str], tokens: slice) -> dict[str, Any] | None:
        num_top = self.body.get("logprobs")
        if num_top is None or num_top is False or not pieces[tokens]:
            return None
        num_top = (self.body.get("top_logprobs") or 0) if num_top is True else num_top
        as_ids = self.body.get("return_tokens_as_token_ids", False)
        rows = [ranked_tokens(piece, num_top, as_ids) for piece in pieces[tokens]]
        if self.is_chat:
            items = [[{"token": t, "logprob": value, "bytes": list(t.encode())} for t, value in row] for row in rows]
            return {"content": [{**row[0], "top_logprobs": row[:num_top]} for row in items], "refusal": None}
        values = {"tokens": [row[0][0] for row in rows], "token_logprobs": [row[0][1] for row in rows]}
        offsets = [len("".join(pieces[:count])) for count in range(len(pieces))][tokens]
        return {**values, "top_logprobs": [dict(row) for row in rows] if num_top else None, "text_offset": offsets}

    def whole(self, samples: list[Sample], faults: dict[str, Fault], behaviour: Behaviour) -> dict[str, Any]:
        """Return the body of the answer."""
        prompts, num_tokens = self.prompts(), sum(len(item.pieces) for item in samples)
        num_words, kind = sum(len(item.split()) for item in prompts), faults["usage"].kind if "usage" in faults else ""
        usage: dict[str, Any] = {"prompt_tokens": num_words, "total_tokens": num_words + num_tokens}
        names = ("model_name", *(["stream_model"] if self.body.get("stream") else []))
        kinds = [faults[name].kind for name in names if name in faults]
        model = MODEL_NAMES.get(kinds[-1], kinds[-1]) if kinds else behaviour.model
        if "input" in self.body:
            vectors = [embedding_vector(item, self.body.get("dimensions", 8)) for item in prompts]
            data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
            answer: dict[str, Any] = {"object": "list", "data": data, "model": model}
        else:
            usage["completion_tokens"] = WRONG_COUNTS.get(kind, num_tokens)
            usage["prompt_tokens_details"] = {"cached_tokens": min(behaviour.cached_tokens, num_words)}
            prefix, name = ("chatcmpl", "chat.completion") if self.is_chat else ("cmpl", "text_completion")
            answer = {"id": f"{prefix}-{self.number}", "object": name, "created": int(time.time()), "model": model}
            answer["choices"] = [self.choice(item, slice(None), item.finish_reason) for item in samples]
        if model is None:
            del answer["model"]
        return answer if kind == "missing" else {**answer, "usage": usage}


class Gauge:
    """Number of requests inside a `with` block now, and its maximum."""

    now = max = 0

    def __enter__(self) -> None:
        self.now += 1
        self.max = max(self.max, self.now)

    def __exit__(self, *error: object) -> None:
        self.now -= 1


class ResettingProtocol(asyncio.Protocol):
    """Protocol that resets a new connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        reset(transport)


def reset(transport: Any) -> None:
    """Close a connection such that the client sees ECONNRESET."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def error_response(
    status: int, message: str, retry_after: float | None = None, body: dict[str, Any] | str | None = None, **fields: Any
) -> web.Response:
    """Return OpenAI's error body, or the given one."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None, **fields}
    body = {"error": error} if body is None else body
    text, headers = body if isinstance(body, str) else json.dumps(body), {}
    if retry_after is not None:
        headers["Retry-After"] = f"{retry_after:g}"
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")


def too_long_response(style: str, num_words: int, limit: int, max_tokens: int) -> web.Response:
    if style == "llama.cpp":
        text = f"request ({num_words} tokens) exceeds the available context size ({limit} tokens), try increasing it"
        error = {"code": 400, "message": text, "type": "exceed_context_size_error"}
        return error_response(400, text, body={"error": {**error, "n_prompt_tokens": num_words, "n_ctx": limit}})
    start = f"This model's maximum context length is {limit} tokens. However, "
    if style == "openai":
        text = f"{start}your messages resulted in {num_words} tokens. Please reduce the length of the messages."
        return error_response(400, text, param="messages", code="context_length_exceeded")
    seen = max(1, limit - max_tokens + 1)  # vLLM stops counting there
    text = (
        f"{start}you requested {max_tokens} output tokens and your prompt contains at least {seen} input tokens, for a "
        f"total of at least {seen + max_tokens} tokens. Please reduce the length of the input prompt or the number of "
        f"requested output tokens. (parameter=input_tokens, value={seen})"
    )
    return error_response(400, text, type="BadRequestError", param="input_tokens", code=400)


def cut(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Close the connection before the end of the response."""
    if request.transport is not None:
        request.transport.close()
    return response


class FakeServer:
    """Server in a thread of the test's process (a context manager), or in the current event loop (`serve`)."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, is_program: bool = False, **behaviour: Any):
        self.behaviour = Behaviour.parse(behaviour)
        self._socket = socket.create_server((host, port), backlog=4096)
        self.host, self.port, self.is_program = host, self._socket.getsockname()[1], is_program
        self.requests: list[Received] = []  # POST requests in order of arrival, refused ones included
        self.num_answered = self.num_images = self.num_connections = self.num_generated = 0
        self.accepted, self.running = Gauge(), Gauge()  # the difference is waiting
        self.ledger = Ledger()
        self.dialect = DIALECTS.get(self.behaviour.dialect, Dialect())
        self._slots = asyncio.Semaphore(self.behaviour.slots)
        self._ready = threading.Event()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> "FakeServer":
        self._thread = threading.Thread(target=asyncio.run, args=(self.serve(),), daemon=True)
        self._thread.start()
        self._ready.wait(timeout=60)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def kill(self) -> None:
        """Reset all connections and stop listening. A new server may use the port afterwards."""
        asyncio.run_coroutine_threadsafe(self._die(), self._loop).result()

    async def serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        for path in ("/health", "/version", "/metrics", "/{prefix:.*}models"):
            app.router.add_get(path, self._get)
        for path in ("chat/completions", "completions", "embeddings"):
            app.router.add_post("/{prefix:(.*/)?}" + path, self._post)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self._http: Any = runner.server
        self._listener = await self._loop.create_server(self._accept, sock=self._socket, backlog=4096)
        self._ready.set()
        await self._stop.wait()
        await self._die()
        await runner.cleanup()

    def _accept(self) -> asyncio.BaseProtocol:
        self.num_connections += 1
        return ResettingProtocol() if self.num_connections <= self.behaviour.refuse_connections else self._http()

    async def _die(self) -> None:
        self._listener.close()
        await asyncio.sleep(0.01)  # some connections are accepted, but have no transport yet
        for connection in self._http.connections:
            if connection.transport is not None:
                reset(connection.transport)

    async def _get(self, request: web.Request) -> web.Response:
        model = self.behaviour.model
        if request.path == "/metrics" and self.behaviour.metrics:
            return web.Response(text=self._metrics())
        if request.path.endswith("models") and self.dialect.models is not None:
            names = (model, *self.behaviour.other_models)
            data = [{"id": name, "object": "model", "created": 0, "owned_by": "fake"} for name in names]
            refusal = self._unauthorized(request)
            listed = self.dialect.models({"object": "list", "data": data})
            return web.json_response(listed) if refusal is None else refusal
        if request.path == "/version":
            return web.json_response({"version": "0.33.0"})
        return web.Response(status=200 if request.path == "/health" else 404)

    def _metrics(self) -> str:
        labels = f'{{engine="0",model_name="{self.behaviour.model}"}}'
        metrics = [
            ("vllm:num_requests_running", "gauge", self.running.now),
            ("vllm:num_requests_waiting", "gauge", self.accepted.now - self.running.now),
            ("vllm:generation_tokens_total", "counter", self.num_generated),
        ]
        return "".join(f"# TYPE {name} {kind}\n{name}{labels} {value}.0\n" for name, kind, value in metrics)

    def _unauthorized(self, request: web.Request) -> web.Response | None:
        if any(request.headers.get(name) != text for name, text in self.dialect.headers.items()):
            return error_response(401, "Access denied due to invalid subscription key.", code="401")
        if self.behaviour.api_key in (None, request.headers.get("Authorization", "").removeprefix("Bearer ")):
            return None
        return error_response(401, "Incorrect API key provided.", code="invalid_api_key")

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body, number = await request.json(), len(self.requests) + 1
        received = Received(number, request.path, body, dict(request.headers), time.monotonic())
        self.requests.append(received)
        self.num_images += received.num_images()
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        if not request.path.startswith((self.dialect.base or "/v1").partition("/chat")[0]):
            return error_response(404, f"no route {request.path_qs}")
        for name in self.dialect.refused:
            if name in body:
                status, answer = self.dialect.refusal(name)
                return error_response(status, "", body=answer)
        for name in self.dialect.ignored:
            body.pop(name, None)
        if self.accepted.now >= self.behaviour.limit:
            text, retry_after = "Rate limit reached for requests", self.behaviour.limit_retry_after
            return error_response(429, text, retry_after, type="requests", code="rate_limit_exceeded")
        prompts, limit = received.prompts(), self.behaviour.too_long
        num_words = max(len(prompt.split()) for prompt in prompts)
        if num_words > limit and self.behaviour.dialect:
            return self._too_long(num_words, limit)
        if num_words > limit:
            return too_long_response(self.behaviour.too_long_style, num_words, limit, received.max_tokens or 0)
        faults = self.behaviour.active_faults("\n".join(prompts))
        if "die" in faults:
            if self.is_program:
                os._exit(1)
            await self._die()
            return web.Response()
        if "no_new_connections" in faults:
            self._listener.close()
        if "error" in faults:
            fault, text = faults["error"], "The server had an error while processing your request."
            if isinstance(fault.body, dict) and (billed := fault.body.get("usage")):
                self.ledger.add(billed["prompt_tokens"], 0, billed["completion_tokens"])
            return error_response(fault.status, text, fault.retry_after, fault.body, type="server_error")
        samples = [] if "input" in body else received.samples(faults)
        if self.dialect.reason != "stop":
            ended = {"stop": self.dialect.reason}
            samples = [one._replace(finish_reason=ended.get(one.finish_reason, one.finish_reason)) for one in samples]
        num_words, num_tokens = sum(len(prompt.split()) for prompt in prompts), sum(len(s.pieces) for s in samples)
        if "usage" in faults and faults["usage"].kind == "too_large":
            num_tokens = WRONG_COUNTS["too_large"]
        self.ledger.add(num_words, min(self.behaviour.cached_tokens, num_words) if samples else 0, num_tokens)
        with self.accepted:
            async with self._slots:
                with self.running:
                    return await self._answer(request, received, samples, faults)

    def _too_long(self, num_words: int, limit: int) -> web.Response:
        assert self.dialect.too_long is not None
        return error_response(self.dialect.too_long[0], "", body=self.dialect.too_long_body(num_words, limit))

    async def _answer(
        self, request: web.Request, received: Received, samples: list[Sample], faults: dict[str, Fault]
    ) -> web.StreamResponse:
        """Compute the answer in the current slot, and send it."""
        if "hang" in faults:
            await asyncio.Event().wait()
        whole, truncate = received.whole(samples, faults, self.behaviour), faults.get("truncate")
        if received.body.get("stream") and "html" not in faults:
            return await self._stream(request, received, whole, samples, truncate)
        async for _ in self._steps(samples):
            pass
        if "html" in faults:
            return web.Response(text=HTML, content_type="text/html")
        payload = json.dumps(self.dialect.whole(whole) if samples else whole).encode()
        if truncate is not None:
            headers = {"Content-Type": "application/json", "Content-Length": str(len(payload))}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            await response.write(payload[: len(payload) // 2])
            return cut(request, response)
        self.num_answered += 1
        return web.Response(body=payload, status=self.dialect.status, content_type="application/json")

    async def _stream(
        self, request: web.Request, received: Received, whole: Any, samples: list[Sample], truncate: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": self.dialect.content_type})
        await response.prepare(request)
        if self.dialect.first:
            await response.write(self.dialect.first)
        with_usage = (received.body.get("stream_options") or {}).get("include_usage")
        usage = whole.pop("usage", None)
        header = {**whole, "object": "chat.completion.chunk" if received.is_chat else "text_completion"}

        async def send(*choices: Any, usage: Any = None) -> None:
            chunk = {**header, "choices": choices, **({"usage": usage} if with_usage else {})}
            await response.write(b"".join(self.dialect.events(chunk)))

        async for step in self._steps(samples):
            if truncate is not None and step == 1:
                break
            for item in samples:
                if step < len(item.pieces):
                    await send(received.choice(item, slice(step, step + 1), None, key="delta"))
        if truncate is not None:
            return response if truncate.kind == "clean" else cut(request, response)
        for item in samples:
            await send(received.choice(item, slice(len(item.pieces), None), item.finish_reason, key="delta"))
        if with_usage and usage is not None:
            await send(usage=usage)
        if self.dialect.last:
            await response.write(self.dialect.last)
        self.num_answered += 1
        return response

    async def _steps(self, samples: list[Sample]) -> AsyncIterator[int]:
        """Yield each step's number at the time at which its tokens exist."""
        due = self._loop.time() + self.behaviour.seconds_per_request
        for step in range(max((len(item.pieces) for item in samples), default=0)):
            due += self.behaviour.seconds_per_token * (1 + self.behaviour.batch_slowdown * (self.running.now - 1))
            if due - self._loop.time() > 0.02:  # sleep once for several fast tokens
                await asyncio.sleep(due - self._loop.time())
            self.num_generated += sum(step < len(item.pieces) for item in samples)
            yield step
        await asyncio.sleep(max(0.0, due - self._loop.time()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="fake_server", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="fake-model")
    parser.add_argument("--behaviour", type=json.loads, default={}, help="JSON object of Behaviour's fields")
    known, _ = parser.parse_known_args()
    for flag in known.behaviour.get("flags", ()):
        parser.add_argument(flag, nargs="*")
    args = parser.parse_args()
    begin, start_s = time.monotonic(), args.behaviour.get("start_s", 0)
    while (elapsed := time.monotonic() - begin) < start_s:
        print(f"Loading {args.model}: {elapsed:.1f} of {start_s} s", flush=True)
        time.sleep(min(0.2, start_s - elapsed))
    server = FakeServer(host=args.host, port=args.port, is_program=True, model=args.model, **args.behaviour)
    print(f"Listening on {server.url}", flush=True)
    asyncio.run(server.serve())


if __name__ == "__main__":
    main()
