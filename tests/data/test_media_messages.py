"""Chats with images, which only a server reads: their parts refer to them."""

import base64
import hashlib
import json
import re

import pyarrow as pa
import pytest

from pipeline.data.prompts import PromptSpec, render
from pipeline.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n..."
URL = "https://example.com/a.png"
PARTS = [
    {"type": "text", "text": "What is it?", "image_url": None, "image": None},
    {"type": "image_url", "text": None, "image_url": {"url": URL}, "image": None},
    {"type": "image", "text": None, "image_url": None, "image": PNG},
]


def rendered(chats: pa.Array, media: bool = True) -> list[dict]:
    spec, table = PromptSpec(messages="chat", media=media), pa.table({"chat": chats})
    spec.check(table.schema)
    out = render(table, spec)
    assert out.images in ([[URL]], [[PNG]], [[URL, PNG]])
    return json.loads(out.prompts[0] or "")


def test_images_of_a_column_reach_the_server():
    (message,) = rendered(pa.array([[{"role": "user", "content": PARTS}]]))
    text, url, raw = message["content"]
    assert text == {"type": "text", "text": "What is it?"}
    assert url == {"type": "image_url", "image_url": {"url": f"image:name:{hashlib.sha256(URL.encode()).hexdigest()}"}}
    assert raw["image_url"]["url"] == f"image:{hashlib.sha256(PNG).hexdigest()}"
    data = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}}
    (message,) = rendered(pa.array([json.dumps([{"role": "user", "content": [data]}])]))
    assert message["content"] == [raw]


def test_a_chat_as_json_is_read_alike():
    (message,) = rendered(pa.array([json.dumps([{"role": "user", "content": PARTS[1:2]}])]))
    assert message["content"][0]["image_url"]["url"].startswith("image:name:")


@pytest.mark.parametrize(("part", "message"), [
    ({"type": "image", "image": b""}, r"content\[1\]: a part of type 'image' whose image is null, missing or empty"),
    ({"type": "image", "image": None}, r"content\[1\]: a part of type 'image' whose image"),
    ({"type": "image_url", "image_url": None}, r"content\[1\]: a part of type 'image_url' whose image_url"),
    ({"type": "image_url", "image_url": {"url": b""}}, r"content\[1\]\.image_url\.url: 0 bytes"),
    ({"type": "image_url", "image_url": {"url": ""}}, r"content\[1\]\.image_url\.url: a url without data"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, r"content\[1\]\.image_url\.url: a url"),
    ({"type": "input_audio", "input_audio": {"data": b""}}, r"content\[1\]\.input_audio\.data: 0 bytes"),
])  # fmt: skip
def test_a_part_without_its_data_is_refused(part, message):
    spec = PromptSpec(messages="chat", media=True)
    texts = {"type": "text", "text": "data:,"}  # text that looks like a url is text
    chats = pa.array([[{"role": "user", "content": [{**texts, **dict.fromkeys(part)}, {"text": None, **part}]}]])
    out = render(pa.table({"chat": chats}), spec)
    assert out.errors == ["invalid_messages"]
    assert re.match(rf"column 'chat', message 0: {message}", out.messages[0] or "")


def test_our_own_engine_refuses_images():
    chat = json.dumps([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}])
    table = pa.table({"chat": [chat], "refused": pa.nulls(1, pa.string())})
    for refused, code, name in (
        (None, "invalid_messages", "column 'chat', message 0"),
        ("refused", "invalid_request", r"body.messages\[0\]"),
    ):
        out = render(table, PromptSpec(messages="chat", refused=refused))
        assert out.errors == [code]
        assert re.match(rf"{name}: content\[0\] is a part of type 'image_url'; only text", out.messages[0] or "")
    with pytest.raises(ConfigError, match="only text is supported"):
        rendered(pa.array([[{"role": "user", "content": [{"type": "image", "image": PNG}]}]]), media=False)
