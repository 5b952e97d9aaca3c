"""At which numbers of tokens steps are timed, so that what lies between two of them is near their line. No torch.

G: points of the grid.
"""

from collections.abc import Sequence

import numpy as np

MAX_GRID = 16  # points
NOTABLE_BEND = 0.02  # of a step's time, by which a line between two points may be wrong


def token_grid(max_tokens: int, padded_to: Sequence[int] = ()) -> list[int]:
    """Rising token counts to time at first: powers of two up to `max_tokens`, or sizes that steps are padded to."""
    assert max_tokens >= 2
    sizes = sorted({size for size in padded_to if size <= max_tokens})
    if len(sizes) > MAX_GRID:  # spread over the logarithm, first and last kept
        wanted = np.geomspace(sizes[0], sizes[-1], MAX_GRID)
        sizes = sorted({min(sizes, key=lambda size, at=at: abs(size - at)) for at in wanted.tolist()})
    if not sizes:
        sizes = [1 << power for power in range(max_tokens.bit_length() - 1)]
        while len(sizes) > MAX_GRID - 1:
            del sizes[1]
    if sizes[-1] != max_tokens:
        sizes.append(max_tokens)
    return sizes if len(sizes) > 1 else [1, *sizes]


def next_point(grid: Sequence[int], seconds_G: np.ndarray, padded_to: Sequence[int] = ()) -> int | None:
    """A number of tokens to time besides: in the midst of the two points whose line may be most wrong; None where no
    line is. Steps get dearer token by token where compute, no longer memory, is the limit, and the lines before and
    behind such a bend go on to meet below it: by as much, at most, it may be wrong."""
    if len(grid) >= MAX_GRID or len(grid) < 3:
        return None
    tokens_G = np.asarray(grid, dtype=np.float64)
    step_G = np.diff(tokens_G)
    slope_G = np.diff(seconds_G) / step_G
    before_G = np.concatenate(([0.0], slope_G[:-1]))
    after_G = np.concatenate((slope_G[1:], [np.inf]))
    bend_G = np.minimum(slope_G - before_G, after_G - slope_G) * step_G / 2.0 / seconds_G[:-1]
    for g in np.argsort(-bend_G).tolist():
        if bend_G[g] < NOTABLE_BEND:
            return None
        middle = _between(grid[g], grid[g + 1], padded_to)
        if middle is not None:
            return middle
    return None


def _between(low: int, high: int, padded_to: Sequence[int]) -> int | None:
    """The middle, or the size nearest to it that steps of about so many tokens are padded to."""
    if padded_to and high <= max(padded_to):
        sizes = [size for size in padded_to if low < size < high]
        return min(sizes, key=lambda size: abs(size - (low + high) / 2.0)) if sizes else None
    return (low + high) // 2 if high - low > 1 else None
