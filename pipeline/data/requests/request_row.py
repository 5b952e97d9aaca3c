"""Requests of a batch API as rows, and their columns.

`openai_batch` turns a line's object into a `Request`. An invalid request has the reason in `refused` and becomes an
error row. `Heading` holds what all lines of an input must agree on, which is checked during planning.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from pipeline.data.messages import MessageRefused, has_media, plain_message

FORMAT = "openai"  # value of input.format
Endpoint = Literal["chat", "text", "embedding"]

# Columns of per-row sampling values, by SamplingParams' names; null means the job's value. response_format is JSON.
PARAMETERS: Mapping[str, pa.DataType] = {
    "max_tokens": pa.int64(),
    "min_tokens": pa.int64(),
    "temperature": pa.float64(),
    "top_k": pa.int64(),
    "top_p": pa.float64(),
    "min_p": pa.float64(),
    "repetition_penalty": pa.float64(),
    "presence_penalty": pa.float64(),
    "frequency_penalty": pa.float64(),
    "stop": pa.list_(pa.string()),
    "stop_token_ids": pa.list_(pa.int64()),
    "ignore_eos": pa.bool_(),
    "seed": pa.int64(),
    "logprobs": pa.int64(),
    "prompt_logprobs": pa.int64(),
    "n": pa.int64(),
    "response_format": pa.string(),
    "thinking_token_budget": pa.int64(),
}
CUSTOM_ID = "custom_id"
ENCODING_FORMAT = "encoding_format"  # of embeddings in the response: "float" or "base64"; null means float
REFUSED = "refused"  # why a request is refused, or null
PROMPT_COLUMN: Mapping[Endpoint, str] = {"chat": "messages", "text": "prompt", "embedding": "input"}
EXPECTED: Mapping[pa.DataType, str] = {
    pa.int64(): "an integer",
    pa.float64(): "a number",
    pa.bool_(): "true or false",
    pa.list_(pa.string()): "a text or a list of texts",
    pa.list_(pa.int64()): "a list of integers",
}


def request_schema(endpoint: Endpoint) -> pa.Schema:
    """Return the columns of an input of requests. `messages` holds chats as JSON."""
    parameters = {ENCODING_FORMAT: pa.string()} if endpoint == "embedding" else PARAMETERS
    own = [pa.field(name, kind) for name, kind in parameters.items()]
    return pa.schema([(CUSTOM_ID, pa.string()), (PROMPT_COLUMN[endpoint], pa.string()), *own, (REFUSED, pa.string())])


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Parsed request. prompt: a chat as JSON, or a text; None if the request is refused."""

    custom_id: str | None
    prompt: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None

    def row(self, endpoint: Endpoint) -> dict[str, Any]:
        """Return the row's values by the column names of `request_schema`."""
        return {
            CUSTOM_ID: self.custom_id,
            PROMPT_COLUMN[endpoint]: self.prompt,
            REFUSED: self.refused,
            **self.parameters,
        }


@dataclass(frozen=True, slots=True)
class Heading:
    """Properties of one line that must agree across all lines, and its custom_id, which must be unique.

    `endpoint` and `model` are None if missing or unknown; such a line is refused on its own.
    """

    custom_id: str
    endpoint: Endpoint | None
    model: str | None
    ignored: tuple[str, ...] = ()  # fields without an effect
    samples: bool = False  # several completions are requested
    dimensions: int | None = None  # requested for an embedding
    prompt_logprobs: bool = False  # log-probabilities of the prompt are requested


class NoRequest(ValueError):
    """The line makes the whole input invalid."""


class Refused(ValueError):
    """The request becomes an error row. The message names the field."""


def id_of(line: Mapping[str, Any]) -> str:
    """Return the line's custom_id. Raises NoRequest."""
    value = line.get(CUSTOM_ID)
    if value is None or value == "":
        raise NoRequest(f"no {CUSTOM_ID}; give each line a unique one, which identifies its response")
    if not isinstance(value, str):
        raise NoRequest(f"{CUSTOM_ID} is {shortened(value)}, expected text; quote it")
    return value


def check_unsupported(key: str, value: Any, neutral: tuple[Any, ...], hint: str = "") -> None:
    """Raise Refused, with `hint` at the end, unless the value is one of the `neutral` ones, which have no effect."""
    if not any(type(value) is type(each) and value == each for each in neutral):  # type: True == 1
        expected = f"expected {json.dumps(neutral[0])}, " if neutral else ""
        raise Refused(f"{key}: not supported; {expected}got {shortened(value)}{hint}")


def chat_json(messages: object, key: str) -> str:
    """Return a chat as JSON. Raises Refused. Roles and earlier tool calls are left to the chat template, and messages
    with images to `prompts.render`, which knows whether a server reads them."""
    if not isinstance(messages, list) or not messages:
        raise Refused(f"{key}: expected a list of messages")
    try:
        chat = [m if has_media(m) else plain_message(m, f"{key}[{i}]") for i, m in enumerate(messages)]
        return json.dumps(chat, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except MessageRefused as why:
        raise Refused(str(why)) from None
    except ValueError:
        raise Refused(f"{key}: contains NaN or infinity, which JSON does not support") from None


def parameter(name: str, value: Any, key: str) -> Any:
    """Convert a value to the type of the column `name`. Raises Refused with `key`, the field's name in the request."""
    kind = PARAMETERS[name]
    is_int = type(value) is int and -(2**63) <= value < 2**63
    if kind == pa.bool_() and type(value) is bool:
        return value
    if kind == pa.int64():
        if type(value) is float and value.is_integer() and abs(value) < 2**53:
            return int(value)
        if is_int:
            return value
    if kind == pa.float64() and ((type(value) is float and math.isfinite(value)) or is_int):
        return float(value)
    if kind == pa.list_(pa.string()):
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return texts
    items: list[Any] = value if isinstance(value, list) else []
    if (
        kind == pa.list_(pa.int64())
        and items is value
        and all(type(item) is int and 0 <= item < 2**63 for item in items)
    ):
        return value
    raise Refused(f"{key}: expected {EXPECTED[kind]}, got {shortened(value)}")


def shortened(value: object) -> str:
    """Return an untrusted value for a message, shortened."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = repr(value) if not isinstance(value, str) or len(value) <= 80 else repr(value[:80]) + "..."
    return text if len(text) <= 85 else text[:80] + "..."
