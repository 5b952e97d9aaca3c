"""Validation and normalization of chat messages for chat templates: a role, a text, and other fields for the template.

Refuses content other than text, media fields and incomplete tool calls. Whether a template renders tool calls is
checked in `tokenization/chat_messages.py`.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import pyarrow as pa

from pipeline.data.columns import is_list, is_text

# Fields of a message that hold media.
_MEDIA = ("audio", "image", "images", "video", "videos", "file", "files")
IMAGE_REFERENCE = "image:"  # url of a part that refers to one of the row's images
_PARTS = ("image", "image_url", "video_url", "audio_url", "input_audio", "file")  # types of parts, and their keys
_CALLS = ("tool_calls", "function_call")
_SERVED = "only text is supported: content as text, or as parts of type 'text'"


class MessageRefused(ValueError):
    """Message that is not supported. The text begins with its position."""


def plain_message(message: object, position: str) -> dict[str, Any]:
    """Normalize a message: role and content first, null keys dropped.

    Text parts are joined by newlines, as in vLLM. Arguments of tool calls become objects, which templates expect; the
    API has them as JSON text. The content is None if an assistant's message only calls tools. Raises MessageRefused.
    """
    if not isinstance(message, dict):
        raise MessageRefused(f"{position}: expected an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise MessageRefused(f"{position}: role is missing")
    rest = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
    for name in _MEDIA:
        if rest.get(name):
            raise MessageRefused(f"{position}: {name}; {_SERVED}")
    for name in _CALLS:
        if not rest.get(name):
            rest.pop(name, None)
        else:
            rest[name] = _with_arguments(rest[name], f"{position}: {name}")
    content = _joined(message.get("content"), position)
    if not isinstance(content, str) and not (content is None and any(name in rest for name in _CALLS)):
        raise MessageRefused(f"{position}: content is neither text nor text parts")
    return {"role": role, "content": content, **rest}


def media_message(message: object, position: str, images: list[bytes | str]) -> dict[str, Any]:
    """Return a message for a server, with its parts as they are: null keys dropped, and bytes as data urls.

    An image in the message, `{type: image_url, ...}` or `{type: image, image: BYTES}`, is appended to `images`, as its
    content or its url, and its part refers to it (`image_part`). Raises MessageRefused.
    """
    if not isinstance(message, dict):
        raise MessageRefused(f"{position}: expected an object with role and content")
    if not isinstance(role := message.get("role"), str) or not role.strip():
        raise MessageRefused(f"{position}: role is missing")
    if not isinstance(message.get("content"), str | list | None):
        raise MessageRefused(f"{position}: content is neither text nor a list of parts")
    given = {
        key: _for_server(value, f"{position}: {key}", images) for key, value in message.items() if value is not None
    }
    return {"role": role, "content": None, **given}


def image_part(image: bytes | str) -> dict[str, Any]:
    """Return a part that refers to an image by the hash of its content or name, so that equal prompts have equal
    images."""
    name, raw = ("name:", image.encode("utf-8", "replace")) if isinstance(image, str) else ("", image)
    return {"type": "image_url", "image_url": {"url": f"{IMAGE_REFERENCE}{name}{hashlib.sha256(raw).hexdigest()}"}}


def image_of_data_url(url: str, position: str) -> bytes:
    """Return the content of a data url. Raises MessageRefused."""
    head, comma, data = url.partition(",")
    if not comma or not data:
        raise MessageRefused(f"{position}: a url without data")
    try:
        return base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)
    except ValueError as error:
        raise MessageRefused(f"{position}: a data url whose base64 is not valid: {error}") from None


def _image_url_part(part: dict[str, Any], position: str, images: list[bytes | str]) -> dict[str, Any]:
    media = part["image_url"]
    url = media.get("url") if isinstance(media, dict) else media
    if not isinstance(url, str | bytes):
        raise MessageRefused(f"{position}.image_url: expected an object with a url")
    found = url
    if isinstance(url, str) and url.startswith("data:"):
        found = image_of_data_url(url, f"{position}.image_url.url")
    if not found:
        raise MessageRefused(f"{position}.image_url.url: 0 bytes, expected the content of an image")
    images.append(found)
    rest = {key: value for key, value in media.items() if key != "url"} if isinstance(media, dict) else {}
    return {**part, "image_url": {**rest, **image_part(found)["image_url"]}}


def _for_server(value: Any, position: str, images: list[bytes | str]) -> Any:
    if isinstance(value, dict):
        kind = value.get("type")
        if kind in _PARTS:
            media = value.get(kind)
            url = media.get("url") if isinstance(media, dict) else None
            if not media:
                raise MessageRefused(f"{position}: a part of type {kind!r} whose {kind} is null, missing or empty")
            if isinstance(url, str) and (not url or (url.startswith("data:") and url.endswith(","))):
                raise MessageRefused(f"{position}.{kind}.url: a url without data")
        value = {key: inner for key, inner in value.items() if inner is not None}
        if kind == "image" and isinstance(value["image"], bytes):
            images.append(value["image"])
            return image_part(value["image"])
        if kind == "image_url":
            value = _image_url_part(value, position, images)
        return {key: _for_server(inner, f"{position}.{key}", images) for key, inner in value.items()}
    if isinstance(value, list):
        return [_for_server(inner, f"{position}[{i}]", images) for i, inner in enumerate(value)]
    return _data_url(value, position) if isinstance(value, bytes) else value


def _data_url(raw: bytes, position: str) -> str:
    if not raw:
        raise MessageRefused(f"{position}: 0 bytes, expected the content of a file")
    return f"data:application/octet-stream;base64,{base64.b64encode(raw).decode()}"


def has_media(message: object) -> bool:
    """Return whether a message has parts other than text, which only a server may read."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") in _PARTS for part in content)


def refusal_of_type(t: pa.DataType, media: bool = False) -> str | None:
    """Return why a column of this type cannot hold chats; None if it can. media: parts other than text are allowed."""
    if is_text(t):
        return None
    expected = "expected a list of structs with role and content, or text that holds such a list as JSON"
    if not is_list(t) or not pa.types.is_struct(t.value_type):
        return expected
    fields = {f.name: f.type for f in t.value_type.fields}
    if not {"role", "content"} <= fields.keys():
        return expected
    content = fields["content"]
    if media and is_list(content):
        return None
    if pa.types.is_string(content) or pa.types.is_large_string(content) or pa.types.is_null(content):
        return None
    if is_list(content) and pa.types.is_struct(content.value_type):
        parts = {f.name for f in content.value_type.fields}
        if {"type", "text"} <= parts:
            return None
        return f"its content has parts of {', '.join(sorted(parts))}; {_SERVED}, with the fields type and text"
    return f"its content is {content}; {_SERVED}"


def _joined(content: object, position: str) -> object:
    """Join OpenAI content parts into one text; return other values unchanged."""
    if not isinstance(content, list) or not content:
        return content
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = f"a part of type {kind[:40]!r}" if isinstance(kind, str) else "a part without a type"
            raise MessageRefused(f"{position}: content[{i}] is {shown}; {_SERVED}")
        if not isinstance(part.get("text"), str):
            raise MessageRefused(f"{position}: content[{i}].text is not text")
    return "\n".join(part["text"] for part in content)


def _with_arguments(given: Any, position: str) -> Any:
    """Return a list of tool calls, or a function call, with the arguments parsed into objects."""
    if isinstance(given, list):
        return [
            {**call, "function": _with_arguments(call["function"], f"{position}[{i}].function")}
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
        raise MessageRefused(f"{position}.arguments: expected a JSON object as text")
    return {**given, "arguments": arguments}
