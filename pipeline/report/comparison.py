"""Comparison of two reports, figure by figure."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.formatting import duration, money, percent, table
from pipeline.report.record.run_record import PHASES
from pipeline.report.run_report import RunReport

_FORMATS: dict[str, Callable[[float], str]] = {
    "count": lambda value: f"{value:,.0f}",
    "us": lambda value: duration(value / 1e6),
    "usd": money,
    "share": percent,
}
# (label, kind, function of the report; it returns None if the figure is unknown)
_FIGURES: list[tuple[str, str, Callable[[RunReport], float | None]]] = [
    ("rows", "count", lambda report: report.rows.written),
    ("error rows", "count", lambda report: report.rows.errors),
    ("prompt tokens computed", "count", lambda report: report.tokens.computed),
    ("generated tokens", "count", lambda report: report.tokens.generated),
    ("time", "us", lambda report: report.wall_us),
    ("machine time", "us", lambda report: report.machine_us),
    *((f"  {phase}", "us", lambda report, phase=phase: report.phases_us[phase]) for phase in PHASES),
    ("batch efficiency", "share", lambda report: report.batch_efficiency),
    ("generated tokens/s", "count", lambda report: report.generated_tokens_per_s),
    ("cost", "usd", lambda report: report.cost.total_usd),
    ("  1M prompt tokens", "usd", lambda report: report.cost.per_1m_prompt_usd),
    ("  1M generated tokens", "usd", lambda report: report.cost.per_1m_generated_usd),
    ("  a row", "usd", lambda report: report.cost.per_row_usd),
]


@dataclass(frozen=True)
class Figure:
    """Figure of two reports; None if unknown. kind: count, us (microseconds), usd or share."""

    what: str
    kind: str
    before: float | None
    after: float | None
    ratio: float | None


@dataclass(frozen=True)
class Comparison:
    """Comparison of two reports."""

    names: tuple[str, str]
    figures: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self, width: int | None = None) -> str:
        rows = []
        for each in self.figures:
            both = ("unknown" if v is None else _FORMATS[each.kind](v) for v in (each.before, each.after))
            rows.append([each.what, *both, "" if each.ratio is None else f"{each.ratio:.2f}"])
        return table(rows, head=["", *self.names, "ratio"], sides="<>", width=width)


def compare_reports(names: tuple[str, str], before: RunReport, after: RunReport) -> Comparison:
    """Compare two reports."""
    figures = []
    for what, kind, figure in _FIGURES:
        a, b = figure(before), figure(after)
        if a or b or not what.startswith("  "):  # skip phases that took no time in either report
            figures.append(Figure(what, kind, a, b, b / a if a and b is not None else None))
    return Comparison(names, tuple(figures))
