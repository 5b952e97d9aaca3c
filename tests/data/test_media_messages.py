"""Chats with images, which only a server reads: parts are passed through, bytes as data urls."""

import base64
import json

import pyarrow as pa
import pytest

from pipeline.data.prompts import PromptSpec, render
from pipeline.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n..."
PARTS = [
    {"type": "text", "text": "What is it?", "image_url": None, "image": None},
    {"type": "image_url", "text": None, "image_url": {"url": "https://example.com/a.png"}, "image": None},
    {"type": "image", "text": None, "image_url": None, "image": PNG},
]


def rendered(chats: pa.Array, media: bool = True) -> list[dict]:
    spec, table = PromptSpec(messages="chat", media=media), pa.table({"chat": chats})
    spec.check(table.schema)
    (prompt,) = render(table, spec).prompts
    return json.loads(prompt)


def test_images_of_a_column_reach_the_server():
    (message,) = rendered(pa.array([[{"role": "user", "content": PARTS}]]))
    text, url, raw = message["content"]
    assert text == {"type": "text", "text": "What is it?"}
    assert url == {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    prefix, _, data = raw["image_url"]["url"].partition(",")
    assert (prefix, base64.b64decode(data)) == ("data:image/png;base64", PNG)


def test_a_chat_as_json_is_passed_through():
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}]
    assert rendered(pa.array([json.dumps(chat)])) == chat


def test_our_own_engine_refuses_images():
    with pytest.raises(ConfigError, match="only text is supported"):
        rendered(pa.array([[{"role": "user", "content": [{"type": "image", "image": PNG}]}]]), media=False)
