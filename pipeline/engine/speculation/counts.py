"""Counters of the draft policy for the report, by the number of running sequences. Integers, so that sums are exact."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pipeline.engine.stats import flattened, restore

NUM_BUCKETS = 16  # bucket b holds batches of 2**b to 2**(b + 1) - 1 sequences; the last one all larger ones

PREFIX = "speculation."  # of the names in `flat`


def _zeros() -> list[int]:
    return [0] * NUM_BUCKETS


@dataclass(frozen=True)
class BucketLine:
    """Line of the report for one range of batch sizes. `tokens_per_sequence_step` covers drafted steps only."""

    batch: str
    plain_steps: int
    drafted_steps: int
    probe_steps: int
    on_steps: int
    draft_tokens: int
    accepted_tokens: int
    tokens_per_sequence_step: float
    saved_s: float


@dataclass
class SpeculationCounts:
    """Totals, each by bucket. Times in microseconds.

    Steps are plain or drafted. spent_us: time of drafted steps, including the proposer. plain_us: estimated time of
    plain steps for the same tokens, from the ratio of the two when both were timed; a plain step never counts as longer
    than a drafted one. So plain_us - spent_us estimates the time that drafts saved.
    """

    plain_steps: list[int] = field(default_factory=_zeros)
    drafted_steps: list[int] = field(default_factory=_zeros)
    probe_steps: list[int] = field(default_factory=_zeros)  # drafted steps for measurement, while drafts are off
    on_steps: list[int] = field(default_factory=_zeros)  # all steps while drafts are on
    drafted_sequences: list[int] = field(default_factory=_zeros)  # summed over drafted steps
    drafted_step_tokens: list[int] = field(default_factory=_zeros)  # generated in drafted steps
    draft_tokens: list[int] = field(default_factory=_zeros)
    accepted_tokens: list[int] = field(default_factory=_zeros)
    spent_us: list[int] = field(default_factory=_zeros)
    plain_us: list[int] = field(default_factory=_zeros)

    @staticmethod
    def bucket_of(num_sequences: int) -> int:
        return min(max(num_sequences, 1).bit_length() - 1, NUM_BUCKETS - 1)

    def flat(self) -> dict[str, int]:
        """Return the totals that are not 0 by name, in a form that can be sent and summed."""
        return flattened(self, PREFIX)

    @classmethod
    def from_flat(cls, totals: Mapping[str, int]) -> "SpeculationCounts":
        """Return the totals of a result of `flat`, or of a sum of such results; other names are ignored."""
        counts = cls()
        restore(counts, totals, PREFIX)
        return counts

    def lines(self) -> Iterator[BucketLine]:
        """Yield one line for each bucket that has steps, small batches first."""
        for b in range(NUM_BUCKETS):
            if self.plain_steps[b] + self.drafted_steps[b]:
                sequences = self.drafted_sequences[b]
                yield BucketLine(
                    batch=_batches(b),
                    plain_steps=self.plain_steps[b],
                    drafted_steps=self.drafted_steps[b],
                    probe_steps=self.probe_steps[b],
                    on_steps=self.on_steps[b],
                    draft_tokens=self.draft_tokens[b],
                    accepted_tokens=self.accepted_tokens[b],
                    tokens_per_sequence_step=self.drafted_step_tokens[b] / sequences if sequences else 1.0,
                    saved_s=(self.plain_us[b] - self.spent_us[b]) / 1e6,
                )

    @property
    def saved_s(self) -> float:
        """Estimated seconds that drafts saved; negative if they cost time."""
        return (sum(self.plain_us) - sum(self.spent_us)) / 1e6


def _batches(b: int) -> str:
    if b == NUM_BUCKETS - 1:
        return f"{1 << b}+"
    return "1" if b == 0 else f"{1 << b}-{(2 << b) - 1}"
