"""Forms in which servers differ from OpenAI's, after their documentation. Each dialect is a set of small functions."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
TOO_LONG = "This model's maximum context length is {limit} tokens, however you requested {words} tokens."


def _event(chunk: Json) -> Iterator[bytes]:
    yield f"data: {json.dumps(chunk)}\n\n".encode()


def _unchanged(answer: Json) -> Json:
    return answer


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """refused: fields of a request that it refuses, with `refusal`. ignored: fields that it ignores. too_long: status
    and body for a prompt of too many words. base: the path and query of its url. config: the job's settings for it.
    has_usage: it counts tokens also as rows are sent."""

    base: str = "/v1"
    query: str = ""
    config: Json = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)  # required
    refused: tuple[str, ...] = ()
    refusal: Callable[[str], tuple[int, Any]] = lambda name: (400, {"error": {"message": f"{name} is not supported"}})
    ignored: tuple[str, ...] = ()
    too_long: tuple[int, Any] | None = (400, {"error": {"message": TOO_LONG, "code": "context_length_exceeded"}})
    reason: str = "stop"
    status: int = 200
    whole: Callable[[Json], Json] = _unchanged
    events: Callable[[Json], Iterator[bytes]] = _event
    first: bytes = b""  # of a stream
    last: bytes = b"data: [DONE]\n\n"
    content_type: str = "text/event-stream"
    models: Callable[[Json], Any] | None = _unchanged  # None: 404
    has_usage: bool = True

    def too_long_body(self, words: int, limit: int) -> str:
        assert self.too_long is not None
        text = json.dumps(self.too_long[1])
        return text.replace("{words}", str(words)).replace("{limit}", str(limit))


def _each_choice(answer: Json, change: Callable[[Json], Json]) -> Json:
    return {**answer, "choices": [change(choice) for choice in answer["choices"]]}


def _tgi(chunk: Json) -> Iterator[bytes]:
    yield f"data:{json.dumps(chunk)}\n\n".encode()


def _litellm(chunk: Json) -> Iterator[bytes]:
    choices = chunk["choices"] or [{"index": 0, "delta": {}, "finish_reason": None}]
    return _event({**chunk, "choices": choices, "citations": None})


def _openrouter(chunk: Json) -> Iterator[bytes]:
    """It repeats the role in each chunk, and the end in that of the usage."""
    yield b": OPENROUTER PROCESSING\n\n"
    if chunk.get("usage"):
        end = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
        chunk = {**chunk, "choices": [{**end, "native_finish_reason": "STOP"}]}
    yield from _event({**chunk, "provider": "P"})


def _gemini(chunk: Json) -> Iterator[bytes]:
    """Its chunks have no index."""
    return _event(_each_choice(chunk, lambda one: {name: value for name, value in one.items() if name != "index"}))


def _mistral(chunk: Json) -> Iterator[bytes]:
    """Its texts are lists of parts."""

    def parts(choice: Json) -> Json:
        text = choice["delta"].get("content")
        return {**choice, "delta": {"content": [{"type": "text", "text": text}]}} if text else choice

    return _event(_each_choice(chunk, parts))


def _deepseek(chunk: Json) -> Iterator[bytes]:
    yield b": keep-alive\n\n\n"
    yield from _event(_each_choice(chunk, lambda one: {**one, "delta": {**one["delta"], "reasoning_content": None}}))


def _together(chunk: Json) -> Iterator[bytes]:
    """Its events span several lines, and texts are there twice."""
    text = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else ""
    for line in json.dumps(_each_choice(chunk, lambda one: {**one, "text": text}), indent=1).splitlines():
        yield f"data: {line}\r\n".encode()
    yield b"\r\n"


def _bare(choice: Json) -> Json:
    return {"message": {"role": "assistant", "content": choice["message"]["content"]}, "finish_reason": None}


def _extra_forbidden(name: str) -> tuple[int, Any]:
    problem = {"type": "extra_forbidden", "loc": ["body", name], "msg": "Extra inputs are not permitted"}
    return 422, {"detail": [{**problem, "input": {"include_usage": True}}]}


_FILTERS = {"choices": [], "model": "", "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": {}}]}
_UNKNOWN = "Unrecognized request argument supplied: {}"
DIALECTS = {
    "sglang": Dialect(
        too_long=(400, {"object": "error", "type": "BadRequestError", "code": 400,
                        "message": "The input ({words} tokens) is longer than the model's context length "
                                   "({limit} tokens)."}),
        whole=lambda answer: _each_choice(answer, lambda one: {**one, "matched_stop": 151645}),
    ),
    "tgi": Dialect(
        ignored=("n",),
        reason="eos_token",
        events=_tgi,
        last=b"",
        too_long=(422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= {limit}. "
                                 "Given: {words} `inputs` tokens and 8 `max_new_tokens`", "error_type": "validation"}),
    ),
    "llama.cpp": Dialect(
        too_long=(400, {"error": {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 20,
                                  "message": "request ({words} tokens) exceeds the available context size "
                                             "({limit} tokens)"}}),
        whole=lambda answer: {**answer, "timings": {"prompt_n": 4}},
    ),
    "litellm": Dialect(
        events=_litellm,
        too_long=(400, {"error": {"message": "litellm.BadRequestError: litellm.ContextWindowExceededError: {words}",
                                  "type": None, "param": None, "code": "400"}}),
    ),
    "openrouter": Dialect(
        base="/api/v1",
        events=_openrouter,
        too_long=(400, {"error": {"code": 400, "message": "This endpoint's maximum context length is {limit} tokens. "
                                  "However, you requested about {words} tokens (of text input)."}}),
    ),
    "azure": Dialect(
        base="/openai/deployments/large/chat/completions",
        query="?api-version=2024-02-01",
        config={"headers": {"api-key": "secret-of-azure"}, "requested_model": "large"},
        headers={"api-key": "secret-of-azure"},
        models=None,
        refused=("stream_options", "top_k"),
        refusal=lambda name: (400, {"error": {"message": _UNKNOWN.format(name), "type": "invalid_request_error",
                                              "param": None, "code": None}}),
        first=next(_event(_FILTERS)),
        has_usage=False,
    ),
    "gemini": Dialect(
        base="/v1beta/openai",
        events=_gemini,
        too_long=(400, [{"error": {"code": 400, "status": "INVALID_ARGUMENT", "message": "The input token count "
                                   "({words}) exceeds the maximum number of tokens allowed ({limit})."}}]),
    ),
    "anthropic": Dialect(
        ignored=("n", "seed"),
        reason="end_turn",
        too_long=(400, {"type": "error", "error": {"type": "invalid_request_error",
                                                   "message": "prompt is too long: {words} tokens > {limit} maximum"}}),
    ),
    "mistral": Dialect(
        refused=("top_k", "min_p"),
        refusal=_extra_forbidden,
        events=_mistral,
        too_long=(400, {"object": "error", "type": "invalid_request_error", "code": 3051,
                        "message": "Prompt contains {words} tokens and 0 draft tokens, too large for model with "
                                   "{limit} maximum context length"}),
    ),
    "deepseek": Dialect(base="", events=_deepseek),
    "together": Dialect(
        reason="eos", events=_together, content_type="text/plain", models=lambda listed: listed["data"]
    ),
    "ollama": Dialect(ignored=("n",), too_long=None),
    "gateway": Dialect(
        refused=("stream", "stream_options"),
        refusal=lambda name: (400, {"error": f"{name}: streaming is not supported"}),
        status=201,
        whole=lambda answer: _each_choice(answer, _bare),
        too_long=(500, {"detail": "too many tokens"}),
    ),
}  # fmt: skip
