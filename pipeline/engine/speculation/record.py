"""What the controller did, counted for the report by running batch size. Integers only, so that sums are exact."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

import numpy as np

NUM_BUCKETS = 16  # bucket b holds batches of 2**b to 2**(b + 1) - 1 sequences; the last one all larger ones

PREFIX = "speculation."  # of the names of `flat`


def _zeros() -> np.ndarray:
    return np.zeros(NUM_BUCKETS, dtype=np.int64)


@dataclass(frozen=True)
class SpeculationCounts:
    """Totals by batch bucket, (NUM_BUCKETS,) int64 each. Times in microseconds. Adds up over engines.

    Steps are plain or drafted. spent_us: time of drafted steps, and of proposing in all. plain_us: time that plain
    steps would have taken for the tokens of drafted steps, by the measured cost table; so plain_us - spent_us is what
    speculation saved, an estimate.
    """

    plain_steps: np.ndarray = field(default_factory=_zeros)
    drafted_steps: np.ndarray = field(default_factory=_zeros)
    probe_steps: np.ndarray = field(default_factory=_zeros)  # of the drafted ones: made to learn, while off
    on_steps: np.ndarray = field(default_factory=_zeros)  # of all: the controller was on
    plain_sequences: np.ndarray = field(default_factory=_zeros)  # summed over plain steps, each gives one token
    drafted_sequences: np.ndarray = field(default_factory=_zeros)  # summed over drafted steps
    drafted_step_tokens: np.ndarray = field(default_factory=_zeros)  # generated in drafted steps
    draft_tokens: np.ndarray = field(default_factory=_zeros)
    accepted_tokens: np.ndarray = field(default_factory=_zeros)
    spent_us: np.ndarray = field(default_factory=_zeros)
    plain_us: np.ndarray = field(default_factory=_zeros)

    def add_plain(self, num_sequences: int, num_steps: int = 1) -> None:
        """Plain steps of so many sequences each."""
        b = bucket_of(num_sequences)
        self.plain_steps[b] += num_steps
        self.plain_sequences[b] += num_steps * num_sequences

    def add_drafted(
        self, num_sequences: int, num_generated: int, num_drafts: int, num_accepted: int, step_s: float, value_s: float
    ) -> None:
        """A step with drafts took step_s without proposing; plain ones would have taken value_s for its tokens."""
        b = bucket_of(num_sequences)
        self.drafted_steps[b] += 1
        self.drafted_sequences[b] += num_sequences
        self.drafted_step_tokens[b] += num_generated
        self.draft_tokens[b] += num_drafts
        self.accepted_tokens[b] += num_accepted
        self.spent_us[b] += round(step_s * 1e6)
        self.plain_us[b] += round(value_s * 1e6)

    def flat(self) -> dict[str, int]:
        """What is not 0 by name, to travel and add up with other totals."""
        return {
            f"{PREFIX}{f.name}.{b}": int(getattr(self, f.name)[b])
            for f in fields(self)
            for b in np.flatnonzero(getattr(self, f.name)).tolist()
        }

    @classmethod
    def from_flat(cls, totals: Mapping[str, int]) -> "SpeculationCounts":
        """From what `flat` gave; other names among them do not matter."""
        counts = cls()
        for name, count in totals.items():
            if name.startswith(PREFIX):
                of, _, b = name.removeprefix(PREFIX).partition(".")
                getattr(counts, of)[int(b)] = count
        return counts

    def copy(self) -> "SpeculationCounts":
        return SpeculationCounts(*(getattr(self, f.name).copy() for f in fields(self)))

    def lines(self) -> Iterator["BucketLine"]:
        """One line for each batch bucket in which there was a step, small batches first."""
        for b in np.flatnonzero(self.plain_steps + self.drafted_steps).tolist():
            sequences = int(self.drafted_sequences[b])
            yield BucketLine(
                batch=_batches(b),
                plain_steps=int(self.plain_steps[b]),
                drafted_steps=int(self.drafted_steps[b]),
                probe_steps=int(self.probe_steps[b]),
                on_steps=int(self.on_steps[b]),
                draft_tokens=int(self.draft_tokens[b]),
                accepted_tokens=int(self.accepted_tokens[b]),
                tokens_per_sequence_step=int(self.drafted_step_tokens[b]) / sequences if sequences else 1.0,
                saved_s=int(self.plain_us[b] - self.spent_us[b]) / 1e6,
            )

    @property
    def saved_s(self) -> float:
        """Estimated seconds that speculation saved in all; below 0 when it cost."""
        return int((self.plain_us - self.spent_us).sum()) / 1e6


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


def bucket_of(num_sequences: int) -> int:
    return min(max(num_sequences, 1).bit_length() - 1, NUM_BUCKETS - 1)


def _batches(b: int) -> str:
    if b == NUM_BUCKETS - 1:
        return f"{1 << b}+"
    return "1" if b == 0 else f"{1 << b}-{(2 << b) - 1}"
