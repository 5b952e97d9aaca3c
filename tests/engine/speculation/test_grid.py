"""Numbers of tokens at which steps are timed."""

import numpy as np
import pytest

from pipeline.engine.speculation.grid import MAX_GRID, next_point, token_grid


def test_token_grid() -> None:
    for most in (2, 3, 100, 512, 100_000):
        grid = token_grid(most)
        assert grid[0] == 1
        assert grid[-1] == most
        assert grid == sorted(set(grid))
        assert len(grid) <= MAX_GRID
    graphs = list(range(8, 513, 8))
    padded = token_grid(500, [1, 2, 4, *graphs])
    assert padded[0] == 1
    assert padded[-1] == 500
    assert set(padded[:-1]) <= {1, 2, 4, *graphs}
    assert len(padded) <= MAX_GRID + 1


def refined(step_s, padded_to: tuple[int, ...] = (), max_tokens: int = 1024) -> list[int]:
    """The grid when no line between two points is suspected any more."""
    grid = token_grid(max_tokens, padded_to)
    while (more := next_point(grid, np.array([step_s(tokens) for tokens in grid]), padded_to)) is not None:
        assert more not in grid
        grid = sorted([*grid, more])
    return grid


@pytest.mark.parametrize("free", [45, 100, 228, 700])
def test_where_steps_begin_to_get_dearer_is_found(free: int) -> None:
    def step_s(tokens):
        return np.maximum(8e-3, 8e-3 / free * tokens)

    grid = refined(step_s)
    tokens_T = np.arange(1, 1025)
    line_T = np.interp(tokens_T, grid, step_s(np.array(grid)))
    assert line_T == pytest.approx(step_s(tokens_T), rel=0.04)
    first = token_grid(1024)
    assert np.abs(np.interp(tokens_T, first, step_s(np.array(first))) / step_s(tokens_T) - 1).max() > 0.08
    assert len(grid) <= len(first) + 4


def test_lines_that_are_right_and_steps_down_ask_for_no_more() -> None:
    for step_s in (
        lambda t: 1e-3 + 1e-5 * t,
        lambda t: 0 * t + 5e-3,
        lambda t: np.where(t > 200, 6e-3, 8e-3 + t * 1e-6),
    ):
        assert refined(lambda t, step_s=step_s: float(step_s(np.float64(t)))) == token_grid(1024)


def test_between_sizes_that_steps_are_padded_to_only_those_are_timed() -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256)
    grid = refined(lambda tokens: max(8e-3, 80e-6 * tokens), sizes[:7] + sizes[8:9] + sizes[11:], max_tokens=1024)
    assert set(grid) <= {*sizes, *range(257, 1025)}
    assert next_point([64, 128, 256], np.array([8e-3, 8e-3, 30e-3]), (64, 128, 160, 256)) == 160
    assert next_point([64, 128, 256, 512], np.array([8e-3, 8e-3, 20e-3, 60e-3]), (64, 128, 256)) is not None


def test_there_is_an_end_whatever_the_times_are() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert len(refined(lambda _: float(rng.uniform(1.0, 10.0)))) <= MAX_GRID
