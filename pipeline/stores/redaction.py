"""What a message may show of urls, and of what the libraries of stores and disks say: no user with a password, no
signature of a web address, no storage option that is a secret."""

import re
from collections.abc import Mapping
from typing import Any

_WHO = re.compile(r"([A-Za-z][\w+.-]*)://([^/?#\s'\"<>]*)@")
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")  # container@account: what stands there alone is no user
_QUERY = re.compile(r"(https?://[^\s?'\"<>]*)\?[^\s'\"<>]*", re.IGNORECASE)
_SECRET = re.compile(r"auth|cookie|credential|key|passw|pwd|sas|secret|sign|token|connection_string", re.IGNORECASE)


def shown_url(url: str) -> str:
    """A path or url as it may be shown: without user and password, and without the query of a web address, which may be
    a signature."""
    return re.sub(r"(https?://[^?]*)\?.*", r"\1", _WHO.sub(_without_user, url), flags=re.IGNORECASE | re.DOTALL)


def said(error: BaseException, secrets: frozenset[str] = frozenset()) -> str:
    """An error's class and text on one line, as it may be shown. `secrets`: of `secrets_of`."""
    return redacted(f"{type(error).__name__}: {error}", secrets)


def redacted(text: str, secrets: frozenset[str] = frozenset()) -> str:
    """A library's text on one line, as it may be shown."""
    text = " ".join(text.split())
    for secret in sorted(secrets, key=len, reverse=True):  # one may be a piece of another
        text = text.replace(secret, "***")
    return _QUERY.sub(r"\1", _WHO.sub(_without_user, text))


def secrets_of(options: Mapping[str, Any], inside: bool = False) -> frozenset[str]:
    """The texts among storage options that must not be shown. `inside`: of an option that is a secret."""
    found: set[str] = set()
    for name, value in options.items():
        secret = inside or bool(_SECRET.search(str(name)))
        if isinstance(value, Mapping):
            found |= secrets_of(value, secret)
        elif secret and isinstance(value, str) and len(value) >= 4:
            found.add(value)
    return frozenset(found)


def _without_user(match: re.Match[str]) -> str:
    scheme, who = match.groups()
    return match[0] if scheme.lower() in _CONTAINERS and ":" not in who else f"{scheme}://"
