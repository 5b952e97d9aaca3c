"""Trials of drafts: as long as luck may take, judged by what came of them, the rarer the more have failed."""

from pipeline.engine.speculation import trial as t
from pipeline.engine.speculation.trial import Trial


def steps_of(trial: Trial, value_s: float) -> int:
    """Until it is over."""
    steps = 0
    while trial.is_on:
        trial.observe(value_s, 1.0)
        steps += 1
    return steps


def test_it_takes_fewer_steps_of_more_sequences() -> None:
    trial = Trial()
    for num, steps in ((1, t.STEPS), (8, t.SEQUENCES // 8), (500, t.LEAST_STEPS)):
        trial.begin(num)
        assert steps_of(trial, 1.0) == steps + t.FIRST_STEPS


def test_what_was_seen_decides() -> None:
    for value_s, has_paid in ((1.0 + t.GAIN / 2, False), (1.0 + 2 * t.GAIN, True)):
        trial = Trial()
        trial.begin(4)
        steps_of(trial, value_s)
        assert trial.ends(100) == has_paid
        assert trial.num_failures == (0 if has_paid else 1)


def test_its_first_steps_do_not_count() -> None:
    trial = Trial()
    trial.begin(4)
    for _ in range(t.FIRST_STEPS):
        trial.observe(1.0, 100.0)
    steps_of(trial, 1.5)
    assert trial.ends(100)


def test_each_failure_doubles_the_pause_until_a_success() -> None:
    trial, step = Trial(), t.NOT_BEFORE
    assert not trial.may_begin(step - 1)
    assert trial.may_begin(step)
    for pause in (2 * t.FIRST_PAUSE, 4 * t.FIRST_PAUSE):
        trial.begin(1)
        assert not trial.may_begin(step)
        steps_of(trial, 0.5)
        trial.ends(step)
        assert not trial.may_begin(step + pause - 1)
        assert trial.may_begin(step + pause)
        step += pause
    trial.begin(1)
    steps_of(trial, 2.0)
    trial.ends(step)
    assert trial.may_begin(step + t.FIRST_PAUSE)
