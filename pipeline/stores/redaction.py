"""Redaction of urls and of library messages: no user names and passwords, no signatures of web addresses, no secret
storage options."""

import re
from collections.abc import Mapping
from typing import Any

MIN_SECRET = 4  # characters; shorter texts occur in other words
_USER = re.compile(r"([A-Za-z][\w+.-]*)://([^/?#\s'\"<>]*)@")
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")  # container@account: the part before the @ is not a user
_QUERY = re.compile(r"(https?://[^\s?'\"<>]*)\?[^\s'\"<>]*", re.IGNORECASE)
_SECRET = re.compile(r"auth|cookie|credential|key|passw|pwd|sas|secret|sign|token|connection_string", re.IGNORECASE)


def shown_url(url: str) -> str:
    """Return a path or url without user and password, and without the query of a web address, which may be a
    signature."""
    return re.sub(r"(https?://[^?]*)\?.*", r"\1", _USER.sub(_without_user, url), flags=re.IGNORECASE | re.DOTALL)


def error_text(error: BaseException, secrets: frozenset[str] = frozenset()) -> str:
    """Return an error's class and message on one line, redacted. secrets: from `secrets_of`."""
    return redacted(f"{type(error).__name__}: {error}", secrets)


def redacted(text: str, secrets: frozenset[str] = frozenset()) -> str:
    """Return a library's text on one line, redacted."""
    text = " ".join(text.split())
    for secret in sorted(secrets, key=len, reverse=True):  # a secret may be part of another
        text = text.replace(secret, "***")
    return _QUERY.sub(r"\1", _USER.sub(_without_user, text))


def secrets_of(options: Mapping[str, Any], inside: bool = False) -> frozenset[str]:
    """Return the values of storage options that must not be shown. inside: `options` belong to a secret option."""
    found: set[str] = set()
    for name, value in options.items():
        secret = inside or bool(_SECRET.search(str(name)))
        if isinstance(value, Mapping):
            found |= secrets_of(value, secret)
        elif secret and isinstance(value, str) and len(value) >= MIN_SECRET:
            found.add(value)
    return frozenset(found)


def _without_user(match: re.Match[str]) -> str:
    scheme, user = match.groups()
    return match[0] if scheme.lower() in _CONTAINERS and ":" not in user else f"{scheme}://"
