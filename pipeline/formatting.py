"""Text for people: escaping for terminals, durations, percentages, money, sizes, tables and progress lines.

Control characters could clear a terminal's screen, set its title or hide output, and bidirectional overrides reorder
text. Text from data, file names and libraries is therefore escaped when it is printed. Data files keep it unchanged.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from io import StringIO
from math import floor, log10

MIN_WIDTH, MAX_WIDTH = 40, 10_000  # of a table, in characters
PROGRESS_INTERVAL_S = 5.0  # between two lines of progress

# Candidates for escaping; `str.isprintable` decides.
_SUSPECT = re.compile(r"[^ -~]")


def printable(text: str) -> str:
    """Return `text` on one line, with control characters, line breaks, tabs and other unprintable characters escaped
    (`\\x1b`, `\\n`, `\\u202e`)."""
    return _SUSPECT.sub(_escape, text)


def printable_lines(text: str) -> str:
    """Return `text` escaped as by `printable`, except for line breaks and tabs."""
    return _SUSPECT.sub(lambda match: match[0] if match[0] in "\n\t" else _escape(match), text)


def printable_json(text: str) -> str:
    """Return equivalent JSON with unprintable characters as JSON escapes. `text` must have no line breaks."""
    return _SUSPECT.sub(lambda match: match[0] if match[0].isprintable() else _json_escape(match[0]), text)


def duration(seconds: float) -> str:
    """Return a duration, rounded: `850 ms`, `12.3 s`, `4 min 05 s`, `12 min`, `3 h 05 min`, `2 d 04 h`."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if 0 < seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    if seconds < 599.5:
        return _two_units(round(seconds), 60, "min", "s")
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return _two_units(minutes, 60, "h", "min") if minutes < 48 * 60 else _two_units(minutes // 60, 24, "d", "h")


def _two_units(small: int, in_large: int, large_unit: str, small_unit: str) -> str:
    large, rest = divmod(small, in_large)
    return f"{large} {large_unit} {rest:02} {small_unit}" if rest else f"{large} {large_unit}"


def percent(share: float) -> str:
    """Return a percentage: `5%`, `62.3%`."""
    return f"{share * 100:.1f}".removesuffix(".0") + "%"


def money(usd: float | None) -> str:
    """Return US dollars, with three significant digits below one dollar. None is `unpriced`, never 0."""
    if usd is None:
        return "unpriced"
    if usd < 0:
        return f"-{money(-usd)}"
    cents = usd * 100
    if usd == 0 or usd >= 1 or (cents > 0.5 and abs(cents - round(cents)) < 1e-9):
        return f"${usd:,.2f}"
    return f"${usd:.{2 - floor(log10(usd))}f}"


def table(
    rows: Iterable[Sequence[str]],
    *,
    head: Sequence[str] = (),
    sides: str = "<",
    width: int | None = None,
    indent: int = 0,
) -> str:
    """Return lines of aligned columns. Cells that do not fit into `width` characters fold inside their column.

    sides: `<` or `>` for each column; the last one also applies to all further columns.
    width: None uses the width of the cells.
    """
    from rich.console import Console  # takes 40 ms; commands without a table skip it
    from rich.table import Table
    from rich.text import Text

    lines = [list(map(printable, row)) for row in rows]
    grid = Table(box=None, show_header=any(head), header_style="", padding=(0, 2, 0, 0), pad_edge=False)
    for i in range(len(lines[0] if lines else head)):
        justify = "right" if sides[min(i, len(sides) - 1)] == ">" else "left"
        grid.add_column(Text(head[i] if head else ""), justify=justify, overflow="fold")
    for line in lines:
        grid.add_row(*map(Text, line))
    drawn = StringIO()
    Console(file=drawn, width=MAX_WIDTH if width is None else max(MIN_WIDTH, width) - indent).print(grid)
    return "\n".join(" " * indent + line.rstrip() for line in drawn.getvalue().splitlines())


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: `1 row`, `2,048 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to `name`, for a "did you mean" hint, or None."""
    return next(iter(get_close_matches(name, list(names), n=1)), None)


def shown_bytes(num_bytes: int) -> str:
    """Return a size: `900 bytes`, `1.2 kB`, `35.0 MB`, `1.5 GB`."""
    scaled = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if scaled < 1000:
            return f"{scaled:.0f} {unit}" if unit == "bytes" else f"{scaled:.1f} {unit}"
        scaled /= 1000
    return f"{scaled:,.1f} TB"


class Remaining:
    """Progress logger. `remaining(done, more)` logs "title: 12 of 40, 30% (about 2 min left), more" every few seconds.

    first: amount done before, which is excluded from the speed.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        title: str,
        total: int,
        first: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._title, self._total, self._first, self._clock = log, title, total, first, clock
        self._began = self._logged = clock()

    def __call__(self, done: int, more: str = "") -> None:
        now = self._clock()
        if now < self._logged + PROGRESS_INTERVAL_S or not self._first < done < self._total:
            return
        self._logged = now
        left = duration(round((now - self._began) / (done - self._first) * (self._total - done)))
        share = f"{done:,} of {self._total:,}, {percent(done / self._total)}"
        self._log(f"{self._title}: {share} (about {left} left){more and f', {more}'}")


def _escape(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else match[0].encode("unicode_escape").decode()


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
