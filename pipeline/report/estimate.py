"""Comparison of the estimate made before a job ran (`_pipeline/plan.json`) with the actual figures.

Times are in whole microseconds, money in US dollars.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

from pipeline.prices import Prices
from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.run_record import PHASES, RunRecord

MIN_SHARE = 0.01  # min expected share of the machine time for which a phase has a ratio


@dataclass(frozen=True)
class Interval:
    """Range of an estimate: low <= expected <= high."""

    low: float
    expected: float
    high: float

    def times(self, factor: float) -> "Interval":
        return Interval(self.low * factor, self.expected * factor, self.high * factor)

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(self.low + other.low, self.expected + other.expected, self.high + other.high)


@dataclass(frozen=True)
class Estimate(JsonRecord):
    """Estimate for the rows that remained after `runs_before` runs. phases_us: expected machine time. hourly_usd,
    usd_per_million: declared prices, as in `RunRecord`. speeds_from, lengths_from: sources, for display."""

    made_at: str
    runs_before: int
    rows: int
    prompt_tokens: Interval  # computed, without cached ones
    cached_tokens: float
    generated_tokens: Interval
    machine_us: Interval
    wall_us: Interval
    phases_us: dict[str, int] = field(default_factory=dict)
    hourly_usd: float | None = None
    speeds_from: str = ""
    lengths_from: str = ""
    actors: int = 1
    job: str = ""  # digest of the job's identity without dates
    usd_per_million: dict[str, float] = field(default_factory=dict)

    @property
    def usd(self) -> Interval | None:
        """Price of the machine time and of a server's tokens; None without a declared price."""
        prices = Prices(self.hourly_usd, self.usd_per_million)
        if not prices.are_declared:
            return None
        bounds = zip(astuple(self.machine_us), astuple(self.prompt_tokens), astuple(self.generated_tokens))
        cached = self.cached_tokens
        return Interval(
            *(
                prices.machine_usd(us) + prices.prompt_usd(computed + cached, cached) + prices.generated_usd(generated)
                for us, computed, generated in bounds
            )
        )


@dataclass(frozen=True)
class Compared:
    """Expected and actual value of one figure, and actual / expected (None if almost nothing was expected)."""

    what: str
    expected: float
    actual: float
    ratio: float | None

    @classmethod
    def from_values(cls, what: str, expected: float, actual: float, min_expected: float = 1e-12) -> "Compared":
        return cls(what, expected, actual, actual / expected if expected >= min_expected else None)


@dataclass(frozen=True)
class EstimateAndActual:
    """Estimate and the actual figures of the runs since. lines: rows, tokens, machine time in total and by phase, wall
    time, and cost."""

    estimate: Estimate
    lines: tuple[Compared, ...]

    @property
    def ratio(self) -> float | None:
        """Actual over expected machine time."""
        return next(line.ratio for line in self.lines if line.what == "machine_us")


def compare(
    estimate: Estimate, runs: Sequence[RunRecord], accounts: Sequence[Mapping[str, int]]
) -> EstimateAndActual | None:
    """Compare an estimate with the runs since; None if these used no machine time. runs, accounts: all runs of the job
    in order, and their machine time by phase."""
    since = runs[estimate.runs_before :]
    machine_us = sum(run.machine_us for run in since)
    if not machine_us:
        return None
    lines = [
        Compared.from_values("rows", estimate.rows, sum(run.rows_written for run in since)),
        Compared.from_values(
            "prompt_tokens", estimate.prompt_tokens.expected, sum(run.input_tokens - run.cached_tokens for run in since)
        ),
        Compared.from_values(
            "generated_tokens", estimate.generated_tokens.expected, sum(run.generated_tokens for run in since)
        ),
        *(
            Compared.from_values(
                phase,
                estimate.phases_us.get(phase, 0),
                sum(account[phase] for account in accounts[estimate.runs_before :]),
                min_expected=estimate.machine_us.expected * MIN_SHARE,
            )
            for phase in PHASES
        ),
        Compared.from_values("machine_us", estimate.machine_us.expected, machine_us),
        Compared.from_values("wall_us", estimate.wall_us.expected, sum(run.wall_us for run in since)),
    ]
    if estimate.usd is not None:
        actual = sum(run.usd for run in since)
        lines.append(Compared.from_values("usd", estimate.usd.expected, actual))
    return EstimateAndActual(estimate, tuple(lines))
