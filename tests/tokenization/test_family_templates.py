"""Templates in the style of each family render in the sandbox as in transformers."""

from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from pipeline.tokenization.chat_messages import ChatTemplateError
from pipeline.tokenization.tokenizer import Tokenizer
from tests.tokenization import small_tokenizers
from tests.tokenization.family_templates import TEMPLATES

NOW = datetime(2026, 11, 27, 8, 5)
SYSTEM = {"role": "system", "content": "Answer in <b>one</b> line. /no_think"}
USER, REPLY = {"role": "user", "content": " Ist 7 > 3, é? "}, {"role": "assistant", "content": "\nYes, 你好. "}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": "<é>"}}, "return": None}
CHATS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([USER], {}),
    ([SYSTEM, USER], {}),
    ([USER, REPLY, USER], {}),
    ([SYSTEM, USER, REPLY, USER], {"enable_thinking": False}),
    ([SYSTEM, USER, REPLY, USER, REPLY], {}),
    ([SYSTEM | {"tools": [TOOL]}, USER], {"tools": [TOOL]}),
    ([USER, REPLY | {"thinking": "One moment."}], {"reasoning_effort": "low"}),
    ([USER], {"tools": [TOOL, TOOL], "documents": [{"title": "a", "text": "A, <b>"}, {"title": "b", "text": "é"}]}),
    ([USER, REPLY, USER], {"documents": [{"text": "A"}], "controls": {"length": "short"}}),
]


@pytest.fixture
def pair(tmp_path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=lambda: NOW)
    monkeypatch.setattr(chat_template_utils, "datetime", clock)
    folder = small_tokenizers.save_byte_level(tmp_path, TEMPLATES[request.param])
    ours = Tokenizer.from_folder(folder)
    yield ours, AutoTokenizer.from_pretrained(folder)
    ours.close()


@pytest.mark.parametrize("pair", TEMPLATES, indirect=True)
def test_a_template_renders_as_in_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    for messages, values in CHATS:
        for add_generation_prompt in (True, False):
            expected = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **values
            )
            got = ours.render_chat(messages, None, add_generation_prompt, values, now=NOW)
            assert got == expected
            assert "Ist 7 > 3" in got


@pytest.mark.parametrize("pair", ["gemma", "mistral"], indirect=True)
def test_turns_that_do_not_alternate_are_refused_with_the_templates_reason(pair: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(ChatTemplateError, match="alternate"):
        pair[0].render_chat([USER, USER])


@pytest.mark.parametrize("pair", ["gemma"], indirect=True)
def test_gemma_has_the_system_message_in_the_first_turn(pair: tuple[Tokenizer, Any]) -> None:
    text = pair[0].render_chat([SYSTEM, USER, REPLY, USER])
    assert text.count("<start_of_turn>user") == 2
    assert text.startswith("<|bos|><start_of_turn>user\nAnswer in <b>one</b> line. /no_think\n\nIst 7")
    assert text.endswith("<start_of_turn>model\n")
