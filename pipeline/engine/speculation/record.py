"""What the policy did, counted for the report by the number of running sequences. Integers only: sums are exact."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

NUM_BUCKETS = 16  # bucket b holds batches of 2**b to 2**(b + 1) - 1 sequences; the last one all larger ones

PREFIX = "speculation."  # of the names of `flat`


@dataclass
class BucketCounts:
    """Totals of one bucket. Times in microseconds.

    Steps are plain or drafted. spent_us: what drafted steps took, proposing too. plain_us: what plain steps would have
    taken for the same tokens, by how the two compared when both were timed, and none of them longer than a drafted one;
    so plain_us - spent_us is what drafts saved, an estimate.
    """

    plain_steps: int = 0
    drafted_steps: int = 0
    probe_steps: int = 0  # of the drafted ones: made to learn, while off
    on_steps: int = 0  # of all: drafts were on
    plain_sequences: int = 0  # summed over plain steps, each gives one token
    drafted_sequences: int = 0  # summed over drafted steps
    drafted_step_tokens: int = 0  # generated in drafted steps
    draft_tokens: int = 0
    accepted_tokens: int = 0
    spent_us: int = 0
    plain_us: int = 0


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


class SpeculationCounts:
    """By bucket."""

    def __init__(self) -> None:
        self.buckets: defaultdict[int, BucketCounts] = defaultdict(BucketCounts)
        self.plain: defaultdict[int, int] = defaultdict(int)  # steps by sequences that are not in buckets yet

    def of(self, num_sequences: int) -> BucketCounts:
        return self.buckets[min(max(num_sequences, 1).bit_length() - 1, NUM_BUCKETS - 1)]

    def flat(self) -> dict[str, int]:
        """What is not 0 by name, to travel and add up with other totals."""
        for num_sequences, steps in self.plain.items():
            counts = self.of(num_sequences)
            counts.plain_steps += steps
            counts.plain_sequences += steps * num_sequences
        self.plain.clear()
        return {
            f"{PREFIX}{f.name}.{b}": count
            for f in fields(BucketCounts)
            for b, counts in self.buckets.items()
            if (count := getattr(counts, f.name))
        }

    @classmethod
    def from_flat(cls, totals: Mapping[str, int]) -> "SpeculationCounts":
        """From what `flat` gave; other names among them do not matter."""
        counts = cls()
        for name, count in totals.items():
            if name.startswith(PREFIX):
                of, _, b = name.removeprefix(PREFIX).partition(".")
                setattr(counts.buckets[int(b)], of, count)
        return counts

    def lines(self) -> Iterator[BucketLine]:
        """One line for each bucket in which there was a step, small batches first."""
        for b, of in sorted(self.buckets.items()):
            if of.plain_steps + of.drafted_steps:
                yield BucketLine(
                    batch=_batches(b),
                    plain_steps=of.plain_steps,
                    drafted_steps=of.drafted_steps,
                    probe_steps=of.probe_steps,
                    on_steps=of.on_steps,
                    draft_tokens=of.draft_tokens,
                    accepted_tokens=of.accepted_tokens,
                    tokens_per_sequence_step=of.drafted_step_tokens / of.drafted_sequences
                    if of.drafted_sequences
                    else 1.0,
                    saved_s=(of.plain_us - of.spent_us) / 1e6,
                )

    @property
    def saved_s(self) -> float:
        """Estimated seconds that drafts saved in all; below 0 when they cost."""
        return sum(of.plain_us - of.spent_us for of in self.buckets.values()) / 1e6


def _batches(b: int) -> str:
    if b == NUM_BUCKETS - 1:
        return f"{1 << b}+"
    return "1" if b == 0 else f"{1 << b}-{(2 << b) - 1}"
