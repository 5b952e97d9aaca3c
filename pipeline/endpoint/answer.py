"""Answers of a server as completions, or as the reason why there is none."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

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


class Overloaded(Exception):
    """The server accepts no request now. wait_s: the time that it asks to wait, if any."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class BadAnswer(Exception):
    """The answer is an error of the server, or cannot be used. The request may be sent again."""


class Unsupported(BadAnswer):
    """The server ignores an option of the request. The next answer would be the same."""


class AllRejected(Exception):
    """The server rejects all requests: the key, the model or the route is wrong."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def completion_of(status: int, headers: Mapping[str, str], raw: bytes, request: EndpointRequest) -> Completion:
    """Return the completion of an answer; an error completion if the server rejects this request. Its times are left
    at 0. Raises Overloaded, BadAnswer, AllRejected."""
    if status != 200:
        return _rejected(status, headers, raw, request)
    try:
        answer = json.loads(raw)
    except ValueError:
        raise BadAnswer(f"the answer is not JSON: {_text(raw)}") from None
    if not isinstance(answer, dict):
        raise BadAnswer(f"the answer is not a JSON object: {_text(raw)}")
    if "error" in answer and not answer.get("choices"):
        raise BadAnswer(f"the answer is an error with status 200: {message_of(raw)}")
    try:
        return _embedding(answer, request) if "input" in request.body else _completion(answer, request)
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
        raise AllRejected(status, message)
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


def _completion(answer: dict[str, Any], request: EndpointRequest) -> Completion:
    params, choices = request.params, sorted(answer["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(params.n)):
        numbers = [choice["index"] for choice in choices]
        raise BadAnswer(f"the answer has choices {numbers}; expected {params.n} with different indices from 0")
    if any(choice.get("finish_reason") == "content_filter" for choice in choices):
        return failed(request, RowError.CONTENT_FILTER, "the server's content filter ended the answer")
    samples = [_sample(choice, request) for choice in choices]
    if any(_is_unconstrained(sample, request.params) for sample in samples):
        return failed(request, RowError.GRAMMAR_ERROR, _UNCONSTRAINED)
    return with_usage(samples, answer.get("usage"), request)


def _is_unconstrained(sample: Completion, params: SamplingParams) -> bool:
    """Return whether a finished text breaks its choice or regular expression. A server that does not know
    `structured_outputs` ignores it (llama.cpp). JSON is checked with all other rows; a grammar cannot be."""
    wanted = params.structured_outputs
    if wanted is None or sample.finish_reason != "stop" or params.stop:
        return False
    if wanted.kind == "choice":
        return sample.text.strip() not in (option.strip() for option in json.loads(wanted.text))
    if wanted.kind != "regex":
        return False
    try:
        return re.fullmatch(wanted.text, sample.text) is None
    except re.error:  # another dialect
        return False


def _sample(choice: dict[str, Any], request: EndpointRequest) -> Completion:
    reason = _REASONS.get(choice["finish_reason"])
    if reason is None:
        raise BadAnswer(f"the answer ended with finish_reason {choice['finish_reason']!r}")
    message = choice.get("message")
    text = choice["text"] if message is None else message.get("content") or ""
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
        request.row_id, ids, text, reason, len(request.prompt_token_ids), logprobs=logprobs, reasoning=reasoning or None
    )


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


def with_usage(samples: Sequence[Completion], usage: object, request: EndpointRequest) -> Completion:
    """Return one completion of the samples, with the token counts of `usage`. If it is missing or impossible, only
    tokens that are known otherwise are counted."""
    prompt, generated = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    is_usable = prompt >= 0 and 0 <= generated <= request.params.max_tokens * request.params.n
    if not is_usable:
        prompt, generated = len(request.prompt_token_ids), sum(len(sample.token_ids) for sample in samples)
    cached = min(max(0, _count(usage, "prompt_tokens_details", "cached_tokens")), prompt)
    lengths = [len(sample.text) + len(sample.reasoning or "") for sample in samples]
    counts = [len(s.token_ids) for s in samples] if all(s.token_ids for s in samples) else _split(generated, lengths)
    thoughts = max(0, _count(usage, "completion_tokens_details", "reasoning_tokens"))
    thought = _split(thoughts, [len(sample.reasoning or "") for sample in samples])
    counted = [
        replace(
            sample,
            num_prompt_tokens=prompt,
            num_cached_tokens=cached if index == 0 else prompt,
            token_count=count if is_usable else None,
            num_reasoning_tokens=num_thought if sample.reasoning else 0,
        )
        for index, (sample, count, num_thought) in enumerate(zip(samples, counts, thought, strict=True))
    ]
    return with_samples(counted) if len(counted) > 1 else counted[0]


def _count(usage: object, *names: str) -> int:
    """Return a number of tokens in a nested mapping; -1 if it is missing or not a count."""
    for name in names:
        usage = usage.get(name) if isinstance(usage, dict) else None
    return usage if isinstance(usage, int) and not isinstance(usage, bool) and usage >= 0 else -1


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
    count = _count(answer.get("usage"), "prompt_tokens")
    result = VectorResult(vector)
    return Completion(
        request.row_id, [], "", "stop", count if count >= 0 else len(request.prompt_token_ids), result=result
    )


class StreamedAnswer:
    """An answer that arrives in pieces, assembled to the form of one that arrives at once."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}
        self._answer: dict[str, Any] = {}
        self.is_complete = False

    def add(self, line: bytes) -> int:
        """Add a line of server-sent events. Return the number of pieces of text in it. Raises BadAnswer."""
        if not line.startswith(b"data:"):
            return 0
        data = line[5:].strip()
        if data == b"[DONE]":
            self.is_complete = True
            return 0
        try:
            piece = json.loads(data)
        except ValueError:
            raise BadAnswer(f"a piece of the answer is not JSON: {_text(data)}") from None
        try:
            return self._add_piece(piece, data)
        except (TypeError, AttributeError) as error:
            raise BadAnswer(f"a piece of the answer has an unexpected form ({error}): {_text(data)}") from None

    def _add_piece(self, piece: dict[str, Any], data: bytes) -> int:
        if piece.get("error"):
            raise BadAnswer(f"the server ended the answer: {message_of(data)}")
        self._answer |= {key: piece[key] for key in ("model", "usage") if piece.get(key)}
        choices = piece.get("choices") or []
        for choice in choices:
            self._add_choice(choice)
        return len(choices)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        index, delta = choice.get("index", 0), choice.get("delta")
        whole = self._choices.setdefault(index, {"index": index, "finish_reason": None})
        if choice.get("finish_reason"):
            if whole["finish_reason"] is not None:
                raise BadAnswer(f"choice {index} of the answer ended twice")
            whole["finish_reason"] = choice["finish_reason"]
        if delta is None:
            whole["text"] = whole.get("text", "") + (choice.get("text") or "")
        else:
            message = whole.setdefault("message", {})
            for key in ("content", "reasoning_content", "reasoning"):
                if delta.get(key):
                    message[key] = message.get(key, "") + delta[key]
        if given := choice.get("logprobs"):
            merged = whole.setdefault("logprobs", {key: [] for key in given if isinstance(given[key], list)})
            for key in merged:
                merged[key] += given.get(key) or []

    def raw(self) -> bytes:
        """Return the answer as the body of one that arrives at once. Raises BadAnswer if it is cut off."""
        if not self.is_complete:
            raise BadAnswer("the answer was cut off")
        return json.dumps({**self._answer, "choices": list(self._choices.values())}).encode()
