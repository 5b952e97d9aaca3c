"""What proposing costs: lookups, passes, and both at the present speed."""

import numpy as np
import pytest

from pipeline.engine.speculation.proposing import ProposingCost


def test_lookups_are_paid_by_sequence_and_passes_by_depth() -> None:
    ngram = ProposingCost(1e-3, 1e-5)
    assert ngram.lookup_s(100) == pytest.approx(2e-3)
    assert not ngram.has_passes
    draft = ProposingCost(0.0, 0.0, [1, 100], [1e-3, 2e-3])
    assert draft.pass_s(np.array([0, 1, 100, 200])) == pytest.approx([0.0, 1e-3, 2e-3, 4e-3])


def test_passes_are_timed_up_to_the_largest_batch() -> None:
    now, ran = 0.0, []

    def run_pass(count: int) -> None:
        nonlocal now
        ran.append(count)
        now += 1e-3 + 1e-5 * count

    cost = ProposingCost.measure_passes(run_pass, 48, clock=lambda: now)
    assert max(ran) == 48
    assert min(ran) == 1
    assert cost.pass_s(np.array([1, 20, 48])) == pytest.approx([1.01e-3, 1.2e-3, 1.48e-3], rel=1e-3)


def test_observations_scale_what_is_expected() -> None:
    draft = ProposingCost(0.0, 0.0, [1, 4], [1e-3, 1e-3])
    drafts_S = np.array([3, 1, 0, 0])  # passes over 2, 1 and 1 sequences
    for step in range(20):
        draft.observe(4, drafts_S, 0.3 if step % 5 == 0 else 0.006)  # 3 ms expected; some steps are disturbed
    assert draft.scale == pytest.approx(2.0)
    assert draft.pass_s(np.array([2])) == pytest.approx([2e-3])
    for _ in range(20):
        draft.observe(4, drafts_S, 0.003)
    assert draft.scale == pytest.approx(1.0)
    lookup = ProposingCost(1e-3, 0.0)
    for step in range(20):
        lookup.observe(4, np.zeros(0, dtype=np.int64), 0.3 if step % 5 == 0 else 0.003)
    assert lookup.lookup_s(4) == pytest.approx(3e-3)


def test_catching_up_counts_by_its_mean_and_not_as_a_pass() -> None:
    """A draft model catches up in some steps alone; a median would see all of it or nothing."""
    draft = ProposingCost(0.0, 0.0, [1, 4], [1e-3, 1e-3])
    assert draft.lookup_s(4) == 0.0
    for step in range(60):
        catching_up_s = 0.0 if step % 4 == 0 else 8e-3
        draft.observe(4, np.array([1, 1, 1, 1]), 1e-3 + catching_up_s, catching_up_s)
    assert draft.lookup_s(4) == pytest.approx(6e-3, rel=0.1)
    assert draft.lookup_s(2) == pytest.approx(3e-3, rel=0.1)
    assert draft.scale == pytest.approx(1.0)
