"""Which plain steps say what plain steps cost, and when some are made for it."""

import numpy as np

from pipeline.engine.speculation import checks as c
from pipeline.engine.speculation.checks import PlainTimes
from pipeline.engine.speculation.messages import Outcome

SLOW, USUAL = Outcome(3.0, 1), Outcome(3.0, 1, unseen_s=1.0)


def plain(times: PlainTimes, step: int, outcome: Outcome = SLOW, num_passed: int = 0) -> float | None:
    return times.step_s(step, outcome, has_drafts=False, has_prompts=False, num_passed=num_passed)


def drafted(times: PlainTimes, steps: int) -> None:
    one = np.ones(1, dtype=np.int64)
    for _ in range(steps):
        assert times.step_s(1, Outcome(2.0, 2, one, one), has_drafts=True, has_prompts=False, num_passed=0) == 2.0


def test_one_that_is_looked_at_counts_only_where_those_that_passed_are_not_timed() -> None:
    times = PlainTimes()
    assert plain(times, 10, num_passed=9) == 3.0
    assert plain(times, 20, USUAL, num_passed=9) == 1.0
    assert plain(times, 30, num_passed=9) is None
    assert plain(times, 21 + c.STALE_STEPS, num_passed=9) == 3.0


def test_behind_drafts_the_first_ones_do_not_count() -> None:
    times = PlainTimes()
    drafted(times, 5)
    counted = [plain(times, 10 + n) is not None for n in range(c.SETTLED_STEPS + 1)]
    assert counted == [False] * (c.SETTLED_STEPS - 1) + [True, True]
    drafted(times, 5)
    assert plain(times, 20) is None
    assert plain(times, 20 + c.UNSETTLED_STEPS) == 3.0


def test_checks_come_ever_more_seldom_and_take_as_many_steps_as_it_needs() -> None:
    times, between = PlainTimes(), []
    for _ in range(6):
        steps = 0
        while not times.is_due:
            drafted(times, 1)
            steps += 1
        between.append(steps)
        times.begin(0, gain=0.1)
        taken = 0
        while times.takes_one():
            plain(times, 0)
            taken += 1
        assert taken == c.SETTLED_STEPS
    assert between == [min(c.FIRST_CHECK_STEPS << n, c.CHECK_STEPS) for n in range(6)]


def test_where_much_is_gained_they_are_left_out_for_a_while() -> None:
    times = PlainTimes()
    times.begin(10, gain=1.5)
    assert not times.takes_one()
    times.begin(10, gain=0.5)
    assert times.takes_one(), "the first ones, unless twice as much is gained"
    times.begin(10 + c.SURE_STEPS, gain=1.5)
    assert times.takes_one()
    times.ends()
    assert not times.takes_one()
