"""What the delivered rows were like: how long they took, how long their prompts were, how they failed.

Everything here adds up: over units, actors and runs, in any order, to the same figures. Latencies are kept in
histograms with fixed buckets for that. Does not own money or machine time (`account.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from math import ceil

from pipeline.report.record.data_warnings import ControlTokenRows
from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.quality_stats import QualityStats

FIRST_LENGTH = 64  # prompts up to so many tokens share a bucket; each further bucket is twice as long
MAX_EXAMPLES = 3  # of each error code
MAX_MESSAGE = 300  # characters of an example's message
HISTOGRAM_ERROR = 1 / 32  # of a value read back from a histogram, at most, of itself

_EXACT = 32  # values below have a bucket each
_PER_DOUBLING = 16


@dataclass(frozen=True)
class Computed:
    """Tokens that an engine computed: of prompts (what shared KV blocks served is not computed), and generated."""

    prompt: int = 0
    generated: int = 0

    @classmethod
    def from_stats(cls, stats: Mapping[str, int]) -> "Computed":
        """Return what an engine computed, from its EngineStats, without work done again after a preemption."""
        prompt = stats.get("prompt_tokens", 0) - stats.get("cached_tokens", 0)
        return cls(max(0, prompt), stats.get("generated_tokens", 0))

    @property
    def all(self) -> int:
        return self.prompt + self.generated

    def __add__(self, other: "Computed") -> "Computed":
        return Computed(self.prompt + other.prompt, self.generated + other.generated)

    def less(self, other: "Computed") -> "Computed":
        """Subtract `other`, at least down to 0: counters that are read at different moments may cross."""
        return Computed(max(0, self.prompt - other.prompt), max(0, self.generated - other.generated))


@dataclass(frozen=True)
class Histogram:
    """Whole numbers counted in fixed buckets: each below 32 exactly, above that 16 buckets for every doubling,
    so that what is read back is off by at most 1/32 (3.1 %) of itself. `counts`: bucket to how many."""

    counts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Iterable[int]) -> "Histogram":
        counts: dict[int, int] = {}
        for value in values:
            bucket = _bucket(max(0, value))
            counts[bucket] = counts.get(bucket, 0) + 1
        return cls(counts)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def values(self) -> list[tuple[int, int]]:
        """Each bucket's middle, and how many."""
        return [(_middle(bucket), count) for bucket, count in self.counts.items()]

    def __add__(self, other: "Histogram") -> "Histogram":
        buckets = sorted({*self.counts, *other.counts})
        return Histogram({b: self.counts.get(b, 0) + other.counts.get(b, 0) for b in buckets})

    def percentile(self, percent: int) -> int | None:
        """The smallest value that `percent` of all do not exceed; None of nothing."""
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
    """Microseconds from when a row was handed to the engine that finished it, waiting in its queue included:
    to its first token, to its last, and the mean between two tokens of rows that have two."""

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
    """When one row was queued, had its first token and its last: microseconds of one clock."""

    queued_us: int
    first_token_us: int
    last_token_us: int
    num_tokens: int


def latency_of(rows: Iterable[Timing]) -> Latency:
    """Rows without a first token have no latency and are left out."""
    timed = [row for row in rows if row.first_token_us]
    return Latency(
        Histogram.of(row.first_token_us - row.queued_us for row in timed),
        Histogram.of(
            (row.last_token_us - row.first_token_us) // (row.num_tokens - 1) for row in timed if row.num_tokens > 1
        ),
        Histogram.of(row.last_token_us - row.queued_us for row in timed),
    )


@dataclass(frozen=True)
class LengthBucket:
    """Completed rows whose prompts are about as long, and their tokens."""

    rows: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def __add__(self, other: "LengthBucket") -> "LengthBucket":
        return LengthBucket(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other))))


@dataclass(frozen=True)
class LoopedRows:
    """Completed rows that were ended because they repeated themselves."""

    rows: int = 0
    generated_tokens: int = 0

    def __add__(self, other: "LoopedRows") -> "LoopedRows":
        return LoopedRows(self.rows + other.rows, self.generated_tokens + other.generated_tokens)


@dataclass(frozen=True)
class ReasonedRows:
    """Completed rows, or samples of them, that reasoned before they answered, and the tokens of that."""

    rows: int = 0
    tokens: int = 0

    def __add__(self, other: "ReasonedRows") -> "ReasonedRows":
        return ReasonedRows(self.rows + other.rows, self.tokens + other.tokens)


def length_bucket(num_tokens: int) -> int:
    """The longest prompt of the bucket that `num_tokens` falls into: 64, 128, 256, ..."""
    return max(FIRST_LENGTH, 1 << max(0, num_tokens - 1).bit_length())


@dataclass(frozen=True)
class ErrorExample:
    """An error row to show: where it comes from and what its message says (its beginning)."""

    source_file: str
    row: int
    message: str

    def line(self, code: str = "") -> str:
        return f"{self.source_file} row {self.row}: {f'{code}: ' if code else ''}{self.message}"


@dataclass(frozen=True)
class RowStats(JsonRecord):
    """Of any number of delivered rows. `lengths` by the bucket's longest prompt, `errors` by code; `outputs`: generated
    tokens of completed rows, by the same buckets; `lost`: what was computed for error rows, by code."""

    latency: Latency = field(default_factory=Latency)
    lengths: Mapping[int, LengthBucket] = field(default_factory=dict)
    errors: Mapping[str, tuple[ErrorExample, ...]] = field(default_factory=dict)
    outputs: Mapping[int, Histogram] = field(default_factory=dict)
    lost: Mapping[str, Computed] = field(default_factory=dict)
    looped: LoopedRows = field(default_factory=LoopedRows)
    quality: QualityStats = field(default_factory=QualityStats)
    reasoned: ReasonedRows = field(default_factory=ReasonedRows)
    control_tokens: ControlTokenRows = field(default_factory=ControlTokenRows)

    def __add__(self, other: "RowStats") -> "RowStats":
        """Of the examples, those of `self` come first."""
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
        )
