"""Host and device time of a step, where both work at once.

Measured on CPUs: planning, building, sampling and handling (`pipeline bench scheduler`, docs/performance.md). Measured
next to an H200: launching a layer kernel by kernel. Assumed: replaying a graph.
"""

from dataclasses import dataclass, replace

import numpy as np

from pipeline.engine.forward.graphs import graph_sizes, mixed_sizes
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.engine.startup.mixed_tokens import LAUNCH_S
from pipeline.roofline.cards import find_card
from pipeline.roofline.cost_model import (
    Ceilings,
    DecoderSize,
    Reached,
    StepTokens,
    Weights,
    linear_seconds,
    step_seconds,
)

EMPTY_S = 4e-6  # of the card, in each layer of a captured mixed step: a cascade and tiles of prompts that hold nothing


@dataclass(frozen=True)
class HostTimes:
    """Seconds. step and row: of each step, and for each of its sequences, around the model. replay: of a graph. launch:
    of one layer, kernel by kernel."""

    step_s: float = 350e-6
    row_s: float = 1.2e-6
    replay_s: float = 60e-6
    launch_s: float = LAUNCH_S

    def of_step(self, num_rows: int, layers: int, is_replayed: bool) -> float:
        return self.step_s + num_rows * self.row_s + (self.replay_s if is_replayed else layers * self.launch_s)


@dataclass(frozen=True)
class Device:
    """A model on a card. captured_rows: the largest step that is replayed; mixed_tokens: the largest with prompts, 0:
    none is."""

    size: DecoderSize
    weights: Weights
    ceilings: Ceilings
    captured_rows: int
    mixed_tokens: int

    @classmethod
    def of(
        cls, size: DecoderSize, weights: Weights, card: str, captured_rows: int, mixed_tokens: int, reached: Reached
    ) -> "Device":
        return cls(size, weights, Ceilings.of_card(find_card(card), reached), captured_rows, mixed_tokens)

    def is_replayed(self, plan: StepPlan) -> bool:
        """Tiles of prompts, which may be too many for a graph, are not counted."""
        if len(plan.slot_S) > self.captured_rows:
            return False
        return not _is_mixed(plan) or plan.num_tokens <= self.mixed_tokens

    def step_s(self, plan: StepPlan, spared_tokens: int = 0) -> float:
        """By the cost model. A replayed step is padded: its linears compute the tokens of its graph, those of the last
        layer too, where other steps compute the rows that sample. spared_tokens: see `StepTokens`."""
        tokens = StepTokens(plan.count_S, plan.start_S + plan.count_S, int(plan.samples_S.sum()), spared_tokens)
        seconds = step_seconds(tokens, self.size, self.weights, self.ceilings)
        if not self.is_replayed(plan):
            return seconds.total_s - self._after_attention_s(plan.num_tokens) + self._after_attention_s(tokens.num_rows)
        is_mixed = _is_mixed(plan)
        sizes = np.array(mixed_sizes(self.mixed_tokens) if is_mixed else graph_sizes(self.captured_rows))
        padded = int(sizes[np.searchsorted(sizes, plan.num_tokens)])
        ones = np.ones(padded, dtype=np.int64)
        padded_s = step_seconds(StepTokens(ones, ones, 0), self.size, self.weights, self.ceilings).linears_s
        return replace(seconds, linears_s=padded_s).total_s + (self.size.layers * EMPTY_S if is_mixed else 0.0)

    def _after_attention_s(self, num_tokens: int) -> float:
        """Of one layer's linears but the first, which computes keys and values."""
        if not num_tokens:
            return 0.0
        after = self.size.linears()[1:]
        return sum(min(linear_seconds(num_tokens, k, n, self.weights, self.ceilings).values()) for _, k, n in after)


def _is_mixed(plan: StepPlan) -> bool:
    return int(plan.count_S.max()) > 1
