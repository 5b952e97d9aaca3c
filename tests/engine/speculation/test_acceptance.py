"""Acceptance estimates against texts whose probabilities are known."""

import numpy as np
import pytest

from pipeline.engine.speculation.acceptance import DRAFT_MODEL, NGRAM, WINDOW, Acceptance, ProposerPrior

K = 4


def feed(acceptance: Acceptance, probability_K, steps: int, class_index: int = 0, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    class_S = np.full(8, class_index)
    for _ in range(steps):
        alike_SK = (rng.random((8, K)) < np.asarray(probability_K)).cumprod(axis=1)
        drafted_S = rng.integers(0, K + 1, 8)
        acceptance.observe(class_S, drafted_S, np.minimum(alike_SK.sum(axis=1), drafted_S))


def test_classes_are_buckets_of_match_lengths_by_proposer() -> None:
    acceptance = Acceptance([NGRAM, DRAFT_MODEL], K)
    assert acceptance.class_of(0, np.array([0, 2, 3, 4, 5, 6, 900])).tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert acceptance.class_of(1, np.array([0, 1, 2, 900])).tolist() == [4, 5, 6, 7]
    assert acceptance.proposer_C.tolist() == [0] * 4 + [1] * 4


def test_before_anything_is_seen_the_prior_is_believed() -> None:
    acceptance = Acceptance([NGRAM], K)
    assert acceptance.probability() == pytest.approx(np.repeat(np.array(NGRAM.accepted)[:, None], K, axis=1))


def test_the_estimate_at_a_position_is_given_that_those_before_were_accepted() -> None:
    acceptance = Acceptance([DRAFT_MODEL, DRAFT_MODEL], K)
    truth_K = [0.9, 0.7, 0.5, 0.2]
    feed(acceptance, truth_K, 2000)
    assert acceptance.probability()[0] == pytest.approx(truth_K, abs=0.08)
    assert acceptance.probability()[4] == pytest.approx([0.65] * K)


def test_a_position_never_seen_is_thought_of_as_its_class() -> None:
    acceptance = Acceptance([DRAFT_MODEL], K)
    class_S, drafted_S = np.zeros(8, dtype=np.int64), np.ones(8, dtype=np.int64)
    for _ in range(100):
        acceptance.observe(class_S, drafted_S, np.zeros(8, dtype=np.int64))
    assert acceptance.probability()[0, K - 1] < 0.05


def test_what_was_seen_long_ago_counts_less() -> None:
    acceptance = Acceptance([DRAFT_MODEL], K)
    feed(acceptance, [0.9] * K, 300)
    feed(acceptance, [0.2] * K, 200, seed=1)
    assert acceptance.probability()[0, 0] == pytest.approx(0.2, abs=0.08)


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    acceptance = Acceptance([DRAFT_MODEL], K)
    feed(acceptance, [0.05] * K, 300)
    assert acceptance.probability()[0, 0] < 0.15
    acceptance.forget(20_000)
    assert acceptance.probability()[0, 0] == pytest.approx(0.65, abs=0.02)


def test_of_what_is_seen_all_the_time_nothing_is_forgotten() -> None:
    acceptance = Acceptance([NGRAM, DRAFT_MODEL], K)
    feed(acceptance, [0.05] * K, 300)
    feed(acceptance, [0.05] * K, 300, class_index=4)
    before = acceptance.probability()
    acceptance.forget(20_000, but=0)
    after = acceptance.probability()
    assert after[0] == pytest.approx(before[0])
    assert after[4, 0] == pytest.approx(0.65, abs=0.02)


def test_what_few_sequences_see_is_taken_in_together_and_asked_for_at_any_time() -> None:
    """One sequence told of in each of many steps against the same told at once, and asked in between."""
    one, other, rng = Acceptance([NGRAM], K), Acceptance([NGRAM], K), np.random.default_rng(0)
    for _ in range(20):
        told = [(rng.integers(0, 4, 1), np.array([K]), rng.integers(0, K + 1, 1)) for _ in range(5)]
        for each in told:
            one.observe(*each)
        other.observe(*(np.concatenate(parts) for parts in zip(*told)))
        assert one.probability() == pytest.approx(other.probability())
    for _ in range(1000):
        one.observe(np.array([3]), np.array([K]), np.array([0]))
    assert one._weight_CK[3, 0] < 1.2 * WINDOW, "as many as one window, whoever never asks"


def test_hope_shrinks_with_what_is_seen() -> None:
    acceptance = Acceptance([DRAFT_MODEL], K)
    assert (acceptance.upper(1.5) > acceptance.probability() + 0.2).all()
    feed(acceptance, [0.5] * K, 500)
    assert (acceptance.upper(1.5) - acceptance.probability())[0, 0] < 0.1
    assert (acceptance.upper(50.0) <= 0.995).all()


def test_a_proposer_better_than_its_priors_is_thought_so_of_what_was_not_seen() -> None:
    acceptance = Acceptance([DRAFT_MODEL, NGRAM], K)
    feed(acceptance, [0.95] * K, 60)
    probability_CK = acceptance.probability()
    priors = [*DRAFT_MODEL.accepted, *NGRAM.accepted]
    assert (probability_CK[1:4, 0] > np.array(priors[1:4]) + 0.1).all()
    assert (np.diff(probability_CK[1:4, 0]) > 0.0).all(), "in the priors' order"
    assert probability_CK[4:, 0] == pytest.approx(priors[4:]), "another proposer's"


def test_bad_luck_of_one_class_is_not_anothers() -> None:
    acceptance = Acceptance([DRAFT_MODEL], K)
    feed(acceptance, [0.05] * K, 60, class_index=1)
    assert acceptance.probability()[1, 0] < 0.15
    assert acceptance.probability()[[0, 2, 3], 0] == pytest.approx([DRAFT_MODEL.accepted[c] for c in (0, 2, 3)])


def test_a_first_draft_finds_out_where_the_last_ones_say_most() -> None:
    looks_up = ProposerPrior("looks up", (0, 1, 2, 3), (0.3, 0.4, 0.5, 0.6))
    acceptance = Acceptance([looks_up, DRAFT_MODEL], K)
    probability_CK = np.tile(np.array([[0.3], [0.1], [0.8], [0.9]]), (2, K))
    lucky = 0.8 + 0.8**2 + 0.8**3 + 0.8**4
    wanted = [0.0] * 4 + [0.3 * (lucky - 0.3), 0.1 * (lucky - 0.1), 0.0, 0.0]
    assert acceptance.found_out(probability_CK) == pytest.approx(wanted)
    probability_CK[6] = 0.05
    assert acceptance.found_out(probability_CK) == pytest.approx([0.0] * 8), "nobody is lucky"
