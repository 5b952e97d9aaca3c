"""What the policy did, counted for the report by the number of running sequences. Integers only: sums are exact."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pipeline.engine.stats import flattened, restore

NUM_BUCKETS = 16  # bucket b holds batches of 2**b to 2**(b + 1) - 1 sequences; the last one all larger ones

PREFIX = "speculation."  # of the names of `flat`


def _zeros() -> list[int]:
    return [0] * NUM_BUCKETS


@dataclass(frozen=True)
class BucketLine:
    """A line of the report: what happened at these batch sizes. `tokens_per_sequence_step` is of drafted steps."""

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

    Steps are plain or drafted. spent_us: what drafted steps took, proposing too. plain_us: what plain steps would have
    taken for the same tokens, by how the two compared when both were timed, and none of them longer than a drafted one;
    so plain_us - spent_us is what drafts saved, an estimate.
    """

    plain_steps: list[int] = field(default_factory=_zeros)
    drafted_steps: list[int] = field(default_factory=_zeros)
    probe_steps: list[int] = field(default_factory=_zeros)  # of the drafted ones: made to learn, while off
    on_steps: list[int] = field(default_factory=_zeros)  # of all: drafts were on
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
        """Return what is not 0 by name, to travel and add up with other totals."""
        return flattened(self, PREFIX)

    @classmethod
    def from_flat(cls, totals: Mapping[str, int]) -> "SpeculationCounts":
        """Return the totals that `flat` gave, or sums of such; other names among them do not matter."""
        counts = cls()
        restore(counts, totals, PREFIX)
        return counts

    def lines(self) -> Iterator[BucketLine]:
        """Yield one line for each bucket in which there was a step, small batches first."""
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
        """Estimated seconds that drafts saved in all; below 0 when they cost."""
        return (sum(self.plain_us) - sum(self.spent_us)) / 1e6


def _batches(b: int) -> str:
    if b == NUM_BUCKETS - 1:
        return f"{1 << b}+"
    return "1" if b == 0 else f"{1 << b}-{(2 << b) - 1}"
