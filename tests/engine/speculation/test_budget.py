"""The account of losses, and the totals of the report."""

from dataclasses import replace

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
from pipeline.engine.speculation.controller import TIME_TRUST
from pipeline.engine.speculation.messages import Outcome
from pipeline.engine.speculation.proposing import ProposingCost
from pipeline.engine.speculation.record import NUM_BUCKETS, SpeculationCounts, bucket_of
from tests.engine.speculation.test_controller import MEMORY_BOUND, batch_of, controller_of, everything, step


def test_no_luck_can_lose_more_than_the_grant_and_the_share() -> None:
    """An opponent who takes all that each step may lose."""
    budget = LossBudget()
    budget.open(1.0)
    lost, elapsed = 0.0, 0.0
    for _ in range(10_000):
        risk_s = budget.affordable_s
        lost, elapsed = lost + risk_s, elapsed + 1.0 + risk_s
        budget.accept_or_replace(1.0 + risk_s, -risk_s, 1.0)
        assert lost <= GRANT_STEPS + EARNED_SHARE * elapsed
    assert lost > 0.9 * (GRANT_STEPS + EARNED_SHARE * elapsed)


@pytest.mark.parametrize("seed", range(20))
def test_what_was_charged_is_bounded_whatever_steps_take(seed: int) -> None:
    """Steps gain, or lose what they may, or now and then much more than that; debts are forgiven."""
    rng, budget = np.random.default_rng(seed), LossBudget()
    budget.open(1.0)
    charged = gains = excess = elapsed = forgiven = 0.0
    for _ in range(3000):
        risk_s = budget.affordable_s
        gained_s = 0.0
        if risk_s > 0.0:  # else nobody drafts
            kinds = [0.1 * rng.random(), -risk_s * rng.random(), -risk_s, -risk_s - 20 * rng.random()]
            gained_s = float(rng.choice(kinds, p=[0.02, 0.2, 0.775, 0.005]))
        before_s, elapsed_s = budget.balance_s, 1.0 + max(-gained_s, 0.0)
        budget.accept_or_replace(elapsed_s, gained_s, 1.0)
        elapsed, gains, charged = elapsed + elapsed_s, gains + max(gained_s, 0.0), charged + max(-gained_s, 0.0)
        excess += max(-gained_s - risk_s, 0.0)
        forgiven += max(budget.balance_s - (before_s + EARNED_SHARE * elapsed_s + gained_s), 0.0)
        assert budget.balance_s >= -GRANT_STEPS
        assert charged - gains <= GRANT_STEPS + EARNED_SHARE * elapsed + excess + 1e-9
    assert forgiven > 0.0
    assert charged - gains > 0.9 * (GRANT_STEPS + EARNED_SHARE * elapsed + excess - forgiven)


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
    budget.accept_or_replace(1.0, -GRANT_STEPS - 0.1, 1.0)
    assert budget.affordable_s == 0.0
    for _ in range(round(0.2 / EARNED_SHARE)):
        budget.accept_or_replace(1.0, 0.0, 1.0)
    assert 0.0 < budget.affordable_s < 0.1


def test_one_wild_step_does_not_end_it_for_good() -> None:
    budget = LossBudget()
    budget.open(1e-3)
    granted_s = budget.balance_s
    budget.accept_or_replace(60.0, -60.0, 1e-3)
    assert budget.affordable_s == 0.0
    budget.accept_or_replace(1.01 * granted_s / EARNED_SHARE, 0.0, 1e-3)
    assert budget.affordable_s > 0.0


def test_what_was_granted_is_kept_back_from_who_may_spend_earnings_alone() -> None:
    budget = LossBudget()
    budget.open(1.0)
    assert not budget.has_earned
    budget.accept_or_replace(1.0, 0.9 * GRANT_STEPS, 1.0)
    assert not budget.has_earned
    budget.accept_or_replace(1.0, 0.2 * GRANT_STEPS, 1.0)
    assert budget.has_earned
    assert budget.balance_s - budget.affordable_s > GRANT_STEPS


def test_a_good_hour_does_not_pay_for_a_bad_one() -> None:
    budget = LossBudget()
    budget.open(1.0)
    for _ in range(1000):
        budget.accept_or_replace(1.0, 0.5, 1.0)
    assert budget.balance_s == pytest.approx(CAP_STEPS)
    budget.accept_or_replace(0.1, 0.5, 0.1)  # in the tail plain steps are short; what is there stays
    assert budget.balance_s == pytest.approx(CAP_STEPS)


@pytest.mark.parametrize(("factor", "charged"), [(1.0, 1.0), (1.2, 1.2), (10.0, TIME_TRUST), (0.1, 1 / TIME_TRUST)])
def test_a_step_is_charged_what_it_took_as_far_as_that_is_trusted(factor: float, charged: float) -> None:
    controller, batch, gained = controller_of(MEMORY_BOUND, proposing=(ProposingCost(10e-6, 1e-6),)), batch_of(4), []
    while not controller.is_on:
        step(controller, batch, 1.0)
    settle = controller.budget.settle
    controller.budget.settle = lambda s, gain_s, *rest: (gained.append(gain_s), accept_or_replace(s, gain_s, *rest))[1]  # type: ignore[method-assign]
    for num_prefill in (0, 50):
        now = replace(batch, num_prefill=num_prefill)
        assert controller.wants_candidates(now) is not None
        drafted_S = controller.choose(now, everything(4)).length_S
        value_s = 4 * controller.decided.worth_s
        expected_s = controller.cost.step_s(4, now.kv_tokens, num_prefill, int(drafted_S.sum()))
        with_prompts_s = controller.cost.step_s(4, now.kv_tokens, num_prefill)
        plain_s = controller.cost.step_s(4, now.kv_tokens)
        controller.cost.observe = lambda *parts: None  # type: ignore[method-assign]
        controller.observe(now, Outcome(factor * expected_s, 4, drafted_S, np.zeros_like(drafted_S)))
        step_s = plain_s + expected_s - with_prompts_s if num_prefill else charged * expected_s
        assert gained[-1] == pytest.approx(value_s - step_s, abs=1e-4)


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
