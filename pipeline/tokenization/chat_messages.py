"""What a chat template must have rendered of the messages: tool calls, tools' answers, a last turn to be continued.

A template that has no place for something leaves it out without a word; here that is an error of the row.
Continuing the last message is that of transformers' `continue_final_message` (`utils/chat_template_utils.py`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import UserError

_CALLS = ("tool_calls", "function_call")
_ANSWERS = ("tool", "function")
_ADVICE = "give one that does as prompt.chat.template, or leave such messages out"


class ChatTemplateError(UserError):
    """These messages cannot be rendered by this template. A row's failure: code `invalid_messages`."""


def with_system(messages: Sequence[Mapping[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """The conversation as the template gets it: `system` first unless it starts with one, no None values but a content
    (templates ask for that beside tool calls)."""
    if not messages:
        raise ChatTemplateError("the conversation holds no message")
    chat = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in messages]
    if system is not None and chat[0].get("role") != "system":
        chat.insert(0, {"role": "system", "content": system})
    return chat


def check_calls(messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """Raise ChatTemplateError where messages hold tool calls and the template does not know these."""
    for i, message in enumerate(messages):
        for name in _CALLS:
            if message.get(name) and name not in template:
                raise ChatTemplateError(f"message {i}: {name}: the chat template does not render these; {_ADVICE}")


def check_answers(messages: Sequence[Mapping[str, Any]], template: str, rendered: str) -> None:
    """Raise ChatTemplateError where a tool's answer is not in what was rendered: the template passes over that role."""
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in _ANSWERS or re.search(rf"['\"]{role}['\"]", template) or not isinstance(content, str):
            continue
        if content.strip() not in rendered:
            raise ChatTemplateError(f"message {i}: role {role!r}: the chat template does not render it; {_ADVICE}")


def is_continued(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the chat ends with the assistant's turn."""
    return bool(messages) and messages[-1].get("role") == "assistant"


def with_tag(messages: Sequence[Mapping[str, Any]], tag: str) -> list[Mapping[str, Any]]:
    """The chat with `tag` and a blank after the last message's text: where the blank is missing in the rendered text,
    the template has stripped the text. Raises ChatTemplateError where there is no text."""
    *before, last = messages
    if not isinstance(last.get("content"), str):
        raise ChatTemplateError(
            f"message {len(before)}, the last: an assistant's turn without text cannot be continued; end the chat with "
            "the tool's answer, or set prompt.chat.continue_final_message to false"
        )
    return [*before, {**last, "content": f"{last['content']}{tag} "}]


def cut_at_tag(rendered: str, tag: str, final: str, marks: str = "") -> str:
    """The rendered text up to the end of the last message, whose text is `final`; without the blanks at its end where
    the template has stripped it. marks: characters that stand in the rendered text and in no message.

    Raises ChatTemplateError where the template leaves out some of the text."""
    plain = rendered.translate({ord(mark): None for mark in marks})
    if final.strip() not in plain or tag not in plain:
        raise ChatTemplateError(
            "the last message is the assistant's and to be continued, but the chat template leaves out or changes some "
            "of its text; leave that out of the message, or set prompt.chat.continue_final_message to false"
        )
    at = rendered.rindex(tag)
    return rendered[:at] if rendered.startswith(f"{tag} ", at) else rendered[:at].rstrip()
