"""Answers of a server as completions, in the dialects of OpenAI's API that servers speak."""

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from pipeline.endpoint.errors import BadAnswer, Reply, Unsupported, failed, one_line, rejection
from pipeline.endpoint.meter import Usage, count_of, usage_of
from pipeline.endpoint.spec import EndpointRequest
from pipeline.engine.completion import Completion, FinishReason
from pipeline.engine.samples import with_samples
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.tasks import TokenLogprobs, VectorResult
from pipeline.errors import RowError

_REASONS: dict[str, FinishReason | None] = {  # None: the server's filter
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence", "tool_calls", "function_call"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "max_output_tokens", "model_length"), "length"),
    "repetition": "length_loop",
    **dict.fromkeys(("content_filter", "safety", "recitation", "prohibited_content", "blocklist", "sensitive")),
}
_UNCONSTRAINED = "the text does not conform to sampling.structured_outputs; the server may not support it"


def completion_of(reply: Reply, request: EndpointRequest, has_tools: bool = False) -> Completion:
    """Return the completion of an answer; an error completion if the server rejects this request. Its times are left
    at 0. has_tools: the model may call tools. Raises Overloaded, BadAnswer, Rejected."""
    answer = reply.value
    if not reply.is_success or (isinstance(answer, dict) and (answer.get("error") or answer.get("object") == "error")):
        return rejection(reply, request)
    if not isinstance(answer, dict):
        raise BadAnswer(f"the answer is not {'JSON' if answer is None else 'a JSON object'}: {reply.text}")
    try:
        return _embedding(answer, request) if "input" in request.body else _completion(answer, request, has_tools)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise BadAnswer(f"the answer has an unexpected form ({type(error).__name__}: {error}): {reply.text}") from None


def _completion(answer: dict[str, Any], request: EndpointRequest, has_tools: bool) -> Completion:
    params = request.params
    choices = [{"index": index, **choice} for index, choice in enumerate(answer["choices"])]  # one may have none
    choices.sort(key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(params.n)):
        numbers = [choice["index"] for choice in choices]
        is_short = 0 < len(numbers) < params.n and numbers == list(range(len(numbers)))  # it ignores n
        kind = Unsupported if is_short else BadAnswer
        raise kind(f"the answer has choices {numbers}; expected {params.n} with different indices from 0")
    for choice in choices:
        if choice.get("error"):
            reason = Reply(500, {}, choice["error"]).message
            raise BadAnswer(f"choice {choice['index']} of the answer failed: {reason}")
    ends: list[tuple[dict[str, Any], FinishReason | None]]
    ends = [(choice, _reason(choice, answer, params)) for choice in choices]
    if any(reason is None for _, reason in ends):
        return failed(request, RowError.CONTENT_FILTER, "the server's content filter ended the answer")
    if refusal := next(filter(None, map(_refusal, choices)), ""):
        return failed(request, RowError.REFUSED, refusal)
    samples = [_sample(choice, reason, request, has_tools) for choice, reason in ends if reason is not None]
    if any(_is_unconstrained(sample, request.params) for sample in samples):
        return failed(request, RowError.GRAMMAR_ERROR, _UNCONSTRAINED)
    return with_usage(samples, answer, request)


def _reason(choice: dict[str, Any], answer: dict[str, Any], params: SamplingParams) -> FinishReason | None:
    """Return why a choice ended; None for a filter. Some servers leave it out: then its length shows it."""
    given = choice.get("finish_reason")
    if given is None:
        usage = usage_of(answer, is_embedding=False)
        is_full = usage is not None and usage.generated_tokens >= params.max_tokens * params.n
        return "length" if is_full else "stop"
    name = str(given).lower().partition(":")[0]
    if name not in _REASONS:
        raise BadAnswer(f"the answer ended with finish_reason {given!r}")
    return _REASONS[name]


def _refusal(choice: dict[str, Any]) -> str:
    """Return the sentence with which the model refuses to answer; empty if it answers."""
    message = choice.get("message") or {}
    return "" if message.get("content") or not message.get("refusal") else one_line(str(message["refusal"]))


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


def _sample(choice: dict[str, Any], reason: FinishReason, request: EndpointRequest, has_tools: bool) -> Completion:
    message = choice.get("message")
    text, thoughts = _texts(choice["text"] if message is None else message.get("content"))
    calls: list[dict[str, Any]] | None = None if message is None else message.get("tool_calls") or None
    if calls is None and message is not None and message.get("function_call"):
        calls = [{"type": "function", "function": message["function_call"]}]  # OpenAI's form before tool calls
    if calls and not has_tools:
        raise BadAnswer("the answer calls a tool, and server.extra_body has no tools")
    reasoning = None
    if message is not None and request.params.reasoning is not None:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or thoughts or None
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
        tool_calls=None if calls is None else _valid(json.dumps([_call(call) for call in calls], ensure_ascii=False)),
    )


def _texts(content: object) -> tuple[object, str]:
    """Return the text of a message's content, and its thoughts: the content may be a list of parts of both."""
    if not isinstance(content, list):
        return content or "", ""
    texts, thoughts = [], []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "thinking":
            thought = part.get("thinking") or ""
            thoughts.append(str(_texts(thought)[0]) if isinstance(thought, list) else thought)
        else:
            texts.append(part["text"])
    return "".join(texts), "".join(thoughts)


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
    given, length = one["embedding"], request.body["dimensions"]
    if isinstance(given, str):
        vector = np.frombuffer(base64.b64decode(given, validate=True), dtype="<f4")
    else:
        vector = np.array(given, dtype=np.float32)
        vector = vector[0] if vector.shape == (1, length) else vector  # llama.cpp
    if vector.shape != (length,) or not np.isfinite(vector).all():
        raise Unsupported(f"the vector has shape {vector.shape}; expected {length} finite numbers (task.dimensions)")
    usage = usage_of(answer, is_embedding=True)
    count = len(request.prompt_token_ids) if usage is None else usage.prompt_tokens
    return Completion(request.row_id, [], "", "stop", count, result=VectorResult(vector))
