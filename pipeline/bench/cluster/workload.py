"""The rows of a simulated job: random lengths, cut into units by the rule that jobs are cut by."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.data.bucket import BYTES_PER_TOKEN, cut_units

CUT_WINDOWS = 4  # cut for themselves; later windows have the prompts' lengths of one of them, and outputs of their own


@dataclass(frozen=True)
class Skewed:
    """Lognormal lengths around `median` tokens, with this deviation of their logarithm, from 1 up to `most`."""

    median: int
    most: int
    sigma: float = 1.0

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.lognormal(np.log(self.median), self.sigma, count).round().astype(int).clip(1, self.most)

    @property
    def mean(self) -> int:
        return round(float(self.sample(np.random.default_rng(0), 100_000).mean()))


@dataclass(frozen=True)
class SimulatedUnit:
    """Tokens of each row's prompt and completion."""

    window: int
    index: int
    prompts: list[int]
    outputs: list[int]

    @property
    def num_rows(self) -> int:
        return len(self.outputs)


@dataclass(frozen=True)
class Workload:
    """`max_tokens`: what each row may generate, which units are cut by; a completion ends at its own length."""

    rows: int
    prompt: Skewed
    output: Skewed
    window_rows: int = 65_536
    unit_tokens: int = 100_000
    unit_rows: int = 512
    seed: int = 1

    @property
    def max_tokens(self) -> int:
        return self.output.most

    @property
    def num_windows(self) -> int:
        return -(-self.rows // self.window_rows)

    def windows(self) -> Iterator[list[SimulatedUnit]]:
        """The units of each window, in the order in which a job computes them."""
        cut: dict[tuple[int, int], list[list[int]]] = {}
        for window in range(self.num_windows):
            rows = min(self.window_rows, self.rows - window * self.window_rows)
            kind = window % CUT_WINDOWS, rows
            if kind not in cut:
                cut[kind] = self._cut(*kind)
            rng = np.random.default_rng((self.seed, 1, window))
            units = []
            for index, prompts in enumerate(cut[kind]):
                units.append(SimulatedUnit(window, index, prompts, self.output.sample(rng, len(prompts)).tolist()))
            yield units

    def _cut(self, kind: int, rows: int) -> list[list[int]]:
        """The prompts' tokens of each unit of a window."""
        rng = np.random.default_rng((self.seed, 0, kind))
        tokens = self.prompt.sample(rng, rows)
        text = rng.bytes(BYTES_PER_TOKEN * (self.prompt.most + (1 << 20)))
        starts = rng.integers(0, 1 << 20, rows)
        prompts = [text[s : s + BYTES_PER_TOKEN * n] for s, n in zip(starts.tolist(), tokens.tolist())]
        units = cut_units(prompts, np.full(rows, self.max_tokens), self.unit_tokens, self.unit_rows)
        return [tokens[unit].tolist() for unit in units]
