"""Checks that a chat template rendered the messages: tool calls, tools' answers, a last message to continue.

A template silently omits what it does not support; here that is an error of the row. Continuing the last message works
like transformers' `continue_final_message` (`utils/chat_template_utils.py`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import UserError

_CALLS = ("tool_calls", "function_call")
_ANSWERS = ("tool", "function")
_ADVICE = "set prompt.chat.chat_template to one that does, or remove such messages"


class ChatTemplateError(UserError):
    """The template cannot render these messages. A row's failure: code `invalid_messages`."""


def with_system(messages: Sequence[Mapping[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Return the conversation for the template: `system` first unless it starts with a system message, and without None
    values, except for a content (templates read it next to tool calls)."""
    if not messages:
        raise ChatTemplateError("the conversation contains no message")
    chat = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in messages]
    if system is not None and chat[0].get("role") != "system":
        chat.insert(0, {"role": "system", "content": system})
    return chat


def check_calls(messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """Raise ChatTemplateError if messages contain tool calls that the template does not support."""
    for i, message in enumerate(messages):
        for name in _CALLS:
            if message.get(name) and name not in template:
                raise ChatTemplateError(f"message {i}: {name}: the chat template does not render these; {_ADVICE}")


def check_answers(messages: Sequence[Mapping[str, Any]], template: str, rendered: str) -> None:
    """Raise ChatTemplateError if a tool's answer is missing from the rendered text: the template ignores that role."""
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in _ANSWERS or re.search(rf"['\"]{role}['\"]", template) or not isinstance(content, str):
            continue
        if content.strip() not in rendered:
            raise ChatTemplateError(f"message {i}: role {role!r}: the chat template does not render it; {_ADVICE}")


def is_continued(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the chat ends with the assistant's turn."""
    return bool(messages) and messages[-1].get("role") == "assistant"


def with_tag(messages: Sequence[Mapping[str, Any]], tag: str) -> list[Mapping[str, Any]]:
    """Return the chat with `tag` and a blank after the last message's text.

    If the blank is missing in the rendered text, the template has stripped the text. Raises ChatTemplateError if the
    message has no text.
    """
    *before, last = messages
    if not isinstance(last.get("content"), str):
        raise ChatTemplateError(
            f"message {len(before)}, the last: an assistant message without text cannot be continued; end the chat "
            "with the tool's answer, or set prompt.chat.continue_final_message to false"
        )
    return [*before, {**last, "content": f"{last['content']}{tag} "}]


def cut_at_tag(rendered: str, tag: str, final: str, marks: str = "") -> str:
    """Return the rendered text up to the end of the last message, whose text is `final`; without trailing blanks if the
    template has stripped it. marks: characters that occur in the rendered text, but in no message.

    Raises ChatTemplateError if the template omits part of the text.
    """
    plain = rendered.translate({ord(mark): None for mark in marks})
    if final.strip() not in plain or tag not in plain:
        raise ChatTemplateError(
            "the last message is an assistant message to continue, but the chat template omits or changes part of its "
            "text; remove that part, or set prompt.chat.continue_final_message to false"
        )
    at = rendered.rindex(tag)
    return rendered[:at] if rendered.startswith(f"{tag} ", at) else rendered[:at].rstrip()
