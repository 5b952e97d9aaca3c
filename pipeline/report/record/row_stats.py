"""Statistics of delivered rows: latency, prompt length, and errors.

All statistics add up over units, actors and runs in any order; latencies are therefore histograms with fixed buckets.
Cost and machine time are in `account.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from math import ceil

from pipeline.report.record.data_warnings import ControlTokenRows
from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.quality_stats import QualityStats

FIRST_LENGTH = 64  # max prompt tokens of the first bucket; each further bucket doubles the limit
MAX_EXAMPLES = 3  # per error code
MAX_MESSAGE = 300  # characters of an example's message
HISTOGRAM_ERROR = 1 / 32  # max relative error of a value read from a histogram

_EXACT = 32  # each smaller value has its own bucket
_PER_DOUBLING = 16


@dataclass(frozen=True)
class Computed:
    """Tokens that an engine computed: prompt tokens, without those from shared KV blocks, and generated tokens."""

    prompt: int = 0
    generated: int = 0

    @classmethod
    def from_stats(cls, stats: Mapping[str, int]) -> "Computed":
        """Return the computed tokens in EngineStats, without recomputation after preemptions."""
        prompt = stats.get("prompt_tokens", 0) - stats.get("cached_tokens", 0)
        return cls(max(0, prompt), stats.get("generated_tokens", 0))

    @property
    def all(self) -> int:
        return self.prompt + self.generated

    def __add__(self, other: "Computed") -> "Computed":
        return Computed(self.prompt + other.prompt, self.generated + other.generated)

    def less(self, other: "Computed") -> "Computed":
        """Subtract `other`, clamped at 0, because counters may be read at different moments."""
        return Computed(max(0, self.prompt - other.prompt), max(0, self.generated - other.generated))


@dataclass(frozen=True)
class Histogram:
    """Histogram of nonnegative integers with fixed buckets: exact below 32, then 16 buckets per doubling, so that
    values have a relative error of at most 1/32 (3.1%). counts: bucket -> number of values."""

    counts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def from_values(cls, values: Iterable[int]) -> "Histogram":
        counts: dict[int, int] = {}
        for value in values:
            bucket = _bucket(max(0, value))
            counts[bucket] = counts.get(bucket, 0) + 1
        return cls(counts)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def values(self) -> list[tuple[int, int]]:
        """Return (middle of the bucket, number of values) for each bucket."""
        return [(_middle(bucket), count) for bucket, count in self.counts.items()]

    def __add__(self, other: "Histogram") -> "Histogram":
        buckets = sorted({*self.counts, *other.counts})
        return Histogram({b: self.counts.get(b, 0) + other.counts.get(b, 0) for b in buckets})

    def percentile(self, percent: int) -> int | None:
        """Return the smallest value that `percent` of the values do not exceed; None if empty."""
        rank = max(1, ceil(self.count * percent / 100))
        for bucket in sorted(self.counts):
            rank -= self.counts[bucket]
            if rank <= 0:
                return _middle(bucket)
        return None


def _bucket(value: int) -> int:
    if value < _EXACT:
        return value
    shift = value.bit_length() - 5
    return _EXACT + (shift - 1) * _PER_DOUBLING + (value >> shift) - _PER_DOUBLING


def _middle(bucket: int) -> int:
    if bucket < _EXACT:
        return bucket
    shift, top = divmod(bucket - _EXACT, _PER_DOUBLING)
    return ((top + _PER_DOUBLING) << (shift + 1)) + (1 << shift)


@dataclass(frozen=True)
class Latency:
    """Latencies of rows in microseconds, from being added to the engine that finished them, including the queue: to the
    first token, to the last token, and the mean between tokens (for rows with at least two)."""

    first_token_us: Histogram = field(default_factory=Histogram)
    per_token_us: Histogram = field(default_factory=Histogram)
    row_us: Histogram = field(default_factory=Histogram)

    def __add__(self, other: "Latency") -> "Latency":
        return Latency(
            self.first_token_us + other.first_token_us,
            self.per_token_us + other.per_token_us,
            self.row_us + other.row_us,
        )


@dataclass(frozen=True)
class Timing:
    """Times at which a row was queued and got its first and last token, in microseconds of one clock."""

    queued_us: int
    first_token_us: int
    last_token_us: int
    num_tokens: int


def latency_of(rows: Iterable[Timing]) -> Latency:
    """Return the latencies of rows, without rows that have no first token."""
    timed = [row for row in rows if row.first_token_us]
    return Latency(
        Histogram.from_values(row.first_token_us - row.queued_us for row in timed),
        Histogram.from_values(
            (row.last_token_us - row.first_token_us) // (row.num_tokens - 1) for row in timed if row.num_tokens > 1
        ),
        Histogram.from_values(row.last_token_us - row.queued_us for row in timed),
    )


@dataclass(frozen=True)
class LengthBucket:
    """Completed rows with prompts of similar length, and their tokens."""

    rows: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def __add__(self, other: "LengthBucket") -> "LengthBucket":
        return LengthBucket(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other))))


@dataclass(frozen=True)
class LoopedRows:
    """Completed rows that were stopped because of repetition."""

    rows: int = 0
    generated_tokens: int = 0

    def __add__(self, other: "LoopedRows") -> "LoopedRows":
        return LoopedRows(self.rows + other.rows, self.generated_tokens + other.generated_tokens)


@dataclass(frozen=True)
class ReasonedRows:
    """Completed rows, or samples of them, with reasoning before the answer, and their reasoning tokens."""

    rows: int = 0
    tokens: int = 0

    def __add__(self, other: "ReasonedRows") -> "ReasonedRows":
        return ReasonedRows(self.rows + other.rows, self.tokens + other.tokens)


@dataclass(frozen=True)
class CopiedRows:
    """Rows whose results were copied from equal rows, and their generated tokens, which were not computed again."""

    rows: int = 0
    generated_tokens: int = 0

    def __add__(self, other: "CopiedRows") -> "CopiedRows":
        return CopiedRows(self.rows + other.rows, self.generated_tokens + other.generated_tokens)


@dataclass(frozen=True)
class StepStats:
    """Completed rows that passed a step, or the first prompt, and their requests and tokens there."""

    rows: int = 0
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def __add__(self, other: "StepStats") -> "StepStats":
        return StepStats(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other))))


def length_bucket(num_tokens: int) -> int:
    """Return the max prompt tokens of the bucket that contains `num_tokens`: 64, 128, 256, ..."""
    return max(FIRST_LENGTH, 1 << max(0, num_tokens - 1).bit_length())


@dataclass(frozen=True)
class ErrorExample:
    """Example of an error row: its position and the beginning of its message."""

    source_file: str
    row: int
    message: str

    def line(self, code: str = "") -> str:
        return f"{self.source_file} row {self.row}: {f'{code}: ' if code else ''}{self.message}"


@dataclass(frozen=True)
class RowStats(JsonRecord):
    """Statistics of delivered rows.

    lengths: by max prompt tokens of the bucket. errors: examples by code. outputs: generated tokens of completed rows,
    by the same buckets. lost: tokens computed for error rows, by code. images: of completed rows. steps: by name in
    the job's order, the first prompt as ""; empty without steps.
    """

    latency: Latency = field(default_factory=Latency)
    lengths: Mapping[int, LengthBucket] = field(default_factory=dict)
    errors: Mapping[str, tuple[ErrorExample, ...]] = field(default_factory=dict)
    outputs: Mapping[int, Histogram] = field(default_factory=dict)
    lost: Mapping[str, Computed] = field(default_factory=dict)
    looped: LoopedRows = field(default_factory=LoopedRows)
    quality: QualityStats = field(default_factory=QualityStats)
    reasoned: ReasonedRows = field(default_factory=ReasonedRows)
    control_tokens: ControlTokenRows = field(default_factory=ControlTokenRows)
    copied: CopiedRows = field(default_factory=CopiedRows)
    images: int = 0
    steps: Mapping[str, StepStats] = field(default_factory=dict)

    def __add__(self, other: "RowStats") -> "RowStats":
        """Add up; the examples of `self` come first."""
        lengths = sorted({*self.lengths, *other.lengths})
        codes = sorted({*self.errors, *other.errors})
        return RowStats(
            self.latency + other.latency,
            {n: self.lengths.get(n, LengthBucket()) + other.lengths.get(n, LengthBucket()) for n in lengths},
            {code: (self.errors.get(code, ()) + other.errors.get(code, ()))[:MAX_EXAMPLES] for code in codes},
            {
                n: self.outputs.get(n, Histogram()) + other.outputs.get(n, Histogram())
                for n in sorted({*self.outputs, *other.outputs})
            },
            {
                code: self.lost.get(code, Computed()) + other.lost.get(code, Computed())
                for code in sorted({*self.lost, *other.lost})
            },
            self.looped + other.looped,
            self.quality + other.quality,
            self.reasoned + other.reasoned,
            self.control_tokens + other.control_tokens,
            self.copied + other.copied,
            self.images + other.images,
            {
                name: self.steps.get(name, StepStats()) + other.steps.get(name, StepStats())
                for name in dict.fromkeys([*self.steps, *other.steps])
            },
        )
