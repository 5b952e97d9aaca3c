"""A job's `vars`: variables for the paths of scheduled jobs, `output: {path: "out/${date}"}`.

A value comes from `--var`, else from the job file: a text, or today's date in a time zone. It must be a plain name, not
a path, so that a scheduler cannot redirect a job.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from zoneinfo import ZoneInfo

from pydantic import Field

from pipeline.config.jobfile import Document, JobFileError, Mistake
from pipeline.config.values import ConfigSection
from pipeline.machine.host import zone_time

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+@-]{0,199}")

Now = Callable[[ZoneInfo], datetime]


class TodaySection(ConfigSection):
    """Variable with the date on which the run starts."""

    today: str = Field(description="Time zone of the date.", examples=["Europe/Berlin"])


def moment_of(flag: str | None) -> Now:
    """Return a clock that is fixed to `--logical-date`, or the real clock for None. Raises JobFileError."""
    if flag is None:
        return zone_time
    try:
        moment = datetime.fromtimestamp(int(flag[1:]), UTC) if flag[:1] == "@" else datetime.fromisoformat(flag)
        if moment.tzinfo is None or not MINYEAR < moment.year < MAXYEAR:  # else some time zone has no date for it
            raise ValueError
        return moment.astimezone
    except (ValueError, OverflowError, OSError):
        example = "Example: --logical-date 2026-11-24T02:00+01:00, or @ and seconds since 1970"
        raise JobFileError([Mistake(f"--logical-date {flag}", "", "expected a time with its zone", example)]) from None


def given_on(flags: Iterable[str]) -> dict[str, str]:
    """Parse `--var NAME=VALUE` flags. Raises JobFileError."""
    given = {}
    for flag in flags:
        name, equals, value = flag.partition("=")
        if not equals or not name:
            example = "Example: --var date=2026-11-20"
            raise JobFileError([Mistake(f"--var {flag}", "", "expected NAME=VALUE", example)])
        given[name] = value
    return given


def values_of(document: Document, given: Mapping[str, str], now: Now) -> tuple[dict[str, str], list[Mistake]]:
    """Return the values of declared variables, and the mistakes of the others."""
    declared = document.data.get("vars")
    declared = declared if isinstance(declared, dict) else {}
    known = f"Declared: {', '.join(map(str, declared)) or 'none'}."
    mistakes = [Mistake("--var", name, "is not declared in the job file", known) for name in given.keys() - declared]
    values = {}
    for name, default in declared.items():
        try:
            values[name] = _value(name, given.get(name, default), now)
        except ValueError as error:
            location = "--var" if name in given else document.location(("vars", name))
            problem, hint = error.args
            mistakes.append(Mistake(location, f"vars.{name}", problem, hint))
    return values, mistakes


def _value(name: str, value: object, now: Now) -> str:
    """Return a variable's value. Raises ValueError with the problem and a hint."""
    if _NAME.fullmatch(name) is None:
        raise ValueError("is not a valid variable name", "Use letters, digits and _, and begin with a letter or _.")
    if value is None:
        raise ValueError("has no value", f"Pass --var {name}=..., or name the output folder.")
    if isinstance(value, dict) and value.keys() == {"today"}:
        try:
            return now(ZoneInfo(str(value["today"]))).date().isoformat()
        except (OSError, ValueError, KeyError):  # ZoneInfoNotFoundError is a KeyError
            raise ValueError(f"{value['today']!r} is not a time zone", "Example: Europe/Berlin") from None
    if not isinstance(value, str):
        raise ValueError("expected a text, {today: ZONE} or null", 'Quote numbers: "7".')
    if _VALUE.fullmatch(value) is None or ".." in value:
        hint = "Use letters, digits and . _ = + @ -, and begin with a letter or digit; it cannot be a path."
        raise ValueError(f"{value!r} cannot be part of a path", hint)
    return value
