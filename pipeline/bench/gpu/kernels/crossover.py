"""Up to how many tokens the fused product of int4 weights is worth taking, by what a run measured.

The number of `kernels/triton/linear/crossover.py` for which the linears together take the least over the numbers of
tokens that were measured, each counted by its better path, so that one slow measurement moves it little.
"""

from dataclasses import dataclass

from pipeline.bench.gpu.kernels.linear_times import CACHED_PATH, INT4_PATH, SCRATCH_PATH, LinearTimes
from pipeline.kernels.triton.linear.crossover import CROSSOVER_CACHED, CROSSOVER_SCRATCH

WHOLE_LAYER = "layer"


@dataclass(frozen=True)
class Border:
    """Where the fused product meets the 16-bit one. now: the constant's value. most_tokens: linear -> tokens up to
    which fused is worth it, 0 for none; of all linears of a layer together too. measured: the numbers looked at."""

    constant: str
    now: int
    most_tokens: dict[str, int]
    measured: tuple[int, ...]

    def to_text(self) -> str:
        of_linears = ", ".join(f"{name} {most:,}" for name, most in self.most_tokens.items() if name != WHOLE_LAYER)
        suggested = self.most_tokens[WHOLE_LAYER]
        above = [tokens for tokens in self.measured if tokens > suggested]
        until = f"measured next: {above[0]:,}" if above else "nothing above was measured"
        return (
            f"{self.constant} in kernels/triton/linear/crossover.py is {self.now:,}; this run says {suggested:,} "
            f"({until}); by linear: {of_linears}"
        )


def borders(linears: LinearTimes) -> list[Border]:
    """Of each way to 16-bit weights that was measured beside the fused product."""
    ways = ((CACHED_PATH, "CROSSOVER_CACHED", CROSSOVER_CACHED), (SCRATCH_PATH, "CROSSOVER_SCRATCH", CROSSOVER_SCRATCH))
    found = []
    for path, constant, now in ways:
        if {path, INT4_PATH} <= set(linears.paths):
            fused, wide = linears.by_linear(INT4_PATH), linears.by_linear(path)
            fused[WHOLE_LAYER], wide[WHOLE_LAYER] = linears.layer_s(INT4_PATH), linears.layer_s(path)
            most = {name: _cheapest(fused[name], wide[name]) for name in fused}
            found.append(Border(constant, now, most, tuple(sorted(fused[WHOLE_LAYER]))))
    return found


def _cheapest(fused_s: dict[int, float], wide_s: dict[int, float]) -> int:
    """The number of tokens, or 0, up to which taking the fused product loses least; of equal ones the smallest."""

    def lost(most: int) -> float:
        taken = ((fused_s if tokens <= most else wide_s)[tokens] for tokens in fused_s)
        return sum(s / min(fused_s[tokens], wide_s[tokens]) - 1 for tokens, s in zip(fused_s, taken))

    return min((0, *sorted(fused_s)), key=lost)
