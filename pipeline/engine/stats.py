"""Counters of an engine's work: tokens and times, as integers that can be summed over steps, engines and runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

NUM_DRAFT_POSITIONS = 8  # draft positions that are counted separately; the last one counts all later positions too
STEP_TIMES = ("prefill_us", "decode_us", "drafts_us", "preempted_us", "retried_us", "quality_us")  # of EngineStats


@dataclass
class EngineStats:
    """Running totals of one engine, all integers so that sums are exact. Times in microseconds.

    prompt_tokens and generated_tokens count every finished or running request once; recomputed_tokens is work repeated
    after a preemption. The time of all steps is the sum of STEP_TIMES: a step's time is split in proportion to its
    tokens. Rejected drafts count as drafts_us, recomputed tokens as preempted_us, labels as prefill_us, and texts
    that are read to compare models (`HiddenStates`) as quality_us; a step that ran out of memory counts as retried_us.
    batch_sum adds the sequences of each step, kv_used_ppm_sum the used share of the KV cache of each step (parts per
    million).

    plain_steps to plain_rows_us are sums over the plain steps, which generated one token for each of their rows and did
    nothing else: 1, rows, rows**2, microseconds, rows * microseconds. `pipeline.estimate.measured` fits a line of time
    by rows to them.

    num_draft_steps counts the steps that computed drafts; drafted_by_position counts drafts by their position after the
    known tokens (the last entry from the eighth on), and accepted_by_position the accepted ones. rejected_drafts counts
    the drafts of all positions that the model rejected.

    masked_tokens counts the rows of logits whose token is constrained by a grammar, including those after drafts. Most
    of these need no mask; filled_masks counts those that did, and mask_us is the time of filling them, which is part of
    the steps' time. forced_tokens are the only tokens that a grammar allowed, appended without logits of their own.
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_out_of_memory: int = 0  # steps that were undone because they ran out of memory
    prefill_us: int = 0
    decode_us: int = 0
    drafts_us: int = 0
    preempted_us: int = 0
    retried_us: int = 0
    quality_us: int = 0
    batch_sum: int = 0
    kv_used_ppm_sum: int = 0
    plain_steps: int = 0
    plain_rows: int = 0
    plain_rows_squared: int = 0
    plain_us: int = 0
    plain_rows_us: int = 0
    num_draft_steps: int = 0
    rejected_drafts: int = 0
    masked_tokens: int = 0
    forced_tokens: int = 0
    filled_masks: int = 0
    mask_us: int = 0
    drafted_by_position: list[int] = field(default_factory=lambda: [0] * NUM_DRAFT_POSITIONS)
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * NUM_DRAFT_POSITIONS)

    def add_drafts(self, drafted_D: np.ndarray, accepted_D: np.ndarray) -> None:
        """Add a step with drafts: the number of drafted and of accepted tokens of each sequence."""
        self.num_draft_steps += 1
        self.rejected_drafts += int(drafted_D.sum() - accepted_D.sum())
        self.drafted_by_position = _add_counts(self.drafted_by_position, drafted_D)
        self.accepted_by_position = _add_counts(self.accepted_by_position, accepted_D)

    def since(self, before: "EngineStats") -> "EngineStats":
        """Return the growth of the totals since `before`, a copy of them."""
        then = before.flat()
        return EngineStats.from_flat({name: count - then.get(name, 0) for name, count in self.flat().items()})

    @property
    def step_us(self) -> int:
        """The time of all steps."""
        return sum(getattr(self, name) for name in STEP_TIMES)

    def flat(self) -> dict[str, int]:
        """Return every total by name, in a form that can be sent and summed."""
        return flattened(self)

    @classmethod
    def from_flat(cls, totals: Mapping[str, int]) -> "EngineStats":
        """Return the totals of a result of `flat`, or of a sum of such results; other names are ignored."""
        stats = cls()
        restore(stats, totals)
        return stats


def _add_counts(total_by_position: list[int], count_D: np.ndarray) -> list[int]:
    """Return a new list, because copies of the totals share the old one. count_D: drafts of each sequence."""
    total = total_by_position.copy()
    for position, count in enumerate(np.bincount(count_D)[::-1].cumsum()[::-1][1:].tolist()):
        total[min(position, NUM_DRAFT_POSITIONS - 1)] += count
    return total


def flattened(counts: Any, prefix: str = "") -> dict[str, int]:
    """Return the fields of a dataclass of integers and lists of integers by name; a list has one entry for each item
    that is not 0, named by its index: `name.0`."""
    totals: dict[str, int] = {}
    for each in fields(counts):
        value = getattr(counts, each.name)
        if isinstance(value, int):
            totals[prefix + each.name] = value
        else:
            totals |= {f"{prefix}{each.name}.{position}": count for position, count in enumerate(value) if count}
    return totals


def restore(counts: Any, totals: Mapping[str, int], prefix: str = "") -> None:
    """Set the fields of such a dataclass, whose lists have full length, from a result of `flattened`."""
    for each in fields(counts):
        name, value = prefix + each.name, getattr(counts, each.name)
        if isinstance(value, int):
            setattr(counts, each.name, totals.get(name, 0))
        else:
            setattr(counts, each.name, [totals.get(f"{name}.{position}", 0) for position in range(len(value))])
