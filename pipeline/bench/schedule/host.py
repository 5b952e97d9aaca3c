"""How long the host takes for a step, and the device, where each works beside the other.

Measured: planning, building, sampling and handling (`pipeline bench scheduler`, docs/performance.md). Assumed, as no
card was at hand: what launching a layer takes kernel by kernel, and replaying a graph.
"""

from dataclasses import dataclass, replace

import numpy as np

from pipeline.engine.forward.graphs import graph_sizes
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.roofline.cards import find_card
from pipeline.roofline.cost_model import Ceilings, DecoderSize, Reached, StepTokens, Weights, step_seconds

# Shares of the data sheet that kernels are assumed to reach on a card; `pipeline bench gpu` measures them.
ASSUMED = Reached(bandwidth=0.85, kv=0.8, gemm=0.66, int4=0.45, attention=0.4, fp8=0.5)


@dataclass(frozen=True)
class HostTimes:
    """Seconds. step and row: of each step, and for each of its sequences, around the model. replay: of a graph. launch:
    of one layer, kernel by kernel: 10 to 16 launches (docs/performance/gpu-audit.md counts them)."""

    step_s: float = 350e-6
    row_s: float = 1.2e-6
    replay_s: float = 60e-6
    launch_s: float = 180e-6

    def of_step(self, num_rows: int, layers: int, is_replayed: bool) -> float:
        return self.step_s + num_rows * self.row_s + (self.replay_s if is_replayed else layers * self.launch_s)


@dataclass(frozen=True)
class Device:
    """A model on a card. captured_rows: the largest step that is replayed."""

    size: DecoderSize
    weights: Weights
    ceilings: Ceilings
    captured_rows: int

    @classmethod
    def of(cls, size: DecoderSize, weights: Weights, card: str, captured_rows: int, reached: Reached) -> "Device":
        return cls(size, weights, Ceilings.of_card(find_card(card), reached), captured_rows)

    def is_replayed(self, plan: StepPlan) -> bool:
        return len(plan.slot_S) <= self.captured_rows and int(plan.count_S.max()) == 1

    def step_s(self, plan: StepPlan, spared_tokens: int = 0) -> float:
        """By the cost model. A replayed step is padded: its linears compute the tokens of its graph. spared_tokens: see
        `StepTokens`."""
        tokens = StepTokens(plan.count_S, plan.start_S + plan.count_S, int(plan.samples_S.sum()), spared_tokens)
        seconds = step_seconds(tokens, self.size, self.weights, self.ceilings)
        if not self.is_replayed(plan):
            return seconds.total_s
        sizes = np.array(graph_sizes(self.captured_rows))
        padded = int(sizes[np.searchsorted(sizes, len(plan.slot_S))])
        ones = np.ones(padded, dtype=np.int64)
        padded_s = step_seconds(StepTokens(ones, ones, 0), self.size, self.weights, self.ceilings).linears_s
        return replace(seconds, linears_s=padded_s).total_s
