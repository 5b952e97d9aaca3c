"""Comparison of two reports, the return on a change, and the price of the same tokens at a hosted service.

The formulas are in docs/cost.md.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import ConfigError
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
class Return:
    """Return on a change of the cost per row: US dollars per month, and a one-off effort. payback_months: None without
    savings."""

    rows_per_month: float
    before_usd: float
    after_usd: float
    effort_usd: float
    savings_usd: float
    payback_months: float | None

    def to_text(self) -> str:
        if self.payback_months is None:
            back = "never paid back"
        elif self.payback_months == 0:
            back = "nothing to pay back"
        else:
            back = f"paid back after {self.payback_months:,.1f} months"
        saved = f"{money(abs(self.savings_usd))} {'saved' if self.savings_usd >= 0 else 'more'}"
        return (
            f"At {self.rows_per_month:,.0f} rows per month: {money(self.before_usd)} before, {money(self.after_usd)} "
            f"after, {saved} per month; {money(self.effort_usd)} once, {back}.\n"
            "  savings = rows per month x (cost per row before - after); payback = one-off effort / savings"
        )


@dataclass(frozen=True)
class Comparison:
    """Comparison of two reports. `returns` is the key `return` in JSON."""

    names: tuple[str, str]
    figures: tuple[Figure, ...]
    returns: Return | None = None

    def to_json(self) -> dict[str, Any]:
        raw = asdict(self)
        return {"names": self.names, "figures": raw["figures"], "return": raw["returns"]}

    def to_text(self, width: int | None = None) -> str:
        rows = []
        for each in self.figures:
            both = ("unknown" if v is None else _FORMATS[each.kind](v) for v in (each.before, each.after))
            rows.append([each.what, *both, "" if each.ratio is None else f"{each.ratio:.2f}"])
        text = table(rows, head=["", *self.names, "ratio"], sides="<>", width=width)
        return text if self.returns is None else f"{text}\n\n{self.returns.to_text()}"


def compare_reports(
    names: tuple[str, str],
    before: RunReport,
    after: RunReport,
    rows_per_month: float | None = None,
    effort_usd: float = 0.0,
) -> Comparison:
    """Compare two reports. rows_per_month: computes the return too; raises ConfigError if a report has no cost per
    row."""
    figures = []
    for what, kind, figure in _FIGURES:
        a, b = figure(before), figure(after)
        if a or b or not what.startswith("  "):  # skip phases that took no time in either report
            figures.append(Figure(what, kind, a, b, b / a if a and b is not None else None))
    if rows_per_month is None:
        return Comparison(names, tuple(figures))
    for name, report in zip(names, (before, after)):
        if report.cost.per_row_usd is None:
            raise ConfigError(f"--rows-per-month: {name} has no cost per row; set cost.hourly_usd in its job file")
    before_usd, after_usd = ((report.cost.per_row_usd or 0.0) * rows_per_month for report in (before, after))
    savings = before_usd - after_usd
    payback = effort_usd / savings if savings > 0 else None
    return Comparison(
        names, tuple(figures), Return(rows_per_month, before_usd, after_usd, effort_usd, savings, payback)
    )


@dataclass(frozen=True)
class Hosted:
    """Price of the completed rows at a hosted service, by its prices per million tokens."""

    prompt_usd: float
    generated_usd: float
    total_usd: float
    own_usd: float | None

    @classmethod
    def from_report(cls, report: RunReport, prompt_usd: float, generated_usd: float) -> "Hosted":
        """Price a report's tokens. Cached prompt tokens are charged too."""
        tokens = report.tokens
        total = (tokens.input * prompt_usd + tokens.generated * generated_usd) / 1e6
        return cls(prompt_usd, generated_usd, total, report.cost.total_usd)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self, width: int | None = None) -> str:
        own = "this job is unpriced" if self.own_usd is None else f"this job cost {money(self.own_usd)}"
        if self.own_usd and self.total_usd:
            own += f", {self.own_usd / self.total_usd:.2f} times that"
        return (
            f"A hosted service at {money(self.prompt_usd)} and {money(self.generated_usd)} per 1M prompt and generated "
            f"tokens would cost {money(self.total_usd)}; {own}."
        )
