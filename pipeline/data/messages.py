"""One message of a chat as chat templates take it: a role, a text, and what a template may read besides.

Owns what is refused by name: content other than text, media beside it, tool calls that are not whole. Whether a
template renders tool calls is the chat template's side (`tokenization/chat_messages.py`).
"""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from pipeline.data.columns import is_list, is_text

# Fields of a message that hold something else than text.
_MEDIA = ("audio", "image", "images", "video", "videos", "file", "files")
_CALLS = ("tool_calls", "function_call")
_SERVED = "only text is read: content as text, or as parts of type 'text'"


class MessageRefused(ValueError):
    """Why a message cannot be served. Begins with where it is."""


def plain_message(message: object, where: str) -> dict[str, Any]:
    """The message with role and content first, parts of text joined by lines (as vLLM joins them), the arguments of
    tool calls as objects (templates expect these; the API has them as JSON text), keys that are null left out. The
    content of an assistant's message that only calls tools is None. Raises MessageRefused."""
    if not isinstance(message, dict):
        raise MessageRefused(f"{where}: expected an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise MessageRefused(f"{where}: role is missing")
    rest = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
    for name in _MEDIA:
        if rest.get(name):
            raise MessageRefused(f"{where}: {name}; {_SERVED}")
    for name in _CALLS:
        if not rest.get(name):
            rest.pop(name, None)
        else:
            rest[name] = _with_arguments(rest[name], f"{where}: {name}")
    content = _joined(message.get("content"), where)
    if not isinstance(content, str) and not (content is None and any(name in rest for name in _CALLS)):
        raise MessageRefused(f"{where}: content is neither text nor parts of text")
    return {"role": role, "content": content, **rest}


def refusal_of_type(t: pa.DataType) -> str | None:
    """Why no column of this type can hold chats; None where it can."""
    if is_text(t):
        return None
    expected = "expected a list of structs with role and content, or text that holds such a list as JSON"
    if not is_list(t) or not pa.types.is_struct(t.value_type):
        return expected
    fields = {f.name: f.type for f in t.value_type.fields}
    if not {"role", "content"} <= fields.keys():
        return expected
    content = fields["content"]
    if pa.types.is_string(content) or pa.types.is_large_string(content) or pa.types.is_null(content):
        return None
    if is_list(content) and pa.types.is_struct(content.value_type):
        parts = {f.name for f in content.value_type.fields}
        if {"type", "text"} <= parts:
            return None
        return f"its content has parts of {', '.join(sorted(parts))}; {_SERVED}, with the fields type and text"
    return f"its content is {content}; {_SERVED}"


def _joined(content: object, where: str) -> object:
    """OpenAI's content parts as one text; anything else as it is."""
    if not isinstance(content, list) or not content:
        return content
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = f"a part of type {kind[:40]!r}" if isinstance(kind, str) else "a part without a type"
            raise MessageRefused(f"{where}: content[{i}] is {shown}; {_SERVED}")
        if not isinstance(part.get("text"), str):
            raise MessageRefused(f"{where}: content[{i}].text is no text")
    return "\n".join(part["text"] for part in content)


def _with_arguments(given: Any, where: str) -> Any:
    """Tool calls (a list), or a call of a function, with arguments that are an object."""
    if isinstance(given, list):
        return [
            {**call, "function": _with_arguments(call["function"], f"{where}[{i}].function")}
            if isinstance(call, dict) and isinstance(call.get("function"), dict)
            else call
            for i, call in enumerate(given)
        ]
    if not isinstance(given, dict) or not isinstance(given.get("arguments"), str):
        return given
    try:
        arguments = json.loads(given["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise MessageRefused(f"{where}.arguments: expected a JSON object as text")
    return {**given, "arguments": arguments}
