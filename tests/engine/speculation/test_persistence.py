"""Whether those who are ahead stay ahead, and whose differences are compared."""

import numpy as np
import pytest

from pipeline.engine.speculation.persistence import BLOCK_STEPS, Persistence

SLOTS = np.arange(8)
HALF = np.repeat([3.0, 1.0], 4)


def told(steps: int, expected, slot_S: np.ndarray = SLOTS) -> Persistence:
    persistence = Persistence()
    for step in range(steps):
        persistence.add(slot_S, expected(step))
    return persistence


def test_before_anything_is_known_nothing_lasts() -> None:
    assert told(2 * BLOCK_STEPS - 1, lambda _: HALF).share == 0.0
    assert told(2 * BLOCK_STEPS, lambda _: HALF).share == pytest.approx(1.0)


def test_what_stays_lasts_and_what_comes_to_everybody_in_turn_does_not() -> None:
    rng = np.random.default_rng(0)
    assert told(200, lambda _: HALF + rng.normal(0.0, 1.0, 8)).share > 0.95, "chance within a block is no difference"
    assert told(200, lambda step: 1.0 + ((step // 30 + SLOTS) % 4 == 0)).share < 0.1
    chance = [told(200, lambda _: rng.normal(0.0, 1.0, 8)).share for _ in range(10)]
    assert np.mean(chance) < 0.15


def test_what_lasted_long_ago_is_forgotten() -> None:
    late = told(800, lambda step: HALF if step < 500 else 1.0 + ((step // 30 + SLOTS) % 4 == 0))
    assert late.share < 0.1


def test_what_is_common_to_all_is_no_difference() -> None:
    """A share of nothing would be nothing but rounding."""
    rng = np.random.default_rng(1)
    assert told(100, lambda step: np.full(8, 1.0 + step % 5) + rng.normal(0.0, 1e-12, 8)).share == pytest.approx(
        0, abs=1e-3
    )


def test_a_sequence_that_comes_in_anothers_place_begins_anew() -> None:
    """Two that were fast end, and the two that come are slow: nobody has changed."""

    def change(gap: int) -> float:
        persistence = Persistence()
        for step in range(20 * BLOCK_STEPS):
            swaps = step % (5 * BLOCK_STEPS) == 0 and step > 0
            expected_S = np.roll(HALF, step // (5 * BLOCK_STEPS) * 4)
            if swaps and gap:
                persistence.add(np.array([8, 9]), np.ones(2))
            persistence.add(SLOTS, expected_S)
        return persistence.share

    assert change(gap=1) == pytest.approx(1.0)
    assert change(gap=0) < 0.6


def test_only_whole_blocks_count() -> None:
    """Half of them come in the middle of a block in which nothing tells them apart: that says nothing of them."""
    persistence = Persistence()
    for step in range(3 * BLOCK_STEPS):
        there = SLOTS if step >= BLOCK_STEPS // 2 else SLOTS[:4]
        persistence.add(there, HALF[there] if step >= BLOCK_STEPS else np.full(len(there), 3.0))
    assert persistence.share == pytest.approx((1 / 3 + 1) / (2 / 3 + 1), rel=0.05)
