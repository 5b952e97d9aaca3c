"""The parts of the measuring policy, each alone."""

import numpy as np
import pytest

from pipeline.engine.drafts.policy import Verdict
from pipeline.engine.speculation.acceptance import Acceptance
from pipeline.engine.speculation.account import CAP_STEPS, EARNED_SHARE, GRANT_STEPS, Account
from pipeline.engine.speculation.arms import OFF, Arm, bucket_of
from pipeline.engine.speculation.contest import FIRST_PAUSE, Contest
from pipeline.engine.speculation.row_depth import FIRST_REST, RowDepths
from pipeline.engine.speculation.step_time import PrefillCost, Window


def test_sizes_go_to_the_nearest_power_of_two() -> None:
    assert [bucket_of(n) for n in (1, 2, 3, 5, 6, 8, 11, 12, 64, 90)] == [0, 1, 2, 2, 3, 3, 3, 4, 6, 6]


def test_no_debt_is_forgiven_and_what_is_lost_is_charged() -> None:
    account = Account()
    account.open(1.0)
    assert account.can_pay
    account.settle(50.0, 100.0, 1.0)
    owed_s = 100.0 - GRANT_STEPS - EARNED_SHARE * 50.0
    assert account.balance_s == pytest.approx(-owed_s)
    elapsed_s = 0.0
    while not account.can_pay:
        account.settle(10.0, 0.0, 1.0)
        elapsed_s += 10.0
    assert EARNED_SHARE * elapsed_s >= owed_s
    for _ in range(10_000):
        account.settle(10.0, 0.0, 1.0)
    assert account.balance_s == CAP_STEPS


def test_a_window_takes_prompts_off_and_leaves_outliers_out() -> None:
    rng, window, cost = np.random.default_rng(0), Window(), PrefillCost()
    for n in range(64):
        num_prefill = int(rng.integers(0, 400)) if n % 2 else 0
        seconds = 0.01 + 1e-4 * num_prefill + (0.05 if n % 16 == 8 else 0.0)
        if len(window):
            cost.add(window, seconds, num_prefill, 8)
        window.add(seconds, num_prefill, 2.0, is_drafted=True)
    rate = window.rate(cost.token_s)
    assert rate is not None
    assert cost.token_s == pytest.approx(1e-4, rel=0.3)
    assert rate.step_s == pytest.approx(0.01, rel=0.25)
    assert rate.token_s == pytest.approx(rate.step_s / 2)
    assert 4 < rate.weight < 32, "steps beside many prompts count for little"


def test_tokens_of_a_step_by_what_was_accepted() -> None:
    acceptance = Acceptance(4)
    assert not acceptance.is_known
    for _ in range(300):
        acceptance.observe(np.array([4, 4]), np.array([4, 1]), num_without=2)
    # of four sequences two have a first draft accepted, one all four
    assert acceptance.tokens == pytest.approx(2.25, rel=0.03)


def test_a_row_whose_drafts_fall_drafts_less_and_then_rests() -> None:
    rows, slot_S = RowDepths(8), np.array([3])
    rows.admitted(3)
    seen = []
    for _ in range(FIRST_REST):
        seen.append(int(rows.depths(slot_S)[0]))
        rows.observe(Verdict(slot_S, np.array(seen[-1:]), np.array([0])))
    assert seen == [8, 4, 2, 1]
    assert [int(rows.depths(slot_S)[0]) for _ in range(3)] == [0, 0, 1]
    rows.observe(Verdict(slot_S, np.array([1]), np.array([1])))
    assert rows.depths(slot_S).tolist() == [8]


def test_slow_rows_are_told_from_unlucky_ones() -> None:
    rng = np.random.default_rng(0)
    for chance_S, expected in ((np.full(16, 0.7), 1.7), (np.repeat([0.0, 1.0], 8), 1.0)):
        rows, slot_S = RowDepths(1), np.arange(16)
        for slot in range(16):
            rows.admitted(slot)
        told = []
        for _ in range(200):
            accepted_S = (rng.random(16) < chance_S).astype(np.int64)
            told.append(rows.slow_tokens(slot_S, Verdict(slot_S, np.ones_like(slot_S), accepted_S)))
        assert np.mean(told[100:]) == pytest.approx(expected, abs=0.13)


def contest_of(speeds: dict[Arm, float], incumbent: Arm, challenger: Arm, drift: float = 0.0) -> Contest:
    """A contest that is over, on a machine on which steps take ever longer."""
    contest, now = Contest(), 1.0
    contest.incumbent = incumbent
    rng = np.random.default_rng(0)

    def run(arm: Arm) -> None:
        nonlocal now
        now *= 1.0 + drift
        contest.steps += 1
        contest.window(arm).add(now / speeds[arm] * (1.0 + 0.01 * rng.standard_normal()), 0, 1.0, arm != OFF)

    for _ in range(16):
        run(incumbent)
    contest.begin(challenger, 0.0)
    for _ in range(200):
        run(contest.active)
        if contest.judge(0.0, has_to_end=False, yields=None):
            return contest
    raise AssertionError("it does not end")


@pytest.mark.parametrize(("speed", "wins"), [(2.0, True), (1.1, True), (1.0, False), (0.5, False)])
def test_the_faster_arm_wins(speed: float, wins: bool) -> None:
    arm = 0
    contest = contest_of({OFF: 1.0, arm: speed}, OFF, arm)
    assert (contest.incumbent == arm) == wins
    assert contest.is_due(arm) == wins or contest.steps >= FIRST_PAUSE


def test_a_drift_of_the_machine_cancels() -> None:
    """Every step takes 0.4% longer than the one before, so that the challenger's seem 10% slower."""
    arm = 0
    assert contest_of({OFF: 1.0, arm: 1.1}, OFF, arm, drift=0.004).incumbent == arm
    assert contest_of({OFF: 1.1, arm: 1.1}, OFF, arm, drift=-0.004).incumbent == OFF


def test_who_loses_waits_twice_as_long_each_time() -> None:
    contest, arm = Contest(), 0
    pauses = []
    for _ in range(3):
        contest.challenger = arm
        contest._decide(0.95, 0.0)
        pauses.append(next(n for n in range(10_000) if contest.steps + n >= contest._due[arm]))
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]


def test_a_smaller_size_knows_what_arms_took_at_the_larger_one() -> None:
    contest = contest_of({OFF: 1.0, 0: 0.5}, OFF, 0)
    assert Contest(contest).slowdown(0, 0.0) == pytest.approx(2.0, rel=0.1)
    assert Contest(contest).slowdown(1, 0.0) is None
