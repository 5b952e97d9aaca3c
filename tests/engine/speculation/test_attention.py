"""What looking on may cost while nobody drafts."""

import pytest

from pipeline.engine.speculation.attention import GRANT_STEPS, HASTE, LEAST_PAUSE, MOST_PAUSE, SHARE, Attention


@pytest.mark.parametrize("look_s", [1e-5, 1e-4, 3e-4])
def test_looking_takes_a_share_of_the_time_and_what_was_granted(look_s: float) -> None:
    """Steps of half a millisecond, each look of which takes up to more than half as much."""
    attention, plain_s, pauses, pause = Attention(), 5e-4, [], 1
    elapsed_s = spent_s = 0.0
    while elapsed_s < 20.0:
        elapsed_s += pause * plain_s
        spent_s += look_s
        pause = attention.pause(pause * plain_s, look_s, plain_s)
        pauses.append(pause)
        assert spent_s <= GRANT_STEPS * plain_s + SHARE * elapsed_s + look_s
        assert LEAST_PAUSE <= pause <= MOST_PAUSE
    assert spent_s > 0.95 * min(SHARE * elapsed_s, look_s * elapsed_s / plain_s / LEAST_PAUSE)
    assert pauses[0] < pauses[-1] or pauses[0] == LEAST_PAUSE


def test_what_was_granted_is_spread_over_many_steps() -> None:
    attention, sustained = Attention(), 3e-4 / SHARE / 5e-4
    assert attention.pause(4e-3, 3e-4, 5e-4) == pytest.approx(sustained / HASTE, abs=1)
    for _ in range(100):
        pause = attention.pause(4e-3, 3e-4, 5e-4)
    assert pause > sustained


def test_steps_that_take_long_are_looked_at_often() -> None:
    attention = Attention()
    assert {attention.pause(8 * 0.02, 3e-4, 0.02) for _ in range(1000)} == {LEAST_PAUSE}


def test_one_disturbed_look_is_forgiven() -> None:
    attention = Attention()
    assert attention.pause(4e-3, 5.0, 5e-4) == MOST_PAUSE
    assert attention.pause(MOST_PAUSE * 5e-4, 1e-5, 5e-4) == LEAST_PAUSE


def test_after_failures_less_time_goes_into_looking() -> None:
    spent_s = []
    for num_failures in (0, 1, 2):
        attention, elapsed_s, pause, looks = Attention(), 0.0, 1, 0
        while elapsed_s < 20.0:
            elapsed_s += pause * 5e-4
            pause = attention.pause(pause * 5e-4, 1e-4, 5e-4, num_failures)
            looks += 1
        spent_s.append(looks * 1e-4)
    assert spent_s[0] / spent_s[1] == pytest.approx(2.0, rel=0.1)
    assert spent_s[0] / spent_s[2] == pytest.approx(3.0, rel=0.1)
