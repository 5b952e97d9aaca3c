"""Two reports side by side, what a change is worth over the months, and the same tokens at a hosted service's price.

The formulas are in docs/cost.md.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import ConfigError
from pipeline.report.number_formats import aligned, money, percent, seconds
from pipeline.report.record.run_record import PHASES
from pipeline.report.run_report import RunReport


@dataclass(frozen=True)
class Figure:
    """kind: count, us (microseconds), usd, share or rate. None: not known there."""

    what: str
    kind: str
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        return None if not self.before or self.after is None else self.after / self.before

    def shown(self, value: float | None) -> str:
        if value is None:
            return "unknown"
        match self.kind:
            case "us":
                return seconds(round(value))
            case "usd":
                return money(value)
            case "share":
                return percent(value)
        return f"{value:,.0f}"


@dataclass(frozen=True)
class Return:
    """Of a change that takes the cost of a row from one to the other: US dollars a month, and once for the effort.
    payback_months: None where nothing is saved."""

    rows_per_month: float
    before_usd: float
    after_usd: float
    effort_usd: float

    @property
    def savings_usd(self) -> float:
        return self.before_usd - self.after_usd

    @property
    def payback_months(self) -> float | None:
        return self.effort_usd / self.savings_usd if self.savings_usd > 0 else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"savings_usd": self.savings_usd, "payback_months": self.payback_months}

    def to_text(self) -> list[str]:
        if self.payback_months is None:
            back = "it is never paid back"
        elif self.payback_months == 0:
            back = "there is nothing to pay back"
        else:
            back = f"paid back after {self.payback_months:,.1f} months"
        return [
            f"At {self.rows_per_month:,.0f} rows a month: {money(self.before_usd)} before, {money(self.after_usd)} "
            f"after, {_saved(self.savings_usd)} a month; {money(self.effort_usd)} once, {back}.",
            "  savings = rows a month x (cost of a row before - after); payback = one-off effort / savings",
        ]


def _saved(usd: float) -> str:
    return f"{money(usd)} saved" if usd >= 0 else f"{money(-usd)} more"


@dataclass(frozen=True)
class Comparison:
    names: tuple[str, str]
    figures: tuple[Figure, ...]
    worth: Return | None = None

    def to_json(self) -> dict[str, Any]:
        figures = [asdict(figure) | {"ratio": figure.ratio} for figure in self.figures]
        return {"names": self.names, "figures": figures, "return": self.worth and self.worth.to_json()}

    def to_text(self) -> str:
        rows = [["", *self.names, "ratio"]]
        for figure in self.figures:
            ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
            rows.append([figure.what, figure.shown(figure.before), figure.shown(figure.after), ratio])
        return "\n".join([*aligned(rows), *([] if self.worth is None else ["", *self.worth.to_text()])])


def compare_reports(
    names: tuple[str, str],
    before: RunReport,
    after: RunReport,
    rows_per_month: float | None = None,
    effort_usd: float = 0.0,
) -> Comparison:
    """rows_per_month: for the return; raises ConfigError where one of the two has no cost of a row."""
    figures = tuple(_figures(before, after))
    if rows_per_month is None:
        return Comparison(names, figures)
    each = before.cost.per_row_usd, after.cost.per_row_usd
    if each[0] is None or each[1] is None:
        nameless = names[each.index(None)]
        raise ConfigError(f"--rows-per-month: {nameless} has no cost of a row; its job declared no cost.hourly_usd")
    return Comparison(
        names, figures, Return(rows_per_month, each[0] * rows_per_month, each[1] * rows_per_month, effort_usd)
    )


def _figures(a: RunReport, b: RunReport) -> Iterator[Figure]:
    yield Figure("rows", "count", a.rows.written, b.rows.written)
    yield Figure("error rows", "count", a.rows.errors, b.rows.errors)
    yield Figure("prompt tokens computed", "count", a.tokens.computed, b.tokens.computed)
    yield Figure("generated tokens", "count", a.tokens.generated, b.tokens.generated)
    yield Figure("time", "us", a.wall_us, b.wall_us)
    yield Figure("machine time", "us", a.machine_us, b.machine_us)
    for phase in PHASES:
        if a.phases_us.get(phase) or b.phases_us.get(phase):
            yield Figure(f"  {phase}", "us", a.phases_us.get(phase, 0), b.phases_us.get(phase, 0))
    yield Figure("batch efficiency", "share", a.batch_efficiency, b.batch_efficiency)
    yield Figure("generated tokens/s", "rate", a.generated_tokens_per_s, b.generated_tokens_per_s)
    yield Figure("cost", "usd", a.cost.total_usd, b.cost.total_usd)
    yield Figure("  1M prompt tokens", "usd", a.cost.per_1m_prompt_usd, b.cost.per_1m_prompt_usd)
    yield Figure("  1M generated tokens", "usd", a.cost.per_1m_generated_usd, b.cost.per_1m_generated_usd)
    yield Figure("  a row", "usd", a.cost.per_row_usd, b.cost.per_row_usd)


@dataclass(frozen=True)
class Hosted:
    """What a service would have taken for the rows that were completed, at its prices of a million tokens."""

    prompt_usd: float
    generated_usd: float
    total_usd: float
    own_usd: float | None

    @classmethod
    def of(cls, report: RunReport, prompt_usd: float, generated_usd: float) -> "Hosted":
        """Prompt tokens are charged whether a cache served them or not."""
        tokens = report.tokens
        total = (tokens.input * prompt_usd + tokens.generated * generated_usd) / 1e6
        return cls(prompt_usd, generated_usd, total, report.cost.total_usd)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        own = "this job is unpriced" if self.own_usd is None else f"this job took {money(self.own_usd)}"
        if self.own_usd and self.total_usd:
            own += f", {self.own_usd / self.total_usd:.2f} times that"
        return (
            f"A hosted service at {money(self.prompt_usd)} and {money(self.generated_usd)} for 1M prompt and generated "
            f"tokens would take {money(self.total_usd)}; {own}."
        )
