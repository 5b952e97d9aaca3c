"""A request as a row: the columns that lines of a batch API are read as.

`openai_batch` turns a line's object into a `Request`. What makes one row wrong is in its `refused` and becomes an error
row. `Heading` is what all lines of an input must agree on; it is looked at while a job is planned.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from pipeline.data.messages import MessageRefused, plain_message

FORMAT = "openai"  # as input.format names it
Endpoint = Literal["chat", "text", "embedding"]

# Each row's own sampling values, by SamplingParams' names; null means the job's. response_format is JSON.
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
ENCODING_FORMAT = "encoding_format"  # of embeddings: "float" or "base64", in which an answer has them; null means float
REFUSED = "refused"  # why a request is not taken, else null
PROMPT_COLUMN: Mapping[Endpoint, str] = {"chat": "messages", "text": "prompt", "embedding": "input"}
EXPECTED: Mapping[pa.DataType, str] = {
    pa.int64(): "an integer",
    pa.float64(): "a number",
    pa.bool_(): "true or false",
    pa.list_(pa.string()): "a text or a list of texts",
    pa.list_(pa.int64()): "a list of integers",
}


def request_schema(endpoint: Endpoint) -> pa.Schema:
    """The columns of an input of requests. `messages` holds chats as JSON."""
    parameters = {ENCODING_FORMAT: pa.string()} if endpoint == "embedding" else PARAMETERS
    own = [pa.field(name, kind) for name, kind in parameters.items()]
    return pa.schema([(CUSTOM_ID, pa.string()), (PROMPT_COLUMN[endpoint], pa.string()), *own, (REFUSED, pa.string())])


@dataclass(frozen=True, slots=True)
class Request:
    """`prompt`: a chat as JSON, or a text; None where it is refused."""

    custom_id: str | None
    prompt: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None

    def row(self, endpoint: Endpoint) -> dict[str, Any]:
        """By the names of `request_schema`."""
        return {
            CUSTOM_ID: self.custom_id,
            PROMPT_COLUMN[endpoint]: self.prompt,
            REFUSED: self.refused,
            **self.parameters,
        }


@dataclass(frozen=True, slots=True)
class Heading:
    """Of one line: what must be the same in all lines, or differ in all. `endpoint` and `model` are None where the line
    names none that is known; such a line is refused by itself."""

    custom_id: str
    endpoint: Endpoint | None
    model: str | None
    ignored: tuple[str, ...] = ()  # fields that change nothing here
    samples: bool = False  # whether it asks for several completions
    dimensions: int | None = None  # of an embedding, where it says
    prompt_logprobs: bool = False  # whether it asks for those


class NoRequest(ValueError):
    """A line for which the whole input is refused; the text says why."""


class Refused(ValueError):
    """A request that becomes an error row; the text names the field."""


def id_of(line: Mapping[str, Any]) -> str:
    """Return the line's custom_id. Raises NoRequest."""
    value = line.get(CUSTOM_ID)
    if value is None or value == "":
        raise NoRequest(f"no {CUSTOM_ID}, by which its answer is found; give each line one of its own")
    if not isinstance(value, str):
        raise NoRequest(f"{CUSTOM_ID} is {shortened(value)}, expected text; quote it")
    return value


def check_unsupported(where: str, value: Any, neutral: tuple[Any, ...], hint: str = "") -> None:
    """Raise Refused, with `hint` at the end, unless the value is one of those that ask for nothing."""
    if not any(type(value) is type(each) and value == each for each in neutral):  # True is no 1
        taken = f"only {json.dumps(neutral[0])} is taken, " if neutral else ""
        raise Refused(f"{where}: not supported; {taken}got {shortened(value)}{hint}")


def chat_json(messages: object, where: str) -> str:
    """Return a chat as JSON. What a chat template makes of roles and of tool calls in earlier turns is its own; other
    content than text is refused here. Raises Refused."""
    if not isinstance(messages, list) or not messages:
        raise Refused(f"{where}: expected a list of messages")
    try:
        chat = [plain_message(message, f"{where}[{i}]") for i, message in enumerate(messages)]
        return json.dumps(chat, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except MessageRefused as why:
        raise Refused(str(why)) from None
    except ValueError:
        raise Refused(f"{where}: holds NaN or infinity, which JSON has not") from None


def parameter(name: str, value: Any, where: str) -> Any:
    """A value as the column `name` holds it. Raises Refused, naming the field `where`."""
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
    raise Refused(f"{where}: expected {EXPECTED[kind]}, got {shortened(value)}")


def shortened(value: object, most: int = 80) -> str:
    """A value of a stranger's, as a message repeats it."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = repr(value) if not isinstance(value, str) or len(value) <= most else repr(value[:most]) + "..."
    return text if len(text) <= most + 5 else text[:most] + "..."
