"""A job's `vars`: names that a job file declares, and the value that each has in this run.

They are for the paths of scheduled jobs, `output: {path: "out/${date}"}`. A value comes from `--var`, else from the
job file: a text, or the date of today in a given time zone. It is a name, never a path: a scheduler cannot lead a job
elsewhere.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from zoneinfo import ZoneInfo

from pydantic import Field

from pipeline.config.jobfile import Document, JobFileError, Mistake
from pipeline.config.values import Section
from pipeline.machine.host import zone_time

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+@-]{0,199}")

Now = Callable[[ZoneInfo], datetime]


class TodaySection(Section):
    """A variable that is the date of the day on which the run begins."""

    today: str = Field(description="The time zone whose date it is.", examples=["Europe/Berlin"])


def moment_of(flag: str | None) -> Now:
    """The time that `--logical-date` gives, in any zone; the clock's where it is None. Raises JobFileError."""
    if flag is None:
        return zone_time
    try:
        moment = datetime.fromtimestamp(int(flag[1:]), UTC) if flag[:1] == "@" else datetime.fromisoformat(flag)
        if moment.tzinfo is None or not MINYEAR < moment.year < MAXYEAR:  # else some zone has no date for it
            raise ValueError
        return moment.astimezone
    except (ValueError, OverflowError, OSError):
        example = "Example: --logical-date 2026-11-24T02:00+01:00, or @ and seconds since 1970"
        raise JobFileError([Mistake(f"--logical-date {flag}", "", "expected a time with its zone", example)]) from None


def given_on(flags: Iterable[str]) -> dict[str, str]:
    """`--var NAME=VALUE`, by name. Raises JobFileError."""
    given = {}
    for flag in flags:
        name, equals, value = flag.partition("=")
        if not equals or not name:
            example = "Example: --var date=2026-11-20"
            raise JobFileError([Mistake(f"--var {flag}", "", "expected NAME=VALUE", example)])
        given[name] = value
    return given


def values_of(document: Document, given: Mapping[str, str], now: Now) -> tuple[dict[str, str], list[Mistake]]:
    """Each declared variable that has a value, and what is wrong with the others."""
    declared = document.data.get("vars")
    declared = declared if isinstance(declared, dict) else {}
    known = f"Declared: {', '.join(map(str, declared)) or 'none'}."
    mistakes = [Mistake("--var", name, "is not declared in the job file", known) for name in given.keys() - declared]
    values = {}
    for name, default in declared.items():
        try:
            values[name] = _value(name, given.get(name, default), now)
        except ValueError as error:
            where = "--var" if name in given else document.where(("vars", name))
            what, hint = error.args
            mistakes.append(Mistake(where, f"vars.{name}", what, hint))
    return values, mistakes


def _value(name: str, value: object, now: Now) -> str:
    """Raises ValueError with what is wrong and what to do."""
    if _NAME.fullmatch(name) is None:
        raise ValueError("is no name of a variable", "It has letters, digits and _ alone, and begins with no digit.")
    if value is None:
        raise ValueError("has no value", f"Give --var {name}=...; or name the output folder.")
    if isinstance(value, dict) and value.keys() == {"today"}:
        try:
            return now(ZoneInfo(str(value["today"]))).date().isoformat()
        except (OSError, ValueError, KeyError):  # ZoneInfoNotFoundError is a KeyError
            raise ValueError(f"{value['today']!r} is no time zone", "Example: Europe/Berlin") from None
    if not isinstance(value, str):
        raise ValueError("expected a text, {today: ZONE} or null", 'Numbers are put in quotes: "7".')
    if _VALUE.fullmatch(value) is None or ".." in value:
        hint = "It begins with a letter or digit and goes on with these and . _ = + @ - alone; it is no path."
        raise ValueError(f"{value!r} cannot be part of a path", hint)
    return value
