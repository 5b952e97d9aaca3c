"""Rules of admission beside the engine's, to compare it with. Each is the engine's `Admission` but for what it says."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.engine.schedule.admission import HISTORY, Admission

NUM_BUCKETS = 24  # of prompt lengths, each twice the one before
FEWEST = 32  # finished sequences of a bucket before it stands for itself


class MaxTokens(Admission):
    """Room for all that each sequence may generate. With `max_tokens` at its true length, that is what it does."""

    def finished(self, slots: list[int]) -> None:
        """Learns nothing."""


class FreeBlocks(Admission):
    """What is known now has to fit, as in vLLM, and what comes is left to preemption."""

    def likely_ends(self, prompt_S: np.ndarray, known_S: np.ndarray, limit_S: np.ndarray) -> np.ndarray:
        return np.minimum(limit_S, known_S + 1)

    def spare_blocks(self) -> float:
        return 0.01 * self._pool.num_blocks


@dataclass(frozen=True)
class _Sum:
    """What each sequence needs in the end, added up, as if all ended at once. In the place of a `BlockDemand`."""

    block_size: int
    peak: int

    def add(self, known: int, end: int, held: int) -> "_Sum":
        return _Sum(self.block_size, self.peak + max(-(-end // self.block_size) - held, 0))


class SumOfEnds(Admission):
    """The engine's rule until 2026-11-25."""

    min_history = 64

    def demand(self, slot_S: np.ndarray) -> _Sum:  # type: ignore[override]
        table, size = self._table, self._pool.block_size
        end_S = self.likely_ends(table.num_prompt[slot_S], table.num_known[slot_S], table.limit[slot_S])
        return _Sum(size, int(np.maximum(-(-end_S // size) - table.num_blocks[slot_S], 0).sum()))

    def spare_blocks(self) -> float:
        return 0.0


class ByPromptLength(Admission):
    """The engine's rule, with lengths learned apart for prompts of like length, powers of two. A bucket in which few
    have finished takes its neighbours', and with few in these too all."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self._prompt_H = np.zeros(HISTORY, dtype=np.int64)
        self._expected_B = np.zeros(NUM_BUCKETS, dtype=np.int64)

    def finished(self, slots: list[int]) -> None:
        place_N = np.arange(self._num_finished, self._num_finished + len(slots)) % HISTORY
        self._prompt_H[place_N] = self._table.num_prompt[slots]
        super().finished(slots)

    def _update_expected_output(self) -> None:
        has_changed = self._has_changed
        super()._update_expected_output()
        if not has_changed or self._has_changed:
            return
        length_H, bucket_H = self._length_H[: self._num_finished], _bucket(self._prompt_H[: self._num_finished])
        for bucket in range(NUM_BUCKETS):
            lengths = length_H[bucket_H == bucket]
            if len(lengths) < FEWEST:
                lengths = length_H[np.abs(bucket_H - bucket) <= 1]
            if len(lengths) < FEWEST:
                lengths = length_H
            self._expected_B[bucket] = np.sort(lengths)[len(lengths) * self.percentile // 100]

    def likely_ends(self, prompt_S: np.ndarray, known_S: np.ndarray, limit_S: np.ndarray) -> np.ndarray:
        if self.expected_output is None:
            return limit_S
        likely_S = prompt_S + self._expected_B[_bucket(prompt_S)]
        return np.minimum(limit_S, np.maximum(likely_S, known_S + self._pool.block_size))


class SumByPromptLength(ByPromptLength, SumOfEnds):
    """The rule until 2026-11-25 with lengths by prompt length."""


class SumByPromptLength50(SumByPromptLength):
    percentile = 50


class SumByPromptLength90(SumByPromptLength):
    percentile = 90


def _bucket(prompt_S: np.ndarray) -> np.ndarray:
    return np.log2(np.maximum(prompt_S, 1)).astype(np.int64).clip(max=NUM_BUCKETS - 1)


@dataclass(frozen=True)
class Rule:
    """knows_lengths: each sequence may generate what it does, and no more."""

    admission: Callable[..., Admission]
    knows_lengths: bool = False


RULES = {
    "engine": Rule(Admission),
    "engine, by prompt length": Rule(ByPromptLength),
    "sum of ends": Rule(SumOfEnds),
    "sum, by prompt length 50%": Rule(SumByPromptLength50),
    "sum, by prompt length 75%": Rule(SumByPromptLength),
    "sum, by prompt length 90%": Rule(SumByPromptLength90),
    "free blocks": Rule(FreeBlocks),
    "known lengths": Rule(MaxTokens, knows_lengths=True),
}
