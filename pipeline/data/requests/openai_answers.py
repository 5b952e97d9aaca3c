"""Response lines of OpenAI's Batch API: one per request, with the object that its endpoint returns.

The fields are those of https://platform.openai.com/docs/api-reference/batch/request-output, /chat/object,
/completions/object and /embeddings/object. The output holds token ids, not tokens, so log-probabilities name tokens as
`token_id:17`, vLLM's form for `return_tokens_as_token_ids`, and the bytes of a token are null. Log-probabilities of
prompts are in vLLM's field `prompt_logprobs`, by token id: of a chat response, or of each choice of a text response.
Reasoning is in `reasoning`, as in vLLM's messages; the content is null if no answer follows it. Calls of tools are in
`tool_calls`.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.data.output.result_columns import SAMPLED
from pipeline.data.requests.request_row import CUSTOM_ID, ENCODING_FORMAT, Endpoint
from pipeline.errors import RowError

# The API has no finish reason for repetition; like max_tokens, it is a limit of the engine.
FINISH_REASONS = {"stop": "stop", "length": "length", "length_loop": "length"}
MIN_LOGPROB = -9999.0  # the API's value for a nonfinite log-probability
# Errors that the row did not cause: it might succeed on another machine or with another model.
OF_ENGINE = (
    RowError.KV_CACHE_EXHAUSTED,
    RowError.OUT_OF_MEMORY,
    RowError.TOKEN_OUT_OF_VOCABULARY,
    RowError.NON_FINITE_LOGITS,
    RowError.SERVER_ERROR,
    RowError.ENGINE_FAILURE,
)
# Original names of the result columns that lines are made from.
RESULTS = ("generated_text", "finish_reason", "error", "error_message", "num_input_tokens", "num_cached_tokens",
           "num_generated_tokens", "source_file", "source_row", "logprobs", "sample_index", "prompt_logprobs",
           "embedding", "reasoning", "num_reasoning_tokens", "tool_calls")  # fmt: skip


@dataclass(frozen=True)
class Answered:
    """Common properties of a job's response lines.

    created: Unix time in seconds. fingerprint: of the job; ids are derived from it and the row's position, so that they
    are reproducible.
    """

    endpoint: Endpoint
    model: str
    created: int
    fingerprint: str

    def line(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response line of an output row (original result column -> value). Lines of error rows go to
        the error file."""
        row_key = f"{self.fingerprint}\0{row['source_file']}\0{row['source_row']}"
        key = hashlib.sha256(row_key.encode()).hexdigest()
        status, body = self._refusal(row) if row["error"] is not None else (200, self._body(row, key[:24]))
        response = {"status_code": status, "request_id": f"req_{key[24:48]}", "body": body}
        return {"id": f"batch_req_{key[:24]}", "custom_id": row[CUSTOM_ID], "response": response, "error": None}

    def _body(self, row: Mapping[str, Any], key: str) -> dict[str, Any]:
        if self.endpoint == "embedding":
            return {
                "object": "list",
                "data": [{"object": "embedding", "index": 0, "embedding": _vector(row)}],
                "model": self.model,
                "usage": {"prompt_tokens": row["num_input_tokens"], "total_tokens": row["num_input_tokens"]},
            }
        is_chat, prompt_fields = self.endpoint == "chat", {}
        if row.get("prompt_logprobs") is not None:
            prompt_fields = {"prompt_logprobs": [None if t is None else _by_id(t) for t in row["prompt_logprobs"]]}
        choices = [(_chat_choice if is_chat else _text_choice)(sample) for sample in _samples(row)]
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices if is_chat else [{**choice, **prompt_fields} for choice in choices],
            "usage": {
                "prompt_tokens": row["num_input_tokens"],
                "completion_tokens": row["num_generated_tokens"],
                "total_tokens": row["num_input_tokens"] + row["num_generated_tokens"],
                "prompt_tokens_details": {"cached_tokens": row["num_cached_tokens"]},
                **_reasoning_usage(row),
            },
            "system_fingerprint": f"fp_{self.fingerprint[:10]}",
            **(prompt_fields if is_chat else {}),
        }

    def _refusal(self, row: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        is_ours = row["error"] in OF_ENGINE
        kind = "server_error" if is_ours else "invalid_request_error"
        error = {"message": row["error_message"] or row["error"], "type": kind, "param": None, "code": row["error"]}
        return 500 if is_ours else 400, {"error": error}


def _vector(row: Mapping[str, Any]) -> str | list[float]:
    """Return an embedding in the requested encoding: base64 of little-endian float32, or the shortest decimals that
    round-trip."""
    if row.get(ENCODING_FORMAT) == "base64":
        return base64.b64encode(np.array(row["embedding"], "<f4").tobytes()).decode()
    return [float(text) for text in pa.array(row["embedding"], pa.float32()).cast(pa.string()).to_pylist()]


def together(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a part, with the samples of an input row merged into one row with lists."""
    for _, group in groupby(rows, key=lambda row: (row["source_file"], row["source_row"])):
        samples = list(group)
        first = samples[0]
        if "sample_index" in first and first["error"] is None:
            lists: dict[str, Any] = {name: [one[name] for one in samples] for name in SAMPLED if name in first}
            if first.get("logprobs") is None:
                lists["logprobs"] = None
            counted = [name for name in ("num_generated_tokens", "num_reasoning_tokens") if name in first]
            first = {**first, **lists, **{name: sum(one[name] for one in samples) for name in counted}}
        yield first


def _reasoning_usage(row: Mapping[str, Any]) -> dict[str, Any]:
    tokens = row.get("num_reasoning_tokens")
    return {} if tokens is None else {"completion_tokens_details": {"reasoning_tokens": tokens}}


@dataclass(frozen=True)
class _Sample:
    index: int
    text: str
    finish_reason: str
    logprobs: list[dict[str, Any]] | None
    reasoning: Mapping[str, str | None]  # empty if the job does not split off reasoning
    tool_calls: str | None


def _samples(row: Mapping[str, Any]) -> Iterator[_Sample]:
    """Yield the samples of a row; one if the output has no lists."""
    texts, reasons, logprobs = row["generated_text"], row["finish_reason"], row.get("logprobs")
    reasoning, calls = row["reasoning"] if "num_reasoning_tokens" in row else None, row.get("tool_calls")
    if isinstance(texts, str):
        if "num_reasoning_tokens" in row:
            reasoning = [reasoning]
        calls = [calls]
        texts, reasons, logprobs = [texts], [reasons], None if logprobs is None else [logprobs]
    for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
        own = {} if reasoning is None else {"reasoning": reasoning[index]}
        logprobs_here, calls_here = (None if found is None else found[index] for found in (logprobs, calls))
        yield _Sample(index, text, FINISH_REASONS[reason], logprobs_here, own, calls_here)


def _chat_choice(sample: _Sample) -> dict[str, Any]:
    logprobs = None
    if sample.logprobs is not None:
        content = [{**_token(t), "top_logprobs": [_token(top) for top in t["top"] or ()]} for t in sample.logprobs]
        logprobs = {"content": content, "refusal": None}
    content = sample.text or None if sample.reasoning.get("reasoning") else sample.text
    message = {"role": "assistant", "content": content, "refusal": None, **sample.reasoning}
    reason = sample.finish_reason
    if sample.tool_calls is not None:
        message |= {"content": sample.text or None, "tool_calls": json.loads(sample.tool_calls)}
        reason = "tool_calls" if reason == "stop" else reason
    return {"index": sample.index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _text_choice(sample: _Sample) -> dict[str, Any]:
    logprobs = None
    if (found := sample.logprobs) is not None:
        logprobs = {
            "tokens": [_name(t) for t in found],
            "token_logprobs": [_finite(t["logprob"]) for t in found],
            "top_logprobs": [{_name(top): _finite(top["logprob"]) for top in t["top"] or ()} for t in found],
        }
    own = {"index": sample.index, "text": sample.text, "logprobs": logprobs, "finish_reason": sample.finish_reason}
    return {**own, **sample.reasoning}


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": _name(token), "logprob": _finite(token["logprob"]), "bytes": None}


def _by_id(token: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a prompt token and the top tokens at its position, by token id. Only the top tokens have a `rank`."""
    ranks = {top["token_id"]: rank for rank, top in enumerate(token["top"] or (), 1)}
    return {
        str(each["token_id"]): {
            "logprob": _finite(each["logprob"]),
            "rank": ranks.get(each["token_id"]),
            "decoded_token": None,
        }
        for each in (token, *(token["top"] or ()))
    }


def _name(token: Mapping[str, Any]) -> str:
    return f"token_id:{token['token_id']}"


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB
