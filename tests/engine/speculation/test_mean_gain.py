"""The gain that decides whether drafting goes on."""

import pytest

from pipeline.engine.speculation.mean_gain import NOTABLE, STEPS, MeanGain


def test_it_begins_with_what_is_believed_and_follows_what_comes() -> None:
    gain = MeanGain(0.05)
    assert gain.now == 0.05
    gain.add(1.0, 1.0, 0.0)
    assert 0.04 < gain.now < 0.05
    for _ in range(5 * STEPS):
        gain.add(1.5, 1.0, 0.0)
    assert gain.now == pytest.approx(0.5, abs=0.01)
    gain.clear()
    assert gain.now == 0.05


def test_long_steps_count_for_more() -> None:
    gain = MeanGain(0.0)
    for step in range(400):
        gain.add(*((1.0, 1.0) if step % 2 else (6.0, 3.0)), 0.0)
    assert gain.now == pytest.approx(7.0 / 4.0 - 1.0, abs=0.03)


def test_once_tokens_are_worth_something_else_what_was_averaged_counts_little() -> None:
    def after(lasting: float) -> float:
        gain = MeanGain(0.05)
        for _ in range(50):
            gain.add(2.0, 1.0, 0.0)
        for _ in range(4):
            gain.add(0.9, 1.0, lasting)
        return gain.now

    assert after(0.9 * NOTABLE) > 0.7
    assert after(1.1 * NOTABLE) < 0.2
