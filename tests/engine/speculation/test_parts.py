"""The parts of the measuring policy, each alone."""

import numpy as np
import pytest

from pipeline.engine.drafts.policy import Verdict
from pipeline.engine.speculation.acceptance import Acceptance
from pipeline.engine.speculation.account import CAP_STEPS, EARNED_SHARE, GRANT_STEPS, Account
from pipeline.engine.speculation.arms import OFF, Arm, bucket_of
from pipeline.engine.speculation.contest import END_STEPS, FIRST_PAUSE, Contest
from pipeline.engine.speculation.row_depth import REST, RowDepths
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
        window.add(seconds, num_prefill, 2.0, 4.0)
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


@pytest.mark.parametrize(("fixed_s", "draft_s"), [(0.0, 1e-3), (4e-3, 1e-3), (4e-3, 0.0)])
def test_what_a_draft_costs_by_steps_that_have_more_and_fewer(fixed_s: float, draft_s: float) -> None:
    """fixed_s: what drafting adds to a step whatever the number of drafts."""
    rng, window, off_s = np.random.default_rng(0), Window(), 0.01
    for drafts in rng.uniform(0.5, 7.5, 32):
        seconds = off_s + fixed_s + draft_s * drafts
        window.add(seconds * (1.0 + 0.01 * rng.standard_normal()), 0, 3.0, drafts)
    rate = window.rate(0.0)
    assert rate is not None
    assert rate.draft_cost(off_s) == pytest.approx(draft_s * rate.tokens / rate.step_s, abs=0.03)


def test_steps_that_draft_alike_share_their_time_with_plain_ones() -> None:
    window = Window()
    for _ in range(32):
        window.add(0.02, 0, 4.0, 6.0)
    rate = window.rate(0.0)
    assert rate is not None
    assert rate.draft_cost(0.01) == pytest.approx(0.01 / 6.0 * 4.0 / 0.02)
    assert rate.draft_cost(None) == pytest.approx((0.02 - 0.02 / 7.0) / 6.0 * 4.0 / 0.02)


def depths_after(rows: RowDepths, accepted: list[int], cost: float) -> list[int]:
    """What a sequence drafts in steps in which so many of its drafts would be accepted."""
    slot_S, seen = np.array([3]), []
    for each in accepted:
        (depth,) = rows.depths(slot_S).tolist()
        seen.append(depth)
        if depth:
            rows.observe(Verdict(slot_S, np.array([depth]), np.array([min(each, depth)])), cost)
    return seen


def test_a_row_drafts_as_deep_as_is_worth_it() -> None:
    rows = RowDepths(8)
    rows.admitted(3)
    assert depths_after(rows, [8] * 20, cost=0.5)[-1] == 8
    falling = depths_after(rows, [0] * 20, cost=0.5)
    assert falling[:9] == sorted(falling[:9], reverse=True), "ever less"
    assert falling.count(0) >= REST
    resting = depths_after(rows, [0] * 5 * (REST + 1), cost=0.5)
    assert sum(depth > 0 for depth in resting) == 5, "it tries now and then"
    assert depths_after(rows, [8] * 40, cost=0.5)[-1] == 8, "and goes on with it"


def test_rows_draft_deeper_where_drafts_cost_less() -> None:
    depth = {}
    for cost in (0.0, 0.1, 0.5, 1.5):
        rows = RowDepths(8)
        rows.admitted(3)
        depth[cost] = np.mean(depths_after(rows, [1, 2, 1, 3] * 30, cost)[20:])
    assert depth[0.0] == 8 > depth[0.1] > depth[0.5] > depth[1.5] > 0


def test_a_new_row_drafts_as_the_others_do() -> None:
    rows = RowDepths(8)
    rows.admitted(3)
    depths_after(rows, [0] * 60, cost=0.3)
    rows.admitted(5)
    assert rows.depths(np.array([5])).tolist() == [1], "what drafts are worth in this text is known"


@pytest.mark.parametrize("is_replayed", [False, True])
def test_slow_rows_are_told_from_unlucky_ones(is_replayed: bool) -> None:
    rng = np.random.default_rng(0)
    for chance_S, expected in ((np.full(16, 0.7), 1.0), (np.repeat([0.0, 1.0], 8), 1.0 / 1.5)):
        rows, slot_S = RowDepths(1), np.arange(16)
        for slot in range(16):
            rows.admitted(slot)
        told = []
        for _ in range(200):
            accepted_S = (rng.random(16) < chance_S).astype(np.int64)
            if is_replayed:
                assert rows.replayed(slot_S, accepted_S).tolist() == slot_S.tolist()
            else:
                rows.asked(slot_S, Verdict(slot_S, np.ones_like(slot_S), accepted_S))
            told.append(rows.slow_share(slot_S))
        assert np.mean(told[100:]) == pytest.approx(expected, abs=0.08)


def test_how_fast_a_row_was_long_ago_counts_little() -> None:
    rows, slot_S = RowDepths(4), np.arange(2)
    for slot in range(2):
        rows.admitted(slot)
    for accepted_S in (np.array([4, 0]),) * 300 + (np.array([0, 4]),) * 3000:
        rows.asked(slot_S, Verdict(slot_S, np.full(2, 4), accepted_S))
        share = rows.slow_share(slot_S)
    assert rows._extra_B[slot_S] / rows._seen_B[slot_S] == pytest.approx([0.0, 4.0], abs=0.01)
    assert share < 0.5


def test_rows_that_were_not_seen_are_not_slow() -> None:
    rows, slot_S = RowDepths(4), np.arange(4)
    for slot in range(4):
        rows.admitted(slot)
    assert rows.slow_share(slot_S) == 1.0
    rows.asked(slot_S[:1], None)
    assert rows.slow_share(slot_S) == 1.0


def test_replayed_drafts_count_by_sequence_as_in_a_step() -> None:
    """Sequences whose drafts are all accepted have one offer where others, whose fall, have five."""
    acceptance = Acceptance(4)
    acceptance.replayed(np.repeat(np.arange(16), [1, 5] * 8), np.repeat([4, 0] * 8, [1, 5] * 8))
    assert acceptance.tokens == pytest.approx(3.0, abs=0.15)


@pytest.mark.parametrize(("cost", "expected"), [(0.0, 2.6), (0.5, 1.2), (2.0, 0.6)])
def test_the_best_depth_for_what_a_draft_costs(cost: float, expected: float) -> None:
    """Of drafts of which the first is accepted with a chance of 0.8, the next ones with one of a half."""
    acceptance = Acceptance(4)
    accepted_O = np.array([0, 0] + [1] * 4 + [2] * 2 + [3, 4])
    acceptance.replayed(np.arange(10), accepted_O)
    assert acceptance.speed(cost) == pytest.approx(expected, abs=0.12)


def contest_of(speeds: dict[Arm, float], incumbent: Arm, challenger: Arm, drift: float = 0.0) -> Contest:
    """A contest that is over, on a machine on which steps take ever longer."""
    contest, now = Contest(), 1.0
    contest.incumbent = incumbent
    rng = np.random.default_rng(0)

    def run(arm: Arm) -> None:
        nonlocal now
        now *= 1.0 + drift
        contest.steps += 1
        contest.looked(8, contest.steps)
        contest.window(arm).add(now / speeds[arm] * (1.0 + 0.01 * rng.standard_normal()), 0, 1.0, float(arm != OFF))

    for _ in range(16):
        run(incumbent)
    contest.begin(challenger, 0.0)
    for _ in range(200):
        run(contest.active)
        if contest.judge(0.0, has_to_end=False, is_end=False, slow=1.0):
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
        contest._decide(0.95, 0.0, slowdown=1.1)
        pauses.append(next(n for n in range(10_000) if contest.steps + n >= contest._due[arm]))
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]


def test_a_size_of_which_nothing_is_known_goes_on_as_the_last_one() -> None:
    known, new = contest_of({OFF: 1.0, 0: 0.5}, OFF, 0), Contest(size=2)
    new.follow(known)
    new.looked(8, 0)
    assert new.slowdown(0, 0.0) == pytest.approx(2.0, rel=0.1)
    assert new.slowdown(1, 0.0) is None
    won = contest_of({OFF: 1.0, 0: 2.0}, OFF, 0)
    new.follow(won)
    assert new.incumbent == 0


def test_what_was_decided_at_a_size_holds_until_drafts_win_at_a_larger_one() -> None:
    small, large = contest_of({OFF: 1.0, 0: 0.5}, OFF, 0), contest_of({OFF: 1.0, 0: 2.0}, OFF, 0)
    small.size, large.size = 2, 5
    small.follow(large)
    assert small.incumbent == OFF, "both at the same time"
    large._decided_at += 1
    small.follow(large)
    assert small.incumbent == 0
    large.follow(contest_of({OFF: 1.0, 0: 0.5}, OFF, 0))
    assert large.incumbent == 0


def test_a_batch_that_shrinks_ends_a_contest_that_nobody_won() -> None:
    contest = Contest()
    for num in (8, 8, 8, 8, 8, 5):
        if num == 8:
            contest.window(OFF).add(1.0, 0, 1.0, 0.0)
        contest.steps += 1
        contest.looked(num, contest.steps)
        if contest.steps == 4:
            contest.begin(0, 0.0)
    assert contest.judge(0.0, has_to_end=False, is_end=False, slow=1.0)
    assert (contest.challenger, contest.incumbent) == (None, OFF)


def test_a_row_that_is_steadily_slow_is_told_within_few_steps() -> None:
    """Half of the rows get one token a step, the others from 1 to 7: their luck is not that of the slow ones."""
    rng, rows, slot_S = np.random.default_rng(0), RowDepths(6), np.arange(16)
    for slot in range(16):
        rows.admitted(slot)
    for _ in range(24):
        accepted_S = np.where(slot_S < 8, 0, rng.integers(0, 7, 16))
        rows.asked(slot_S, Verdict(slot_S, np.full(16, 6), accepted_S))
    assert rows.slow_share(slot_S) < 1.5 / 2.5


def test_contests_at_a_jobs_end_are_shorter() -> None:
    """And of drafts that half of the rows have nothing of only those of slow rows count."""
    ends, winners = [], []
    for is_end, slow in ((False, 1.0), (True, 1.0), (True, 0.5)):
        contest, rng = Contest(), np.random.default_rng(0)
        contest.looked(8, 0)
        for _ in range(16):
            contest.window(OFF).add(1.0 + 0.2 * rng.standard_normal(), 0, 1.0, 0.0)
        contest.begin(0, 0.0)
        over = False
        while not over:
            contest.steps += 1
            tokens = 1.0 if contest.active == OFF else 1.3 + 0.2 * rng.standard_normal()
            contest.window(contest.active).add(
                1.0 + 0.2 * rng.standard_normal(), 0, tokens, float(contest.active != OFF)
            )
            over = contest.judge(0.0, has_to_end=False, is_end=is_end, slow=slow)
        ends.append(contest.steps)
        winners.append(contest.incumbent)
    assert END_STEPS <= ends[1] < ends[0]
    assert winners == [0, 0, OFF]


def test_among_fewer_sequences_drafts_add_less_to_a_step() -> None:
    """Sixteen took 0.5 seconds plain and 1.3 with drafts; four take 0.4 plain."""
    large, small = Contest(4), Contest(2)
    large.looked(16, 0)
    large.begin(0, 0.0)
    for _ in range(16):
        large.window(OFF).add(0.5, 0, 1.0, 0.0)
        large.window(0).add(1.3, 0, 3.0, 4.0)
    large._decided_at = 1
    small.looked(4, 0)
    small.follow(large)
    for _ in range(8):
        small.window(OFF).add(0.4, 0, 1.0, 0.0)
    assert small.slowdown(0, 0.0) == pytest.approx((0.4 + 0.8 / 4) / 0.4)
    small.looked(32, 0)
    assert small.slowdown(0, 0.0) == pytest.approx(1.3 / 0.5)
