"""Errors of servers: what an answer with an error means for the row and for the run, and when to send it again."""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime

from pipeline.endpoint.spec import EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.errors import RowError

MAX_MESSAGE = 500
# The server has no room now. Those above 504 are of gateways: Cloudflare, and hosts without a machine for the model.
OVERLOADED = frozenset({408, 425, 429, 498, 502, 503, 504, 520, 521, 522, 523, 524, 529})
_SENTENCES = "error", "message", "detail", "msg", "errors", "error_message"
_KINDS = "code", "type", "error_type", "status", "reason", "param"
_TOO_LONG = re.compile(
    r"context_length|context length|context limit|context window|context size|contextwindow|maximum prompt length"
    r"|maximum model length|max_model_len|input length limit|too many (input )?tokens|string_above_max_length"
    r"|longer than the (model's |maximum )"
    r"|exceeds? the (available |maximum )?(context|number of tokens|max.{0,9} length)"
    r"|(prompt|input|request) (is )?too (long|big|large)|reduce the length|max_new_tokens` must be <="
    r"|inputs` must have less than|inputs must have less than|larger than the model input|number of tokens allowed"
    r"|max_tokens must be at least 1, got 0",  # vLLM: the prompt fills the context
    re.I,
)
_FILTERED = re.compile(
    r"content_filter|content_policy|content management policy|content policy|safety system|responsible_?ai"
    r"|data_inspection_failed|moderation|input was flagged|prohibited_content|guardrail",
    re.I,
)
_NO_MONEY = re.compile(
    r"insufficient_quota|insufficient.{0,9}(balance|credit|fund)|billing_(hard_limit|not_active)"
    r"|credit balance is too low|out of credits|payment.required",
    re.I,
)
# A quotation of the row. An apostrophe begins none.
_QUOTED = re.compile(r"(?<!\w)(['\"]).{8,}?\1(?!\w)", re.S)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class OtherModel(Exception):
    """The answer is that of another model."""


class Overloaded(Exception):
    """The server accepts no request now. wait_s: the time that it asks to wait, if any."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class BadAnswer(Exception):
    """The answer is an error of the server, or cannot be used. The request may be sent again."""


class Unsupported(BadAnswer):
    """The server ignores an option of the request. The next answer would be the same."""


class Rejected(Exception):
    """The server rejects this request, or all requests: the key, the model or the route may be wrong, or it is not
    paid."""

    def __init__(self, status: int, message: str, is_unpaid: bool = False) -> None:
        super().__init__(message)
        self.status, self.is_unpaid = status, is_unpaid


@dataclass(frozen=True)
class Reply:
    """An answer over HTTP. value: its JSON; None if it is none. beginning: of its text, unless `value` shows it."""

    status: int
    headers: Mapping[str, str]
    value: object
    beginning: str = ""

    @classmethod
    def parse(cls, status: int, headers: Mapping[str, str], raw: bytes) -> "Reply":
        try:
            value = json.loads(raw)
        except ValueError:
            value = None
        return cls(status, headers, value, one_line(raw[: 4 * MAX_MESSAGE].decode(errors="replace")))

    @property
    def text(self) -> str:
        """Its beginning on one line, for messages."""
        return self.beginning or one_line(json.dumps(self.value, ensure_ascii=False))

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def message(self) -> str:
        """The sentences of an error, on one line; without one, the text."""
        sentences = list(dict.fromkeys(_sentences(self.value)))
        return one_line(": ".join(sentences)) if sentences else self.text


def one_line(text: str) -> str:
    """Return the beginning of a text on one line."""
    return " ".join(text[: 4 * MAX_MESSAGE].split())[:MAX_MESSAGE] or "(empty)"


def rejection(reply: Reply, request: EndpointRequest) -> Completion:
    """Return the error completion of a row that the server rejects. Raises Overloaded or BadAnswer if the request may
    be sent again, Rejected if all requests may be rejected."""
    status = reply.status
    if reply.is_success:
        status = next((kind for kind in map(_status, _kinds(reply.value)) if kind), 500)
    message, wait_s = reply.message, _wait_s(reply)
    sentences = list(_sentences(reply.value)) or [message]
    cause = " ".join([*map(str, _kinds(reply.value)), *(_QUOTED.sub("", text) for text in sentences)])
    shown = f"the server rejects the request (status {reply.status}): {message}"
    if status == 401:
        raise Rejected(status, message)
    if status == 402 or _NO_MONEY.search(cause):
        raise Rejected(reply.status, message, is_unpaid=True)
    if status == 413 or (status not in OVERLOADED and _TOO_LONG.search(cause)):
        return failed(request, RowError.PROMPT_TOO_LONG, shown)
    if status == 429 and wait_s is None and re.search("request too large", cause, re.I):  # for the limit of a minute
        return failed(request, RowError.PROMPT_TOO_LONG, shown)
    if status < 500 and status not in OVERLOADED and _FILTERED.search(cause):
        return failed(request, RowError.CONTENT_FILTER, shown)
    if status in OVERLOADED:
        raise Overloaded(f"status {status}: {message}", wait_s)
    if status in (403, 404, 405):
        raise Rejected(status, message)
    if status in (400, 422):
        return failed(request, RowError.INVALID_REQUEST, shown)
    raise BadAnswer(f"{'the answer is an error with ' if reply.is_success else ''}status {reply.status}: {message}")


def failed(request: EndpointRequest, code: RowError, message: str) -> Completion:
    """Return an error completion."""
    count = len(request.prompt_token_ids)
    return Completion(request.row_id, [], "", "error", count, error=code.value, error_message=message)


def _sentences(found: object) -> Iterator[str]:
    """Yield the texts of an error in the forms of many servers, without what they echo of the request."""
    if isinstance(found, str) and found.strip():
        yield found
    elif isinstance(found, list):
        for item in found[:3]:
            yield from _sentences(item)
    elif isinstance(found, dict):
        if isinstance(found.get("loc"), list):  # FastAPI
            yield ".".join(map(str, found["loc"]))
        num_found = 0
        for name in _SENTENCES:
            for text in _sentences(found.get(name)):
                num_found += 1
                yield text
        metadata = found.get("metadata")  # OpenRouter: the error of the provider
        if isinstance(metadata, dict) and isinstance(metadata.get("raw"), str):
            yield from _sentences(Reply.parse(500, {}, metadata["raw"].encode()).value or metadata["raw"])
        elif not num_found and found.get("code"):
            yield str(found["code"])


def _kinds(found: object) -> Iterator[str | int]:
    """Yield the codes and types of an error, the outer ones first."""
    if isinstance(found, list):
        found = found[0] if found else None
    if isinstance(found, dict):
        yield from (found[name] for name in _KINDS if isinstance(found.get(name), str | int))
        for name in ("error", "innererror", "detail"):
            yield from _kinds(found.get(name))


def _status(kind: str | int) -> int | None:
    """Return the status that a code of an error is."""
    number = int(kind) if str(kind).isdecimal() else 0
    return number if 400 <= number < 600 else None


def _wait_s(reply: Reply) -> float | None:
    """Return the time that the server asks to wait, in any of the usual headers, or in Google's details."""
    headers = {name.lower(): text.strip() for name, text in reply.headers.items()}
    waits = [_seconds(headers.get("retry-after-ms", ""), 1e-3), _seconds(headers.get("retry-after", ""))]
    if waits == [None, None]:
        resets = {name: text for name, text in headers.items() if "ratelimit" in name and "reset" in name}
        used_up = [name for name in resets if headers.get(name.replace("reset", "remaining")) == "0"]
        found = [wait for name in used_up or resets if (wait := _seconds(resets[name])) is not None]
        # Requests and tokens have limits of their own, by the minute and by the day. Which one refused may be unknown.
        waits = [(max if used_up else min)(found, default=None)]
    error = reply.value.get("error") if isinstance(reply.value, dict) else None
    details = error.get("details") if isinstance(error, dict) else None
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, dict) and isinstance(detail.get("retryDelay"), str):
            waits.append(_seconds(detail["retryDelay"]))
    return max((wait for wait in waits if wait is not None), default=None)


def _seconds(text: str, unit_s: float = 1.0) -> float | None:
    """Return the time in a header: a number, a duration as in 1m30.5s, or a date. None if it is none of these."""
    try:
        number = float(text)
    except ValueError:
        found = _DURATION.findall(text)
        if found and "".join(map("".join, found)) == text:
            return sum(float(count) * _SECONDS[unit] for count, unit in found)
        try:
            date = datetime.fromisoformat(text) if "T" in text[8:12] else parsedate_to_datetime(text)
        except ValueError:
            return None
        return max(0.0, date.timestamp() - time.time())
    if not math.isfinite(number) or number < 0:
        return None
    if number > 1e9:  # a time, in seconds or milliseconds
        return max(0.0, number / (1000 if number > 1e12 else 1) - time.time())
    return number * unit_s
