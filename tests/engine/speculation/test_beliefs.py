"""What is believed of proposers, and when it is reckoned anew."""

import numpy as np
import pytest

from pipeline.engine.speculation.acceptance import DRAFT_MODEL, NGRAM
from pipeline.engine.speculation.beliefs import REFRESH_SEEN, REFRESH_STEPS, STALE_STEPS, Beliefs
from pipeline.engine.speculation.messages import Candidates

K = 4
LATE = 1000  # step from which on what drafts are worth is not reckoned in each step any more


def see(beliefs: Beliefs, accepted: int, num: int = 8, class_index: int = 0) -> None:
    beliefs.observe(np.full(num, class_index), np.full(num, K), np.full(num, accepted))


def test_candidates_are_sorted_by_class_and_cut_to_the_most_drafts() -> None:
    class_S, available_S, deep_CK = Beliefs([NGRAM], K).sorted(0, Candidates(np.array([9, 1, 0]), np.array([7, 3, 0])))
    assert class_S.tolist() == [3, 1, 0]
    assert available_S.tolist() == [K, 1, 0]
    assert deep_CK.tolist() == [[0] * K, [1, 0, 0, 0], [0] * K, [1] * K]


def test_what_drafts_are_worth_is_reckoned_after_some_steps_and_sequences_or_when_asked_to() -> None:
    beliefs = Beliefs([DRAFT_MODEL], K)
    before = beliefs.present(LATE, True, None, None)
    for _ in range(REFRESH_STEPS):
        assert beliefs.present(LATE, True, None, None) is before
        see(beliefs, 0, num=REFRESH_SEEN // REFRESH_STEPS)
    after = beliefs.present(LATE, True, None, None)
    assert after is not before
    assert after.value_CK[0, 0] < before.value_CK[0, 0] - 0.1
    beliefs.renew()
    assert beliefs.present(LATE, True, None, None) is not after


def test_a_proposer_that_is_tried_is_thought_of_as_well_as_may_be() -> None:
    beliefs = Beliefs([NGRAM], K)
    see(beliefs, 1)
    beliefs.renew()
    sober = beliefs.present(LATE, True, 0, None)
    beliefs.renew()
    assert (beliefs.present(LATE, True, 0, 0).value_CK > sober.value_CK + 0.02).all()


def test_a_draft_models_first_drafts_are_wanted_for_what_they_find_out() -> None:
    values = Beliefs([NGRAM, DRAFT_MODEL], K).values
    more_N = values.wanted_N - values.value_N
    is_first_N = values.order_N % K == 0
    assert set(values.class_N[more_N > 0.1]) == {4, 5}, "no news, and nothing accepted"
    assert more_N[~is_first_N] == pytest.approx(0.0)


def test_when_drafts_end_a_draft_models_sequences_have_no_news_any_more() -> None:
    beliefs = Beliefs([NGRAM, DRAFT_MODEL], K)
    for p in (0, 1):
        _, _, deep_CK = beliefs.sorted(p, Candidates(np.full(5, 2), np.full(5, 4)))
        beliefs.lately[p].remember(deep_CK, 5)
    looked_up, drafted = (lately.share_CK.copy() for lately in beliefs.lately)
    beliefs.ends(LATE)
    assert beliefs.lately[0].share_CK == pytest.approx(looked_up)
    assert beliefs.lately[1].share_CK != pytest.approx(drafted)
    assert beliefs.lately[1].share_CK[4].tolist() == [1.0] * K


@pytest.mark.parametrize(("is_on", "shadowed"), [(True, None), (False, None), (False, 0)])
def test_what_was_seen_counts_less_unless_offers_are_compared(is_on: bool, shadowed: int | None) -> None:
    beliefs = Beliefs([NGRAM], K)
    beliefs.age(LATE, is_on, shadowed)
    see(beliefs, 0)
    beliefs.lately[0].seen_at = LATE + STALE_STEPS
    before = beliefs.acceptance.probability()[0, 0]
    beliefs.age(LATE + STALE_STEPS, is_on, shadowed)
    after = beliefs.acceptance.probability()[0, 0]
    assert after == pytest.approx(before) if shadowed == 0 else after > before
    beliefs.age(LATE + 3 * STALE_STEPS, is_on, shadowed)
    assert beliefs.acceptance.probability()[0, 0] > after, "stale by now"
