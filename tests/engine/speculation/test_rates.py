"""How fast sequences go, and how much of their differences is believed."""

import numpy as np
import pytest

from pipeline.engine.speculation.rates import Rates


def fed(rate_S: np.ndarray, steps: int, seed: int = 0) -> Rates:
    """Tokens drawn at these rates: 1 and a geometric number."""
    rates, rng = Rates(), np.random.default_rng(seed)
    for _ in range(steps):
        rates.add(np.arange(len(rate_S)), 1 + rng.geometric(1.0 / rate_S) - 1)
    return rates


def test_before_anything_is_seen_all_go_as_expected() -> None:
    groups = list(Rates().slowing(np.arange(12), 2.5))
    assert [rate for rate, _ in groups] == [2.5] * len(groups)
    assert groups[0][1] == 12
    assert [left for _, left in groups] == sorted((left for _, left in groups), reverse=True)


def test_equal_sequences_stay_together_and_unequal_ones_part() -> None:
    apart = []
    for seed in range(8):
        equal = list(fed(np.full(12, 2.5), 60, seed).slowing(np.arange(12), 2.5))
        apart.append(equal[0][0] - equal[-1][0])
    assert np.mean(apart) < 0.3
    unequal = list(fed(np.repeat([4.0, 1.1], 6), 60).slowing(np.arange(12), 2.55))
    assert unequal[0][0] > 3.3
    assert unequal[-1][0] < 1.6
    assert [left for _, left in unequal] == [12, 10, 8, 6, 4, 2]


def test_a_few_steps_make_no_difference() -> None:
    groups = list(fed(np.repeat([6.0, 1.1], 6), 4).slowing(np.arange(12), 3.0))
    assert {round(rate, 6) for rate, _ in groups} == {3.0}


def test_the_mean_is_what_is_expected_now() -> None:
    rates = fed(np.repeat([4.0, 1.1], 6), 60)
    for mean in (1.0, 1.5, 5.0):
        assert np.mean([rate for rate, _ in rates.slowing(np.arange(12), mean)]) == pytest.approx(mean)
