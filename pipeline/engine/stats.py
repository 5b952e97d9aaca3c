"""What an engine counts of its work: tokens and times, as whole numbers that add up over steps, engines and runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

DRAFT_PLACES = 8  # places of drafts after the known tokens that are counted apart; the last one counts all from there
STEP_TIMES = ("prefill_us", "decode_us", "drafts_us", "preempted_us", "retried_us", "quality_us")  # of EngineStats


@dataclass
class EngineStats:
    """Running totals of one engine, all integers so that sums are exact. Times in microseconds.

    prompt_tokens and generated_tokens count every finished or running request once; recomputed_tokens is work done
    again after a preemption. The time of all steps is the sum of STEP_TIMES: a step's is divided in proportion to its
    tokens, of which rejected drafts take drafts_us, those computed again preempted_us, labels that are read prefill_us,
    and texts that are read to compare models (`HiddenStates`) quality_us; a step that did not fit the memory is
    retried_us. batch_sum adds the sequences of each step, kv_used_ppm_sum the used share of the KV cache of each step
    (parts per million).

    plain_steps to plain_rows_us are sums over the plain steps, which generated one token for each of their rows and did
    nothing else: 1, rows, rows**2, microseconds, rows * microseconds. A line of time by rows is
    fitted to them (`pipeline.estimate.measured`).

    num_draft_steps are the steps that computed drafts; drafted_by_place counts drafts by their place after the known
    tokens, from the eighth on together, and accepted_by_place those of them that the model confirmed. rejected_drafts
    are those of all places that it did not confirm.

    masked_tokens counts the rows of logits whose token a grammar had to allow, those after drafts too. Most of these
    need no mask; filled_masks counts those that were filled, and mask_us is the time of filling them, a part of the
    steps' time. forced_tokens are generated tokens that a grammar left no choice of, taken without logits of their own.
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_out_of_memory: int = 0  # steps that were undone because they did not fit the memory
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
    drafted_by_place: list[int] = field(default_factory=lambda: [0] * DRAFT_PLACES)
    accepted_by_place: list[int] = field(default_factory=lambda: [0] * DRAFT_PLACES)

    def add_drafts(self, drafted_D: np.ndarray, accepted_D: np.ndarray) -> None:
        """Add a step with drafts: how many of each sequence's were computed, and how many of them accepted."""
        self.num_draft_steps += 1
        self.rejected_drafts += int(drafted_D.sum() - accepted_D.sum())
        self.drafted_by_place = _added(self.drafted_by_place, drafted_D)
        self.accepted_by_place = _added(self.accepted_by_place, accepted_D)

    def since(self, before: "EngineStats") -> "EngineStats":
        """Return what the totals grew by after `before`, a copy of them."""
        then = before.flat()
        return EngineStats.from_flat({name: count - then.get(name, 0) for name, count in self.flat().items()})

    @property
    def step_us(self) -> int:
        """The time of all steps."""
        return sum(getattr(self, name) for name in STEP_TIMES)

    def flat(self) -> dict[str, int]:
        """Return every total by name, to travel and add up with other totals."""
        return flattened(self)

    @classmethod
    def from_flat(cls, totals: Mapping[str, int]) -> "EngineStats":
        """Return the totals that `flat` gave, or sums of such; other names among them do not matter."""
        stats = cls()
        restore(stats, totals)
        return stats


def _added(total_by_place: list[int], count_D: np.ndarray) -> list[int]:
    """A new list, as copies of the totals share the old one. count_D: drafts of each sequence."""
    total = total_by_place.copy()
    for place, count in enumerate(np.bincount(count_D)[::-1].cumsum()[::-1][1:].tolist()):
        total[min(place, DRAFT_PLACES - 1)] += count
    return total


def flattened(counts: Any, prefix: str = "") -> dict[str, int]:
    """Return the fields of a dataclass of integers and lists of integers by name; of a list one number for each item
    that is not 0, by its place: `name.0`."""
    found: dict[str, int] = {}
    for each in fields(counts):
        value = getattr(counts, each.name)
        if isinstance(value, int):
            found[prefix + each.name] = value
        else:
            found |= {f"{prefix}{each.name}.{place}": count for place, count in enumerate(value) if count}
    return found


def restore(counts: Any, totals: Mapping[str, int], prefix: str = "") -> None:
    """Set the fields of such a dataclass, whose lists have their full length, to what `flattened` gave of another."""
    for each in fields(counts):
        name, value = prefix + each.name, getattr(counts, each.name)
        if isinstance(value, int):
            setattr(counts, each.name, totals.get(name, 0))
        else:
            setattr(counts, each.name, [totals.get(f"{name}.{place}", 0) for place in range(len(value))])
