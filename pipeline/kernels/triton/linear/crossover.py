"""Maximum number of tokens for the fused product of an int4 weight, by compute capability. Does not import triton.

The fused product unpacks a weight once per 64 tokens, so it takes as long for 65 tokens as for 128. The 16-bit product
of so few tokens takes as long as reading its weight. `python -m benchmarks.gpu` measures where the two cross.
"""

from dataclasses import dataclass

SMALL_WEIGHT = 32 << 20  # values

MEASURED = "measured on one H200, 2026-11-26"
ASSUMED = "assumed"


@dataclass(frozen=True)
class Crossover:
    """Maximum numbers of tokens for the fused product.

    cached: if the 16-bit form is kept. small: the same for weights of up to `SMALL_WEIGHT` values. scratch: if the
    16-bit form is written in each call.
    """

    cached: int
    small: int
    scratch: int
    source: str = ASSUMED

    def max_fused_tokens(self, num_values: int, is_cached: bool) -> int:
        """Return the crossover of a weight of `num_values`. is_cached: its 16-bit form is kept."""
        if not is_cached:
            return self.scratch
        return self.small if num_values <= SMALL_WEIGHT else self.cached


# The assumed values are derived from the H200's times: the fused product from multiprocessors, clock and instructions
# of the compiled loop (three times as many per output on sm_80 and sm_89 as on sm_90), memory traffic from bandwidth.
CROSSOVERS = {
    (8, 0): Crossover(cached=32, small=32, scratch=64),  # A100: 2 TB/s, few multiprocessors
    (8, 9): Crossover(cached=64, small=64, scratch=192),  # L40S, L4, RTX 4090: 0.3 to 1 TB/s
    (9, 0): Crossover(cached=64, small=32, scratch=192, source=MEASURED),
    (10, 0): Crossover(cached=16, small=16, scratch=64),  # B200: 8 TB/s, no more multiprocessors than an H200
}


def crossover_of(capability: tuple[int, int]) -> Crossover:
    """Return the crossover of a compute capability: its own, the next older one in the table, or the oldest."""
    return CROSSOVERS[max((each for each in CROSSOVERS if each <= capability), default=min(CROSSOVERS))]
