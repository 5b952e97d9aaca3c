"""What people are shown: text made safe for a terminal, durations, sizes, counts, a line of progress every few seconds.

A terminal obeys control characters: they could clear the screen, set its title or hide what was said. Bidirectional
overrides show text in another order than it has. So text from data, file names and libraries is spelled out where it
leaves the program; what is written as data stays what it is.
"""

import re
import textwrap
import time
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from itertools import groupby

SAY_EVERY_S = 5.0  # between two lines of progress

# Any character that may have to be spelled out; `str.isprintable` decides.
_SUSPECT = re.compile(r"[^ -~]")
_GAP = re.compile(r"\S {2,}(?=\S)")  # between two columns
_COLUMN = re.compile(r"x(?: ?x)*")
_TABLE_GAPS = 4  # in each line of a table; lines with fewer end in a sentence
_FIRST_COLUMN = re.compile(r" *(\||\S+ ) +(?=\S)")  # of a line with two or more: a label, or the mark of a quotation


def printable(text: str) -> str:
    """On one line: control characters, line breaks, tabs and other characters that show nothing of themselves are
    spelled out (`\\x1b`, `\\n`, `\\u202e`)."""
    return _SUSPECT.sub(_spelled, text)


def printable_lines(text: str) -> str:
    """As `printable`, for a text of our own over several lines: its line breaks and tabs stay."""
    return _SUSPECT.sub(lambda match: match[0] if match[0] in "\n\t" else _spelled(match), text)


def printable_json(text: str) -> str:
    """JSON without line breaks that means the same, and shows no such characters: they are JSON's own escapes."""
    return _SUSPECT.sub(lambda match: match[0] if match[0].isprintable() else _json_escape(match[0]), text)


def fitted(text: str, width: int) -> str:
    """A text of our own for a terminal of so many columns. Bars that do not fit are left out. A table that is wider
    goes on below: its first column again, and the columns that had no room. Other longer lines go on under their second
    column; a word that is longer stays whole."""
    found: list[str] = []
    for is_table, group in groupby(text.split("\n"), lambda line: len(_GAP.findall(line)) >= _TABLE_GAPS):
        lines = list(group)
        found += _in_blocks(lines, width) if is_table else lines
    return "\n".join(line if len(line) <= width else _wrapped(line, width) for line in found)


def _in_blocks(lines: list[str], width: int) -> list[str]:
    """The lines of a table, as they are where they or their columns do not fit."""
    bare = [line.rstrip("█ ") for line in lines]
    longest = max(map(len, bare))
    if longest <= width:
        return lines
    blank = "".join(" " if all(line[i : i + 1] in ("", " ") for line in bare) else "x" for i in range(longest))
    first, *others = [match.span() for match in _COLUMN.finditer(blank)]
    columns = [[line[start:end].ljust(end - start) for line in bare] for start, end in others]
    label = [line[: first[1]].ljust(first[1]) for line in bare]
    blocks, room = [label], width - len(label[0])
    for column in columns:
        taken = len(column[0]) + 2
        if taken > room and blocks[-1] is not label:
            blocks, room = [*blocks, label], width - len(label[0])
        if taken > room:
            return lines
        blocks[-1] = [f"{before}  {cell}" for before, cell in zip(blocks[-1], column, strict=True)]
        room -= taken
    return [line.rstrip() for number, block in enumerate(blocks) for line in ([""] * (number > 0) + block)]


def _wrapped(line: str, width: int) -> str:
    line = line.rstrip("█ ")
    body, first = line.lstrip(), _FIRST_COLUMN.match(line)
    margin = len(line) - len(body)
    return textwrap.fill(
        body,
        width,
        initial_indent=" " * margin,
        subsequent_indent=" " * min(len(first[0]) if first else margin, width // 2),
        replace_whitespace=False,
        expand_tabs=False,
        break_on_hyphens=False,
        break_long_words=False,
    )


def duration(seconds: float) -> str:
    """A time as coarse as a guess should be: `40 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    if seconds < 90:
        return f"{max(0, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def counted(number: int, noun: str) -> str:
    """`1 row`, `2,048 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """What somebody who wrote `name` may have meant."""
    return next(iter(get_close_matches(name, list(names), n=1)), None)


def shown_bytes(num_bytes: int) -> str:
    """`900 bytes`, `1.2 kB`, `35.0 MB`, `1.5 GB`."""
    scaled = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if scaled < 1000:
            return f"{scaled:.0f} {unit}" if unit == "bytes" else f"{scaled:.1f} {unit}"
        scaled /= 1000
    return f"{scaled:,.1f} TB"


class Remaining:
    """`remaining(done)` tells `say`, every few seconds: "what: 12 of 40, 30% (about 2 min left)", and `more` after it.

    first: how much was done before, by work that does not show how fast this is.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        what: str,
        total: int,
        first: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._what, self._total, self._first, self._clock = say, what, total, first, clock
        self._began = self._said = clock()

    def __call__(self, done: int, more: str = "") -> None:
        now = self._clock()
        if now < self._said + SAY_EVERY_S or not self._first < done < self._total:
            return
        self._said = now
        left = duration((now - self._began) / (done - self._first) * (self._total - done))
        share = f"{done:,} of {self._total:,}, {done / self._total:.0%}"
        self._say(f"{self._what}: {share} (about {left} left){more and f', {more}'}")


def _spelled(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else match[0].encode("unicode_escape").decode()


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
