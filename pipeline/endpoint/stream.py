"""Answers that arrive as server-sent events, assembled to the form of one that arrives at once."""

import json
from typing import Any

from pipeline.endpoint.errors import BadAnswer, one_line


class StreamedAnswer:
    """An answer that arrives in pieces."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}
        self._answer: dict[str, Any] = {}
        self._data = b""  # of an event whose JSON continues in the next line
        self._is_complete = False

    @property
    def has_failed(self) -> bool:
        """True if the server reported an error in a piece; nothing useful follows it."""
        return bool(self._answer.get("error")) or self._answer.get("object") == "error"

    def add(self, line: bytes) -> int:
        """Add a line of server-sent events. Return the number of pieces of text in it. Raises BadAnswer."""
        if not line.startswith(b"data:"):
            if self._data and not line.strip():  # the event ends
                raise BadAnswer(f"a piece of the answer is not JSON: {_shown(self._data)}")
            return 0
        data = line[5:].strip()
        if data == b"[DONE]":
            self._is_complete = True
            return 0
        if not data:
            return 0
        self._data += data
        try:
            piece = json.loads(self._data)
        except ValueError:
            return 0
        data, self._data = self._data, b""
        try:
            return self._add_piece(piece)
        except (TypeError, AttributeError) as error:
            raise BadAnswer(f"a piece of the answer has an unexpected form ({error}): {_shown(data)}") from None

    def _add_piece(self, piece: dict[str, Any]) -> int:
        if piece.get("object") == "error" or piece.get("error"):
            self._answer |= piece
            return 0
        self._answer |= {key: piece[key] for key in ("model", "usage") if piece.get(key)}
        choices = piece.get("choices") or []
        for choice in choices:
            self._add_choice(choice)
        return len(choices)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        index, delta = choice.get("index") or 0, choice.get("delta")
        whole = self._choices.setdefault(index, {"index": index, "finish_reason": None})
        has_ended = whole["finish_reason"] is not None
        whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
        if choice.get("error"):
            whole["error"] = choice["error"]
        if delta is None:
            more = choice.get("text") or ""
            whole["text"] = whole.get("text", "") + more
        else:
            more = _add_delta(whole.setdefault("message", {}), delta)
            if more is None:
                whole["error"] = "it has two tool calls with the same index"
        if has_ended and more:
            whole["error"] = "it continued after its end"  # the usage may still arrive
        if given := choice.get("logprobs"):
            merged = whole.setdefault("logprobs", {})
            for key in given:
                if isinstance(given[key], list):
                    merged.setdefault(key, []).extend(given[key])

    def answer(self) -> dict[str, Any]:
        """Return the answer in the form of one that arrives at once. Raises BadAnswer if it is cut off."""
        if self._data:
            raise BadAnswer(f"a piece of the answer is not JSON: {_shown(self._data)}")
        choices = list(self._choices.values())
        # Some servers end without [DONE].
        if not (self._is_complete or self.has_failed or (choices and all(one["finish_reason"] for one in choices))):
            raise BadAnswer("the answer was cut off")
        return {**self._answer, "choices": choices}


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> bool | None:
    """Add a piece of a message. Return whether it has text; None if it contradicts an earlier one."""
    found = False
    for key in ("content", "refusal", "reasoning_content", "reasoning"):
        if not (given := delta.get(key)):
            continue
        found = True
        if isinstance(given, list) or isinstance(message.get(key), list):  # a list of parts of text and thoughts
            message[key] = _parts(message.get(key) or []) + _parts(given)
        else:
            message[key] = message.get(key, "") + given
    if call := delta.get("function_call"):
        whole = message.setdefault("function_call", {"name": "", "arguments": ""})
        for key in whole:
            whole[key] += call.get(key) or ""
    for call in delta.get("tool_calls") or ():
        if not _add_call(message.setdefault("tool_calls", []), call):
            return None
    return found


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> bool:
    """Add a piece of a tool's call: the first piece has its id and name, each one some of its arguments. Return False
    if its index is another call's."""
    index = piece.get("index", 0)
    call = next((call for call in calls if call["index"] == index), None)
    if call is None:
        calls.append({**piece, "index": index})
        return True
    function, more = call.setdefault("function", {}), (piece.get("function") or {}).get("arguments")
    if more:
        function["arguments"] = (function.get("arguments") or "") + more
    return piece.get("id") in (None, "", call.get("id"))


def _shown(data: bytes) -> str:
    return one_line(data.decode(errors="replace"))
