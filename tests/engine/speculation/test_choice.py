"""Draft lengths against brute force over all of them."""

from itertools import product

import numpy as np
import pytest

from pipeline.engine.speculation.acceptance import count_deep
from pipeline.engine.speculation.choice import Values, best_split, deal, even_split, paces
from pipeline.engine.speculation.proposing import ProposingCost

FREE = ProposingCost(0.0, 0.0)
NO_LIMIT = 1e9
C, K = 3, 3


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Classes, available drafts, values and a curve with stairs, kinks and noise, even falling ones."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 5))
    class_S, available_S = rng.integers(0, C, num), rng.integers(0, K + 1, num)
    probability_CK = rng.uniform(0.05, 0.99, (C, K))
    curve_s_D = 1.0 + np.cumsum(rng.choice([0.0, 0.02, 0.5, -0.01], num * K + 1) * rng.random(num * K + 1))
    return class_S, available_S, probability_CK, curve_s_D


def expected(length_S, class_S: np.ndarray, probability_CK: np.ndarray) -> float:
    return len(class_S) + sum(probability_CK[c, :n].cumprod().sum() for c, n in zip(class_S, length_S))


def seconds(length_S, curve_s_D: np.ndarray, cost: ProposingCost) -> float:
    passes = sum(float(cost.pass_s(np.array([sum(n > k for n in length_S)]))[0]) for k in range(K))
    return float(curve_s_D[sum(length_S)]) + passes


def split_of(case, cost: ProposingCost = FREE, extra_s: float = NO_LIMIT, lookup_s: float = 0.0):
    class_S, available_S, probability_CK, curve_s_D = case
    deep_CK, values = count_deep(class_S, available_S, C, K), Values(probability_CK)
    return best_split(len(class_S), deep_CK, values, curve_s_D, cost, extra_s, lookup_s)


@pytest.mark.parametrize("seed", range(40))
def test_no_lengths_give_more_tokens_per_second(seed: int) -> None:
    class_S, available_S, probability_CK, curve_s_D = case = random_case(seed)
    split = split_of(case, lookup_s=0.1)
    length_S = deal(split, class_S, available_S, turn=seed)
    assert length_S.sum() == split.num_drafts
    assert (length_S <= available_S).all()
    assert split.expected_tokens == pytest.approx(expected(length_S, class_S, probability_CK))
    best = max(
        expected(lengths, class_S, probability_CK) / (curve_s_D[sum(lengths)] + 0.1)
        for lengths in product(*(range(n + 1) for n in available_S))
    )
    assert split.expected_tokens / (split.seconds + 0.1) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(40))
def test_draft_passes_are_charged_as_they_come(seed: int) -> None:
    """With passes the order by value is no longer proven best: near the best, and its seconds are the real ones."""
    class_S, available_S, probability_CK, curve_s_D = case = random_case(seed)
    cost = ProposingCost(0.0, 0.0, [1, 4], [0.1, 0.16])
    split = split_of(case, cost)
    length_S = deal(split, class_S, available_S, turn=0)
    assert split.seconds == pytest.approx(seconds(length_S, curve_s_D, cost))
    best = max(
        expected(lengths, class_S, probability_CK) / seconds(lengths, curve_s_D, cost)
        for lengths in product(*(range(n + 1) for n in available_S))
    )
    assert best * 0.98 <= split.expected_tokens / split.seconds <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_no_step_risks_more_than_it_may(seed: int) -> None:
    case = random_case(seed)
    cost = ProposingCost(0.0, 0.0, [1, 4], [0.1, 0.16])
    split = split_of(case, cost, extra_s=0.25)
    assert split.num_drafts == 0 or split.seconds <= split.plain_s + 0.25 + 1e-9
    assert split_of(case, cost, extra_s=-NO_LIMIT).num_drafts == 0


def test_a_stair_does_not_hide_the_flat_part_behind_it() -> None:
    """The first draft costs half a step, the next ones nothing: stopping at the first fall would draft none."""
    case = np.zeros(1, dtype=np.int64), np.array([3]), np.array([[0.4, 0.95, 0.95]] * C), np.array([1.0, 1.5, 1.5, 1.5])
    assert split_of(case).num_drafts == 3


def test_those_who_draft_one_more_take_turns() -> None:
    class_S, available_S = np.zeros(4, dtype=np.int64), np.full(4, 3)
    probability_CK = np.array([[0.9, 0.5, 0.1]] * C)
    curve_s_D = np.where(np.arange(13) <= 6, 1.0, 9.0)
    split = split_of((class_S, available_S, probability_CK, curve_s_D))
    lengths = np.stack([deal(split, class_S, available_S, turn) for turn in range(4)])
    assert (lengths.sum(axis=1) == 6).all()
    assert lengths.min() == 1
    assert lengths.max() == 2
    assert (lengths.sum(axis=0) == 6).all()


def test_fractions_of_sequences_can_be_expected() -> None:
    deep_CK = np.array([[0.7, 0.7, 0.3], [0.3, 0.2, 0.1], [0.0, 0.0, 0.0]])
    split = best_split(1, deep_CK, Values(np.full((C, K), 0.9)), np.full(9, 1.0), FREE, NO_LIMIT)
    assert split.num_drafts == 2
    assert 2.0 < split.expected_tokens < 3.0


@pytest.mark.parametrize("seed", range(20))
def test_as_many_for_everybody_are_charged_and_counted_as_they_are(seed: int) -> None:
    class_S, available_S, probability_CK, curve_s_D = random_case(seed)
    deep_CK, values, cost = (
        count_deep(class_S, available_S, C, K),
        Values(probability_CK),
        ProposingCost(0.0, 0.0, [1], [0.3]),
    )
    for depth in range(1, K + 1):
        length_S = np.minimum(available_S, depth)
        took_s = seconds(length_S, curve_s_D, cost)
        split = even_split(len(class_S), deep_CK, values, depth, curve_s_D, cost, NO_LIMIT)
        if not length_S.any():
            assert split is None
            continue
        assert split is not None
        assert (deal(split, class_S, available_S, 0) == length_S).all()
        assert split.expected_tokens == pytest.approx(expected(length_S, class_S, probability_CK))
        assert split.seconds == pytest.approx(took_s)
        extra_s = took_s - curve_s_D[0]
        args = len(class_S), deep_CK, values, depth, curve_s_D, cost
        assert even_split(*args, extra_s + 1e-9) is not None
        assert even_split(*args, extra_s - 1e-9) is None
        assert even_split(*args[:4], curve_s_D[: length_S.sum()], cost, NO_LIMIT) is None, "no room for as many"


@pytest.mark.parametrize("seed", range(20))
def test_paces_are_those_of_the_split(seed: int) -> None:
    """One more for some of a class, too."""
    class_S, available_S, probability_CK, _ = case = random_case(seed)
    split, values = split_of(case), Values(probability_CK)
    size_G, tokens_G = paces(split, len(class_S), count_deep(class_S, available_S, C, K), values)
    assert size_G.sum() == len(class_S)
    assert (size_G * tokens_G).sum() == pytest.approx(split.expected_tokens)
    assert tokens_G[-1] == 1.0
    assert size_G[-1] == (available_S == 0).sum()


def test_what_a_first_draft_finds_out_decides_and_counts_nowhere_else() -> None:
    probability_CK = np.full((1, K), 0.1)
    deep_CK, curve_s_D = np.full((1, K), 10.0), 1.0 + 0.02 * np.arange(31)
    plain = best_split(10, deep_CK, Values(probability_CK), curve_s_D, FREE, NO_LIMIT)
    assert plain.num_drafts == 0
    split = best_split(10, deep_CK, Values(probability_CK, np.array([0.4])), curve_s_D, FREE, NO_LIMIT)
    assert split.num_drafts == 10
    assert split.depth_C.tolist() == [1]
    assert split.expected_tokens == pytest.approx(10 + 10 * 0.1)
