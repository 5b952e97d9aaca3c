"""What `pipeline.estimate` expected of a job before it ran (`_pipeline/plan.json`), next to what it took.

Times are whole microseconds, money is US dollars.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.run_record import PHASES, RunRecord

MIN_SHARE = 0.01  # of the machine time, below which a phase has no ratio


@dataclass(frozen=True)
class Interval:
    """low <= expected <= high."""

    low: float
    expected: float
    high: float

    def times(self, factor: float) -> "Interval":
        return Interval(self.low * factor, self.expected * factor, self.high * factor)

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(self.low + other.low, self.expected + other.expected, self.high + other.high)


@dataclass(frozen=True)
class Estimate(JsonRecord):
    """Of the rows that were left when it was made, after `runs_before` runs. phases_us: machine time, expected.
    hourly_usd: None where the job declares no price. speeds_from, lengths_from: for people."""

    made_at: str
    runs_before: int
    rows: int
    prompt_tokens: Interval  # computed ones
    cached_tokens: float
    generated_tokens: Interval
    machine_us: Interval
    wall_us: Interval
    phases_us: dict[str, int] = field(default_factory=dict)
    hourly_usd: float | None = None
    speeds_from: str = ""
    lengths_from: str = ""
    actors: int = 1
    job: str = ""  # undated digest of its identity

    @property
    def usd(self) -> Interval | None:
        return None if self.hourly_usd is None else self.machine_us.times(self.hourly_usd / 3.6e9)


@dataclass(frozen=True)
class Compared:
    """A line: expected, actual, and the ratio of these (None where next to nothing was expected)."""

    what: str
    expected: float
    actual: float
    ratio: float | None

    @classmethod
    def of(cls, what: str, expected: float, actual: float, min_expected: float = 1e-12) -> "Compared":
        return cls(what, expected, actual, actual / expected if expected >= min_expected else None)


@dataclass(frozen=True)
class EstimateAndActual:
    """Of the runs since the estimate. `lines`: rows, tokens, machine time whole and by phase, wall time, money."""

    estimate: Estimate
    lines: tuple[Compared, ...]

    @property
    def ratio(self) -> float | None:
        """Actual over expected machine time."""
        return next(line.ratio for line in self.lines if line.what == "machine_us")


def compare(
    estimate: Estimate, runs: Sequence[RunRecord], accounts: Sequence[Mapping[str, int]]
) -> EstimateAndActual | None:
    """None as long as no run since the estimate has used machine time. runs: all of the job, in order, and the machine
    time of each by phase."""
    since = runs[estimate.runs_before :]
    machine_us = sum(run.machine_us for run in since)
    if not machine_us:
        return None
    lines = [
        Compared.of("rows", estimate.rows, sum(run.rows_written for run in since)),
        Compared.of(
            "prompt_tokens", estimate.prompt_tokens.expected, sum(run.input_tokens - run.cached_tokens for run in since)
        ),
        Compared.of("generated_tokens", estimate.generated_tokens.expected, sum(run.generated_tokens for run in since)),
        *(
            Compared.of(
                phase,
                estimate.phases_us.get(phase, 0),
                sum(account[phase] for account in accounts[estimate.runs_before :]),
                min_expected=estimate.machine_us.expected * MIN_SHARE,
            )
            for phase in PHASES
        ),
        Compared.of("machine_us", estimate.machine_us.expected, machine_us),
        Compared.of("wall_us", estimate.wall_us.expected, sum(run.wall_us for run in since)),
    ]
    if estimate.usd is not None:
        lines.append(Compared.of("usd", estimate.usd.expected, sum(run.usd(run.machine_us) for run in since)))
    return EstimateAndActual(estimate, tuple(lines))
