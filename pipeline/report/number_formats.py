"""Numbers as reports write them: times, money, shares, bars, and columns of them."""

from collections.abc import Sequence
from math import floor, log10

BAR_WIDTH = 30


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A text bar of a share; what is written as more than 0.0 % shows."""
    return "█" * max(round(share * width), 1 if share >= 0.0005 else 0)


def seconds(us: int) -> str:
    """A duration to read: `850 ms`, `12.3 s`, `4 m 05 s`, `2 h 07 m`."""
    if us < 0:
        return f"-{seconds(-us)}"
    s = us / 1e6
    if s < 1:
        return f"{us / 1e3:.0f} ms"
    if s < 99.95:
        return f"{s:.1f} s"
    minutes, rest = divmod(round(s), 60)
    return f"{minutes} m {rest:02} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} m"


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


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def aligned(rows: Sequence[Sequence[str]], num_left: int = 1, sides: str | None = None) -> list[str]:
    """A line for each row, in columns as wide as they must be, with two blanks between them. The first `num_left` are
    aligned to the left, the others to the right; or each as `sides` says, with a `<` or `>` for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = sides or "<" * num_left + ">" * len(widths)
    return ["  ".join(f"{cell:{side}{w}}" for cell, side, w in zip(row, sides, widths)).rstrip() for row in rows]
