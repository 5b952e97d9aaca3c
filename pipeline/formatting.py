"""Text for people: made safe for a terminal; durations, shares, money, sizes, tables, lines of progress.

A terminal obeys control characters: they could clear the screen, set its title or hide what was said. Bidirectional
overrides show text in another order than it has. So text from data, file names and libraries is spelled out where it
leaves the program; what is written as data stays what it is.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from io import StringIO
from math import floor, log10

MIN_WIDTH, MAX_WIDTH = 40, 10_000  # of a table, in characters
SAY_EVERY_S = 5.0  # between two lines of progress

# Any character that may have to be spelled out; `str.isprintable` decides.
_SUSPECT = re.compile(r"[^ -~]")


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


def duration(seconds: float) -> str:
    """Return a time with about three digits: `850 ms`, `12.3 s`, `4 min 05 s`, `12 min`, `3 h 05 min`, `2 d 04 h`."""
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
    """`5%`, `62.3%`."""
    return f"{share * 100:.1f}".removesuffix(".0") + "%"


def money(usd: float | None) -> str:
    """US dollars with three significant digits below one dollar; no price is `unpriced`, never 0."""
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

    sides: `<` or `>` for each column; the last one given holds for all columns after it.
    width: None is as wide as the cells are.
    """
    from rich.console import Console  # takes 40 ms, which commands without a table save
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
        left = duration(round((now - self._began) / (done - self._first) * (self._total - done)))
        share = f"{done:,} of {self._total:,}, {percent(done / self._total)}"
        self._say(f"{self._what}: {share} (about {left} left){more and f', {more}'}")


def _spelled(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else match[0].encode("unicode_escape").decode()


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
