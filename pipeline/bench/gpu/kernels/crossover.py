"""Up to how many tokens the fused product of int4 weights is worth taking, by what a run measured.

The number for `kernels/triton/linear/crossover.py` for which the linears together take the least over the numbers of
tokens that were measured, each counted by its better path, so that one slow measurement moves it little.
"""

from dataclasses import dataclass

import torch

from pipeline.bench.gpu.kernels.linear_times import CACHED_PATH, INT4_PATH, SCRATCH_PATH, LinearTimes
from pipeline.kernels.triton.linear.crossover import crossover_of

WHOLE_LAYER = "layer"


@dataclass(frozen=True)
class Border:
    """Where the fused product meets the 16-bit one. crossover: a field of `Crossover`; now: its value. most_tokens:
    linear -> tokens up to which fused is worth it, 0 for none; of all linears of a layer together too. measured: the
    numbers looked at."""

    crossover: str
    now: int
    most_tokens: dict[str, int]
    measured: tuple[int, ...]

    def to_text(self) -> str:
        of_linears = ", ".join(f"{name} {most:,}" for name, most in self.most_tokens.items() if name != WHOLE_LAYER)
        suggested = self.most_tokens[WHOLE_LAYER]
        above = [tokens for tokens in self.measured if tokens > suggested]
        until = f"measured next: {above[0]:,}" if above else "nothing above was measured"
        return (
            f"the {self.crossover} crossover of kernels/triton/linear/crossover.py is {self.now:,}; this run says "
            f"{suggested:,} ({until}), for MEASURED there; by linear: {of_linears}"
        )


def borders(linears: LinearTimes) -> list[Border]:
    """Of each way to 16-bit weights that was measured beside the fused product, on this machine's card."""
    known = crossover_of(torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0))
    ways = ((CACHED_PATH, "cached", known.cached), (SCRATCH_PATH, "scratch", known.scratch))
    found = []
    for path, name, now in ways:
        if {path, INT4_PATH} <= set(linears.paths):
            fused, wide = linears.by_linear(INT4_PATH), linears.by_linear(path)
            fused[WHOLE_LAYER], wide[WHOLE_LAYER] = linears.layer_s(INT4_PATH), linears.layer_s(path)
            most = {linear: _cheapest(fused[linear], wide[linear]) for linear in fused}
            found.append(Border(name, now, most, tuple(sorted(fused[WHOLE_LAYER]))))
    return found


def _cheapest(fused_s: dict[int, float], wide_s: dict[int, float]) -> int:
    """The number of tokens, or 0, up to which taking the fused product loses least; of equal ones the smallest."""

    def lost(most: int) -> float:
        taken = ((fused_s if tokens <= most else wide_s)[tokens] for tokens in fused_s)
        return sum(s / min(fused_s[tokens], wide_s[tokens]) - 1 for tokens, s in zip(fused_s, taken))

    return min((0, *sorted(fused_s)), key=lost)
