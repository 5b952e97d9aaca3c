"""The account of losses, and the totals of the report."""

import numpy as np
import pytest

from pipeline.engine.speculation.budget import (
    CAP_STEPS,
    EARNED_SHARE,
    GRANT_STEPS,
    SMALL_GRANT_S,
    SMALL_GRANT_STEPS,
    LossBudget,
)
from pipeline.engine.speculation.record import NUM_BUCKETS, SpeculationCounts, bucket_of


def test_no_luck_can_lose_more_than_the_grant_and_the_share() -> None:
    """An opponent who takes all that each step may lose."""
    budget = LossBudget()
    budget.open(1.0)
    lost, elapsed = 0.0, 0.0
    for _ in range(10_000):
        risk_s = budget.affordable_s
        lost, elapsed = lost + risk_s, elapsed + 1.0 + risk_s
        budget.settle(1.0 + risk_s, -risk_s, 1.0)
        assert lost <= GRANT_STEPS + EARNED_SHARE * elapsed
    assert lost > 0.9 * (GRANT_STEPS + EARNED_SHARE * elapsed)


def test_where_steps_are_short_a_try_is_granted_all_the_same() -> None:
    granted = []
    for plain_s in (1e-4, 2e-3, 5e-3, 1.0):
        budget = LossBudget()
        budget.open(plain_s)
        granted.append(budget.balance_s)
    assert granted == pytest.approx([SMALL_GRANT_S[0], SMALL_GRANT_STEPS * 2e-3, SMALL_GRANT_S[1], GRANT_STEPS])


def test_below_zero_nothing_may_be_lost_until_time_has_paid_for_it() -> None:
    budget = LossBudget()
    budget.open(1.0)
    budget.settle(1.0, -GRANT_STEPS - 0.1, 1.0)
    assert budget.affordable_s == 0.0
    for _ in range(round(0.2 / EARNED_SHARE)):
        budget.settle(1.0, 0.0, 1.0)
    assert 0.0 < budget.affordable_s < 0.1


def test_one_wild_step_does_not_end_it_for_good() -> None:
    budget = LossBudget()
    budget.open(1e-3)
    granted_s = budget.balance_s
    budget.settle(60.0, -60.0, 1e-3)
    assert budget.affordable_s == 0.0
    budget.settle(1.01 * granted_s / EARNED_SHARE, 0.0, 1e-3)
    assert budget.affordable_s > 0.0


def test_what_was_granted_is_kept_back_from_who_may_spend_earnings_alone() -> None:
    budget = LossBudget()
    budget.open(1.0)
    assert not budget.has_earned
    budget.settle(1.0, 0.9 * GRANT_STEPS, 1.0)
    assert not budget.has_earned
    budget.settle(1.0, 0.2 * GRANT_STEPS, 1.0)
    assert budget.has_earned
    assert budget.balance_s - budget.affordable_s > GRANT_STEPS


def test_a_good_hour_does_not_pay_for_a_bad_one() -> None:
    budget = LossBudget()
    budget.open(1.0)
    for _ in range(1000):
        budget.settle(1.0, 0.5, 1.0)
    assert budget.balance_s == pytest.approx(CAP_STEPS)
    budget.settle(0.1, 0.5, 0.1)  # in the tail plain steps are short; what is there stays
    assert budget.balance_s == pytest.approx(CAP_STEPS)


def test_batches_fall_into_buckets_of_powers_of_two() -> None:
    assert [bucket_of(n) for n in (0, 1, 2, 3, 4, 255, 256, 1 << 30)] == [0, 0, 1, 1, 2, 7, 8, NUM_BUCKETS - 1]


def test_counts_add_up_and_make_lines() -> None:
    counts = SpeculationCounts()
    counts.plain_steps[0] = 3
    counts.drafted_steps[3], counts.drafted_sequences[3], counts.drafted_step_tokens[3] = 2, 20, 50
    counts.plain_us[3], counts.spent_us[3] = 3_000_000, 1_000_000
    both = SpeculationCounts.from_flat({name: 2 * count for name, count in counts.flat().items()})
    assert both.plain_steps[0] == 6
    assert both.saved_s == 4.0
    assert counts.saved_s == 2.0
    first, second = both.lines()
    assert (first.batch, first.plain_steps, first.tokens_per_sequence_step) == ("1", 6, 1.0)
    assert (second.batch, second.drafted_steps, second.tokens_per_sequence_step) == ("8-15", 4, 2.5)
    assert second.saved_s == 4.0
    assert isinstance(both.plain_us, np.ndarray)
    assert both.plain_us.dtype == np.int64
