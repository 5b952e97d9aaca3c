"""Rendering of conversations with the chat template of a checkpoint.

A template is untrusted code. It runs in transformers' Jinja sandbox, in a child process with limits on memory and CPU
time (`chat_worker.py`), because a sandbox prevents it from reading files, but not from looping or multiplying strings.
One child serves all conversations of a tokenizer. A child that exceeds a limit exits and is replaced for the next
conversation.

This module tracks which segments of the rendered text came from the data. `tokenizer.py` encodes them.
"""

import json
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError
from pipeline.machine.interpreter import child_environment
from pipeline.tokenization.chat_messages import ChatTemplateError, cut_at_tag, with_tag

_WORKER = Path(__file__).with_name("chat_worker.py")
CPU_LIMIT_S = 5.0  # per conversation; real templates take well under a millisecond
MEMORY_LIMIT_BYTES = 1 << 30
RENDERED_LIMIT_CHARS = 1 << 25
# Everything that affects the formatting of dates (%B, %s) and the order of sets is the same for all workers.
_AMBIENT = {"LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "0"}
_MAX_BLANKS = 64  # to examine after a control token, so that marking stays linear


class ChatRenderer:
    """Renders conversations with one template. Thread-safe; conversations are rendered one at a time.

    The child process starts with the first conversation and ends with the renderer.
    """

    def __init__(
        self,
        template: str,
        *,
        name: str,
        cpu_limit_s: float = CPU_LIMIT_S,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        rendered_limit_chars: int = RENDERED_LIMIT_CHARS,
    ) -> None:
        self._hello = {
            "template": template,
            "cpu_limit_s": cpu_limit_s,
            "memory_limit_bytes": memory_limit_bytes,
            "rendered_limit_chars": rendered_limit_chars,
        }
        self._template = template
        self._name = name
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        literal: re.Pattern[str] | None,
        now: datetime | None = None,
        is_continued: bool = False,
    ) -> str | list[tuple[str, bool]]:
        """Render a conversation.

        Return one string if no message contains a match of `literal`, else its segments in order, each with True if it
        is such a match from a message, else False. now: the date for templates that need it; without it, those are
        rejected. is_continued: the text ends with that of the last message, which the model continues.

        Raises ChatTemplateError, or ModelError if the template does not parse.
        """
        is_marked = literal is not None and any(literal.search(text) for text in _strings(messages))
        if not is_marked and not is_continued:
            return self._request({"messages": messages, "tools": None, "documents": None, **variables}, now)
        start, end, tag = _unused_marks([self._template, *_strings(messages), *_strings(variables)])
        chat = _marked(messages, literal, start, end) if is_marked and literal is not None else messages
        chat = with_tag(chat, tag) if is_continued else chat
        rendered = self._request({"messages": chat, "tools": None, "documents": None, **variables}, now)
        if any(mark in rendered for mark in (_escaped(start), _escaped(end))):
            raise ChatTemplateError(
                "the messages contain control-token text and the chat template writes them as escaped JSON, "
                "where it cannot be distinguished from the template's control tokens"
            )
        if is_continued:
            rendered = cut_at_tag(rendered, tag, messages[-1]["content"], marks=start + end)
        return list(_segments(rendered, literal, start, end)) if is_marked and literal is not None else rendered

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _request(self, variables: Mapping[str, Any], now: datetime | None) -> str:
        message = {"variables": variables, "now": now and now.isoformat()}
        try:
            request = json.dumps(message).encode("ascii") + b"\n"
        except (TypeError, ValueError) as error:
            raise ChatTemplateError(f"messages must be plain JSON values: {error}") from error
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._start()
            answer = self._exchange(request)
            if "ended" in answer:  # possibly killed from outside: the same row must get the same answer, so try again
                self._start()
                answer = self._exchange(request)
        if "error" in answer:
            raise ChatTemplateError(f"the chat template rejected the messages: {answer['error']}")
        return answer["text"]

    def _start(self) -> None:
        self._stop()
        self._child = subprocess.Popen(
            [sys.executable, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(**_AMBIENT),
        )
        self._finalizer = weakref.finalize(self, _end, self._child)
        answer = self._exchange(json.dumps(self._hello).encode("ascii") + b"\n")
        if "error" in answer:
            self._stop()
            raise ModelError(f"{self._name}: the chat template cannot be used: {answer['error']}")

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None

    def _exchange(self, line: bytes) -> dict[str, str]:
        """Send one line and read one. The kernel kills a child that exceeds its CPU limit."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):  # the child exited, which the empty answer below detects
            child.stdin.write(line)
            child.stdin.flush()
        answer = child.stdout.readline()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        status = child.wait()
        self._stop()
        if status == -signal.SIGPROF:
            return {"error": f"rendering took more than {self._hello['cpu_limit_s']} s of CPU time"}
        return {"ended": "", "error": f"the rendering process exited with status {status}"}


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # unsent data has no reader any more
                pipe.close()


def _strings(value: Any) -> Iterator[str]:
    """Yield every string value at any depth. Keys do not count: they belong to the template."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _marked(value: Any, literal: re.Pattern[str], start: str, end: str) -> Any:
    """Return a copy with marks around each match and the adjacent blanks.

    The text itself is kept, so that a template can search for it (`</think>`). Blanks go inside the marks, so that a
    template that splits there can strip them from the ends of the pieces. Blanks at the ends of the whole string stay
    outside for the same reason.
    """
    if isinstance(value, str):
        return _mark_string(value, literal, start, end)
    if isinstance(value, Mapping):
        return {key: _marked(inner, literal, start, end) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(inner, literal, start, end) for inner in value]
    return value


def _mark_string(text: str, literal: re.Pattern[str], start: str, end: str) -> str:
    pieces: list[str] = []
    at = 0
    while match := literal.search(text, at):
        before = text[at : match.start()]
        kept = before.rstrip() if pieces or before.strip() else before
        after = text[match.end() : match.end() + _MAX_BLANKS]
        num_blanks = len(after) - len(after.lstrip())
        stop = match.end() + num_blanks if num_blanks < len(after) else match.end()
        pieces += [kept, start, before[len(kept) :], match[0], text[match.end() : stop], end]
        at = stop
    return "".join([*pieces, text[at:]])


def _unused_marks(texts: list[str]) -> tuple[str, str, str]:
    """Return three private-use characters that occur in none of the texts, neither directly nor as a JSON escape."""
    unused = (
        mark
        for mark in map(chr, range(0xE000, 0xF900))
        if not any(mark in text or _escaped(mark) in text for text in texts)
    )
    first, second, third = next(unused, None), next(unused, None), next(unused, None)
    if first is None or second is None or third is None:
        raise ChatTemplateError("the messages contain every private-use character")
    return first, second, third


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _segments(rendered: str, literal: re.Pattern[str], start: str, end: str) -> Iterator[tuple[str, bool]]:
    """Split at the marks. If a template has separated a pair (split, slices), a single mark is dropped but still
    splits.
    """
    pair = re.compile(f"{start}(\\s*(?:{literal.pattern})\\s*){end}|[{start}{end}]")
    at = 0
    for match in pair.finditer(rendered):
        if match.start() > at:
            yield rendered[at : match.start()], False
        if match[1] is not None:
            yield match[1], True
        at = match.end()
    if at < len(rendered):
        yield rendered[at:], False
