"""Answers of a server as completions, or as the reason why there is none."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from pipeline.endpoint.meter import Usage, count_of, usage_of
from pipeline.endpoint.spec import EndpointRequest
from pipeline.engine.params import Completion, FinishReason, SamplingParams
from pipeline.engine.samples import with_samples
from pipeline.engine.tasks import TokenLogprobs, VectorResult
from pipeline.errors import RowError

MAX_MESSAGE = 500
_REASONS: dict[object, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "tool_calls": "stop",
    "length": "length",
    "max_tokens": "length",
    "repetition": "length_loop",
}
_TOO_LONG = re.compile(
    r"context_length|context length|context window|context size|maximum model length|max_model_len|too many tokens"
    r"|longer than the maximum|exceeds? the (available |maximum )?context"
    r"|max_tokens must be at least 1, got 0",  # vLLM: the prompt fills the context
    re.I,
)
_UNCONSTRAINED = "the text does not conform to sampling.structured_outputs; the server may not support it"
_FILTERED = re.compile(r"content_filter|content management policy|content policy|safety system", re.I)


class OtherModel(Exception):
    """The answer is that of another model."""


class Overloaded(Exception):
    """The server accepts no request now. wait_s: the time that it asks to wait, if any."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class BadAnswer(Exception):
    """The answer is an error of the server, or cannot be used. The request may be sent again."""


class Unsupported(BadAnswer):
    """The server ignores an option of the request. The next answer would be the same."""


class Rejected(Exception):
    """The server rejects this request, or all requests: the key, the model or the route may be wrong."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def completion_of(
    status: int, headers: Mapping[str, str], raw: bytes, request: EndpointRequest, has_tools: bool = False
) -> Completion:
    """Return the completion of an answer; an error completion if the server rejects this request. Its times are left
    at 0. has_tools: the model may call tools. Raises Overloaded, BadAnswer, Rejected."""
    if status != 200:
        return _rejected(status, headers, raw, request)
    try:
        answer = json.loads(raw)
    except ValueError:
        raise BadAnswer(f"the answer is not JSON: {_text(raw)}") from None
    if not isinstance(answer, dict):
        raise BadAnswer(f"the answer is not a JSON object: {_text(raw)}")
    if answer.get("error"):
        raise BadAnswer(f"the answer is an error with status 200: {message_of(raw)}")
    try:
        return _embedding(answer, request) if "input" in request.body else _completion(answer, request, has_tools)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise BadAnswer(f"the answer has an unexpected form ({type(error).__name__}: {error}): {_text(raw)}") from None


def message_of(raw: bytes) -> str:
    """Return the message of an error's body, on one line."""
    try:
        found = json.loads(raw)
    except ValueError:
        return _text(raw)
    while isinstance(found, dict):
        found = next((found[key] for key in ("error", "message", "detail", "code") if found.get(key)), str(found))
    return _text(str(found).encode())


def _text(raw: bytes) -> str:
    """Return the beginning of a body on one line."""
    return " ".join(raw[: 4 * MAX_MESSAGE].decode(errors="replace").split())[:MAX_MESSAGE] or "(empty)"


def _rejected(status: int, headers: Mapping[str, str], raw: bytes, request: EndpointRequest) -> Completion:
    message = message_of(raw)
    if status in (408, 425, 429, 503, 529):
        raise Overloaded(f"status {status}: {message}", _wait_s(headers))
    if status in (401, 402, 403, 404, 405):
        raise Rejected(status, message)
    if status not in (400, 413, 422):
        raise BadAnswer(f"status {status}: {message}")
    code = RowError.INVALID_REQUEST
    if status == 413 or _TOO_LONG.search(_text(raw)):
        code = RowError.PROMPT_TOO_LONG
    elif _FILTERED.search(_text(raw)):
        code = RowError.CONTENT_FILTER
    return failed(request, code, f"the server rejects the request (status {status}): {message}")


def failed(request: EndpointRequest, code: RowError, message: str) -> Completion:
    """Return an error completion."""
    count = len(request.prompt_token_ids)
    return Completion(request.row_id, [], "", "error", count, error=code.value, error_message=message)


def _wait_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header; None for a date, which few servers send."""
    try:
        seconds = float(headers.get("Retry-After", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _completion(answer: dict[str, Any], request: EndpointRequest, has_tools: bool) -> Completion:
    params, choices = request.params, sorted(answer["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(params.n)):
        numbers = [choice["index"] for choice in choices]
        raise BadAnswer(f"the answer has choices {numbers}; expected {params.n} with different indices from 0")
    for choice in choices:
        if choice.get("error"):
            raise BadAnswer(f"choice {choice['index']} of the answer failed: {message_of(json.dumps(choice).encode())}")
    if any(choice.get("finish_reason") == "content_filter" for choice in choices):
        return failed(request, RowError.CONTENT_FILTER, "the server's content filter ended the answer")
    if refusal := next(filter(None, map(_refusal, choices)), ""):
        return failed(request, RowError.REFUSED, refusal)
    samples = [_sample(choice, request, has_tools) for choice in choices]
    if any(_is_unconstrained(sample, request.params) for sample in samples):
        return failed(request, RowError.GRAMMAR_ERROR, _UNCONSTRAINED)
    return with_usage(samples, answer, request)


def _refusal(choice: dict[str, Any]) -> str:
    """Return the sentence with which the model refuses to answer; empty if it answers."""
    message = choice.get("message") or {}
    return "" if message.get("content") or not message.get("refusal") else _text(str(message["refusal"]).encode())


def _is_unconstrained(sample: Completion, params: SamplingParams) -> bool:
    """Return whether a finished text breaks its choice or regular expression. A server that does not know
    `structured_outputs` ignores it (llama.cpp). JSON is checked with all other rows; a grammar cannot be."""
    wanted = params.structured_outputs
    if wanted is None or sample.finish_reason != "stop" or params.stop or sample.tool_calls is not None:
        return False
    if wanted.kind == "choice":
        return sample.text.strip() not in (option.strip() for option in json.loads(wanted.text))
    if wanted.kind != "regex":
        return False
    try:
        return re.fullmatch(wanted.text, sample.text) is None
    except re.error:  # another dialect
        return False


def _sample(choice: dict[str, Any], request: EndpointRequest, has_tools: bool) -> Completion:
    reason = _REASONS.get(choice["finish_reason"])
    if reason is None:
        raise BadAnswer(f"the answer ended with finish_reason {choice['finish_reason']!r}")
    message = choice.get("message")
    text = choice["text"] if message is None else message.get("content") or ""
    calls = None if message is None else message.get("tool_calls") or None
    if calls and not has_tools:
        raise BadAnswer("the answer calls a tool, and server.extra_body has no tools")
    reasoning = None
    if message is not None and request.params.reasoning is not None:
        reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(text, str) or not isinstance(reasoning, str | None):
        raise BadAnswer("the answer's text is not a string")
    text, reasoning = _valid(text), reasoning and _valid(reasoning)
    if request.params.reasoning is not None:
        markers = request.params.reasoning
        if reasoning is None and not isinstance(markers, str) and markers.end in text:
            reasoning, _, text = text.partition(markers.end)
            reasoning = reasoning.removeprefix(markers.start).strip()
        text = text.lstrip()
    if request.params.logprobs is not None and not choice.get("logprobs"):
        raise Unsupported("the answer has no log-probabilities")
    logprobs = None if request.params.logprobs is None else _logprobs(choice["logprobs"])
    ids = [] if logprobs is None else [token.token_id for token in logprobs]
    return Completion(
        request.row_id,
        ids,
        text,
        reason,
        len(request.prompt_token_ids),
        logprobs=logprobs,
        reasoning=reasoning or None,
        tool_calls=calls and _valid(json.dumps([_call(call) for call in calls], ensure_ascii=False)),
    )


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a tool without its index, which only streams need."""
    return {key: value for key, value in call.items() if key != "index"}


def _valid(text: str) -> str:
    """Return text that has an encoding: JSON can hold half of a character, and pieces of a stream its two halves."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _logprobs(given: dict[str, Any]) -> list[TokenLogprobs]:
    """Return the log-probabilities of a choice; its tokens must be named by their ids."""
    if "content" in given:
        return [
            TokenLogprobs(
                _id_of(token),
                token["logprob"],
                tuple((_id_of(one), one["logprob"]) for one in token.get("top_logprobs") or ()),
            )
            for token in given["content"]
        ]
    tops = given.get("top_logprobs") or [None] * len(given["tokens"])
    return [
        TokenLogprobs(_token_id(token), logprob, tuple((_token_id(name), p) for name, p in (top or {}).items()))
        for token, logprob, top in zip(given["tokens"], given["token_logprobs"], tops, strict=True)
    ]


def _id_of(token: dict[str, Any]) -> int:
    """Return a token's id, which llama.cpp adds to its text."""
    return int(token["id"]) if "id" in token else _token_id(token["token"])


def _token_id(name: str) -> int:
    prefix, _, number = name.partition(":")
    if prefix != "token_id":
        raise Unsupported(
            f"log-probabilities name the token {name!r:.40} by its text; expected ids, as from vLLM and llama.cpp"
        )
    return int(number)


def with_usage(samples: Sequence[Completion], answer: object, request: EndpointRequest) -> Completion:
    """Return one completion of the samples, with the token counts of the answer's usage. If it is missing or no count,
    only tokens that are known otherwise are counted."""
    found = usage_of(answer, is_embedding=False)
    usage = found or Usage(len(request.prompt_token_ids), 0, sum(len(sample.token_ids) for sample in samples))
    lengths = [sum(map(len, (one.text, one.reasoning or "", one.tool_calls or ""))) for one in samples]
    has_ids = all(sample.token_ids for sample in samples)
    counts = [len(one.token_ids) for one in samples] if has_ids else _split(usage.generated_tokens, lengths)
    thoughts = count_of(answer, "usage", "completion_tokens_details", "reasoning_tokens") or 0
    thought = _split(thoughts, [len(sample.reasoning or "") for sample in samples])
    counted = [
        replace(
            sample,
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=usage.cached_tokens if index == 0 else usage.prompt_tokens,
            token_count=None if found is None else count,
            num_reasoning_tokens=num_thought if sample.reasoning else 0,
        )
        for index, (sample, count, num_thought) in enumerate(zip(samples, counts, thought, strict=True))
    ]
    return with_samples(counted) if len(counted) > 1 else counted[0]


def _split(total: int, weights: Sequence[int]) -> list[int]:
    """Split a count in proportion to the weights, exactly: a server reports one sum for all samples."""
    bounds = np.cumsum([0, *weights]) if sum(weights) else np.arange(len(weights) + 1)
    ends = [total * int(bound) // max(1, int(bounds[-1])) for bound in bounds]
    return [end - begin for begin, end in pairwise(ends)]


def _embedding(answer: dict[str, Any], request: EndpointRequest) -> Completion:
    (one,) = answer["data"]
    vector, length = np.array(one["embedding"], dtype=np.float32), request.body["dimensions"]
    if vector.shape != (length,) or not np.isfinite(vector).all():
        raise Unsupported(f"the vector has shape {vector.shape}; expected {length} finite numbers (task.dimensions)")
    usage = usage_of(answer, is_embedding=True)
    count = len(request.prompt_token_ids) if usage is None else usage.prompt_tokens
    return Completion(request.row_id, [], "", "stop", count, result=VectorResult(vector))


class StreamedAnswer:
    """An answer that arrives in pieces, assembled to the form of one that arrives at once."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}
        self._answer: dict[str, Any] = {}
        self._is_complete = False

    @property
    def has_failed(self) -> bool:
        """True if the server reported an error in a piece; nothing useful follows it."""
        return "error" in self._answer

    def add(self, line: bytes) -> int:
        """Add a line of server-sent events. Return the number of pieces of text in it. Raises BadAnswer."""
        if not line.startswith(b"data:"):
            return 0
        data = line[5:].strip()
        if data == b"[DONE]":
            self._is_complete = True
            return 0
        try:
            piece = json.loads(data)
        except ValueError:
            raise BadAnswer(f"a piece of the answer is not JSON: {_text(data)}") from None
        try:
            return self._add_piece(piece)
        except (TypeError, AttributeError) as error:
            raise BadAnswer(f"a piece of the answer has an unexpected form ({error}): {_text(data)}") from None

    def _add_piece(self, piece: dict[str, Any]) -> int:
        self._answer |= {key: piece[key] for key in ("model", "usage", "error") if piece.get(key)}
        choices = piece.get("choices") or []
        for choice in choices:
            self._add_choice(choice)
        return len(choices)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        index, delta = choice.get("index", 0), choice.get("delta")
        whole = self._choices.setdefault(index, {"index": index, "finish_reason": None})
        if choice.get("finish_reason"):
            if whole["finish_reason"] is not None:
                whole["error"] = "it ended twice"  # the usage may still arrive
            whole["finish_reason"] = choice["finish_reason"]
        if choice.get("error"):
            whole["error"] = choice["error"]
        if delta is None:
            whole["text"] = whole.get("text", "") + (choice.get("text") or "")
        else:
            message = whole.setdefault("message", {})
            for key in ("content", "refusal", "reasoning_content", "reasoning"):
                if delta.get(key):
                    message[key] = message.get(key, "") + delta[key]
            for call in delta.get("tool_calls") or ():
                if not _add_call(message.setdefault("tool_calls", []), call):
                    whole["error"] = "it has two tool calls with the same index"
        if given := choice.get("logprobs"):
            merged = whole.setdefault("logprobs", {key: [] for key in given if isinstance(given[key], list)})
            for key in merged:
                merged[key] += given.get(key) or []

    def raw(self) -> bytes:
        """Return the answer as the body of one that arrives at once. Raises BadAnswer if it is cut off."""
        if not (self._is_complete or self.has_failed):
            raise BadAnswer("the answer was cut off")
        return json.dumps({**self._answer, "choices": list(self._choices.values())}).encode()


def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> bool:
    """Add a piece of a tool's call: the first piece has its id and name, each one some of its arguments. Return False
    if its index is another call's."""
    index = piece.get("index", 0)
    call = next((call for call in calls if call["index"] == index), None)
    if call is None:
        calls.append({**piece, "index": index})
        return True
    function, more = call.setdefault("function", {}), (piece.get("function") or {}).get("arguments")
    if more:
        function["arguments"] = (function.get("arguments") or "") + more
    return piece.get("id") in (None, "", call.get("id"))
