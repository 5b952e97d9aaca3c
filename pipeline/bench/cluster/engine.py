"""An engine in simulated time: continuous batching, a step's time by the number of sequences in it.

Between two events of a batch (a row ends, rows come) all its steps take the same time, so the engine goes from event to
event and not from step to step.
"""

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from pipeline.bench.cluster.workload import SimulatedUnit
from pipeline.roofline.cost_model import Ceilings, DecoderSize, StepTokens, Weights, step_seconds

PROMPT_TOKENS_A_STEP = 8192
ROUNDING = 1e-6  # of a step


@dataclass(frozen=True)
class EngineSpeed:
    """step_s[n]: of a step in which n sequences generate a token each; prefill_s: of a token of a prompt."""

    step_s: list[float]
    prefill_s: float

    @property
    def most(self) -> int:
        """Sequences at once."""
        return len(self.step_s) - 1

    @classmethod
    def of(
        cls, size: DecoderSize, weights: Weights, card: Ceilings, most: int, prompt: int, context: int
    ) -> "EngineSpeed":
        """By the cost model of a step; prompt, context: tokens of a middling row."""
        step_s = [0.0]
        for count in range(1, most + 1):
            tokens = StepTokens(np.ones(count, np.int64), np.full(count, context), count)
            step_s.append(step_seconds(tokens, size, weights, card).total_s)
        prompts = max(1, PROMPT_TOKENS_A_STEP // prompt)
        tokens = StepTokens(np.full(prompts, prompt), np.full(prompts, prompt), prompts)
        return cls(step_s, step_seconds(tokens, size, weights, card).total_s / (prompts * prompt))

    def work_s(self, unit: SimulatedUnit) -> float:
        """What a unit takes of an engine whose batch is full."""
        return sum(unit.prompts) * self.prefill_s + sum(unit.outputs) * self.step_s[-1] / self.most


class SimulatedEngine:
    """Takes units, and says when their next row ends."""

    def __init__(self, speed: EngineSpeed, now: float) -> None:
        self._speed, self._now = speed, now
        self._steps = 0.0  # since the beginning
        self._prefill_s = 0.0  # of prompts that are admitted and not computed yet
        self._running: list[tuple[float, int, int, int]] = []  # the step at which a row ends; unit, prompt, output
        self._waiting: deque[tuple[int, int, int]] = deque()  # unit, prompt, output
        self._units: dict[int, SimulatedUnit] = {}
        self._left: dict[int, int] = {}  # rows of an open unit that have not ended

    @property
    def units(self) -> list[SimulatedUnit]:
        """Those that are open."""
        return list(self._units.values())

    @property
    def num_open(self) -> int:
        return len(self._units)

    @property
    def is_thin(self) -> bool:
        """Whether it has work for less than half a batch."""
        return 0 < len(self._running) < self._speed.most / 2

    def take(self, unit: SimulatedUnit) -> None:
        key = id(unit)
        self._units[key], self._left[key] = unit, unit.num_rows
        self._waiting.extend((key, prompt, output) for prompt, output in zip(unit.prompts, unit.outputs))
        self._admit()

    def next_s(self) -> float:
        """When the next row ends; endless where none runs."""
        if not self._running:
            return float("inf")
        steps = self._running[0][0] - self._steps
        return self._now + self._prefill_s + max(steps, 0.0) * self._speed.step_s[len(self._running)]

    def advance(self, now: float) -> list[SimulatedUnit]:
        """Go on to a time that is not after `next_s`; the units that ended."""
        passed = now - self._now
        self._now = now
        prefill_s = min(passed, self._prefill_s)
        self._prefill_s -= prefill_s
        if self._running:
            self._steps += (passed - prefill_s) / self._speed.step_s[len(self._running)]
        ended = []
        while self._running and self._running[0][0] <= self._steps + ROUNDING:
            key = heapq.heappop(self._running)[1]
            self._left[key] -= 1
            if not self._left[key]:
                del self._left[key]
                ended.append(self._units.pop(key))
        self._admit()
        return ended

    def lose(self, keeps_rows: bool) -> tuple[list[SimulatedUnit], int]:
        """The machine is gone: the units that were open, for another one, and the generated tokens that are lost.
        keeps_rows: rows that had ended are kept, as after a notice; else their units begin anew."""
        generated = sum(output - (end - self._steps) for end, _, _, output in self._running)
        if not keeps_rows:
            unfinished = sum(output for _, _, output in self._waiting) + sum(row[3] for row in self._running)
            generated += sum(sum(unit.outputs) for unit in self._units.values()) - unfinished
            return self.units, int(generated)
        rows: dict[int, list[tuple[int, int]]] = {key: [] for key in self._units}
        for _, key, prompt, output in self._running:
            rows[key].append((prompt, output))
        for key, prompt, output in self._waiting:
            rows[key].append((prompt, output))
        units = [
            SimulatedUnit(unit.window, unit.index, [p for p, _ in rows[key]], [o for _, o in rows[key]])
            for key, unit in self._units.items()
        ]
        return units, int(generated)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._speed.most:
            key, prompt, output = self._waiting.popleft()
            self._prefill_s += prompt * self._speed.prefill_s
            heapq.heappush(self._running, (self._steps + output, key, prompt, output))
