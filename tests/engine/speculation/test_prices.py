"""Whose drafts are made where tokens are worth what they cost: what a job takes in the end, by brute force."""

from copy import copy
from itertools import product

import numpy as np
import pytest

from pipeline.engine.speculation.acceptance import count_deep
from pipeline.engine.speculation.budget import LossBudget
from pipeline.engine.speculation.choice import Split, Values, best_split, deal, paces, token_prices
from pipeline.engine.speculation.cost import StepCost
from pipeline.engine.speculation.gains import Gains
from pipeline.engine.speculation.messages import Batch
from pipeline.engine.speculation.proposing import ProposingCost

K = 6
NO_LIMIT = 1e9
FREE = ProposingCost(0.0, 0.0)
PASSES = ProposingCost(0.0, 0.0, [1, 1024], [1e-3, 1e-3])  # a pass costs the same for whoever drafts
NUM = 240
PART = 100.0  # tokens of each easy and of each hard part
GRID = [1, 240, 500, 4096]


def gains_of(times_ms: list[float], proposing: ProposingCost) -> Gains:
    """Of steps that take so long at the sizes of `GRID`, whatever their contexts."""
    times_s = [1e-3 * each for each in times_ms]
    budget = LossBudget()
    budget.open(10.0)
    return Gains(StepCost(GRID, [[times_s] * 2] * 3, (64, 1024)), [proposing], budget, K)


def settled(choose, values: Values) -> tuple[Split, np.ndarray, np.ndarray]:
    """Where sequences that go from easy to hard parts and back come to, when `choose` decides each step: whoever is
    quick in a part is seldom met in it. The split, how many are in which part, and how many tokens these get."""
    size_C = np.full(2, NUM / 2)
    for _ in range(60):
        split = choose(size_C[:, None] * np.ones((1, K)))
        _, tokens_C1 = paces(split, NUM, size_C[:, None] * np.ones((1, K)), values)
        time_C = PART / tokens_C1[:2]
        size_C = 0.7 * size_C + 0.3 * NUM * time_C / time_C.sum()
    return split, size_C, tokens_C1[:2]


def rate(split: Split, size_C: np.ndarray, tokens_C: np.ndarray) -> float:
    return float(size_C @ tokens_C) / split.seconds


def best_rate(gains: Gains, values: Values, proposing: ProposingCost) -> float:
    """Tokens a second in the long run with the best fixed depths for easy and for hard parts."""
    curve_s_D = gains.cost.curve_s(NUM, 64 * NUM, 0, NUM * K)
    rates = []
    for depth_C in product(range(K + 1), repeat=2):
        tokens_C = values.tokens_CK1[[0, 1], depth_C]
        size_C = NUM * (1 / tokens_C) / (1 / tokens_C).sum()
        passes_s = sum(float(proposing.pass_s(np.array([size_C[[d > k for d in depth_C]].sum()]))[0]) for k in range(K))
        step_s = float(np.interp(size_C @ np.array(depth_C), np.arange(len(curve_s_D)), curve_s_D)) + passes_s
        rates.append(float(size_C @ tokens_C) / step_s)
    return max(rates)


@pytest.mark.parametrize(
    ("times_ms", "proposing"),
    [
        ([10.0, 20.0, 31.0, 181.0], FREE),  # a token more costs the same everywhere
        ([10.0, 10.0, 20.0, 160.0], FREE),
        ([8.0, 8.0, 8.0, 152.0], PASSES),  # nothing up to a kink, and passes
        ([8.0, 8.0, 8.0, 152.0], FREE),
    ],
    ids=["a line", "a steep line", "passes and a kink", "a kink"],
)
@pytest.mark.parametrize("hard", [0.1, 0.4])
def test_a_job_of_easy_and_hard_parts_is_nearly_as_quick_as_it_can_be(
    times_ms: list[float], proposing: ProposingCost, hard: float
) -> None:
    gains, values = gains_of(times_ms, proposing), Values(np.stack((np.full(K, 0.92), np.full(K, hard))))
    batch = Batch(NUM, 64 * NUM, 10_000, num_waiting=10_000, slot_S=np.arange(NUM))
    by_price = settled(lambda deep_CK: gains.split(batch, 0, deep_CK, values, 0.0), values)
    best = best_rate(gains, values, proposing)
    assert rate(*by_price) > 0.98 * best


def test_the_most_tokens_at_present_are_not_the_most_in_the_end() -> None:
    """What the prices are for: without them the same sequences hurry through what is easy."""
    gains, values = (
        gains_of([8.0, 8.0, 8.0, 152.0], PASSES),
        Values(np.stack((np.full(K, 0.92), np.full(K, 0.1)))),
    )
    batch = Batch(NUM, 64 * NUM, 10_000, num_waiting=10_000, slot_S=np.arange(NUM))
    curve_s_D = gains.cost.curve_s(NUM, 64 * NUM, 0, NUM * K)
    now = settled(lambda deep_CK: best_split(NUM, deep_CK, values, curve_s_D, PASSES, NO_LIMIT), values)
    by_price = settled(lambda deep_CK: gains.split(batch, 0, deep_CK, values, 0.0), values)
    assert rate(*by_price) > 1.03 * rate(*now)
    assert by_price[0].depth_C[0] < now[0].depth_C[0]


def test_what_a_token_costs() -> None:
    """Four of eleven draft two, one of these three, three draft none though they could, four have no candidates. A step
    of 2.0 s, 0.05 of it for each of 9 drafts: the rest is everybody's."""
    deep_CK = np.array([[4.0, 4.0, 4.0], [3.0, 3.0, 0.0]])
    values = Values(np.array([[0.5, 0.5, 0.5], [0.2, 0.2, 0.2]]))
    split = Split(9, np.array([2, 0]), 0, 1, 13.0, 1.9, 1.0, price_s=0.05)
    price_C, rest = token_prices(split, 11, deep_CK, values, lookup_s=0.1)
    assert rest == pytest.approx((2.0 - 9 * 0.05) / 11)
    assert price_C == pytest.approx([(rest + 2.25 * 0.05) / (1.75 + 0.25 * 0.125), rest])


def test_prices_are_made_once_for_the_same_values() -> None:
    gains, values = gains_of([10.0, 20.0, 31.0, 181.0], FREE), Values(np.stack((np.full(K, 0.92), np.full(K, 0.5))))
    batch = Batch(NUM, 64 * NUM, 10_000, num_waiting=10_000, slot_S=np.arange(NUM))
    few, many = (np.array([[easy], [NUM - easy]]) * np.ones((1, K)) for easy in (20.0, 200.0))
    first = gains.split(batch, 0, few, values, 0.0)
    then = gains.split(batch, 0, many, values, 0.0)
    fresh = gains_of([10.0, 20.0, 31.0, 181.0], FREE).split(batch, 0, many, values, 0.0)
    assert then.num_drafts != fresh.num_drafts, "by the prices of the first"
    assert gains.split(batch, 0, many, copy(values), 0.0).num_drafts == fresh.num_drafts
    assert first.num_drafts > 0


def test_where_the_curve_falls_drafts_cost_nothing() -> None:
    """A table may say that many tokens take less than few. A token that cost less than nothing would turn the order of
    its class's drafts around."""
    class_S, available_S = np.array([0, 0, 0, 0, 1, 1]), np.array([5, 2, 1, 1, 1, 0])
    deep_CK, values = (
        count_deep(class_S, available_S, 2, K),
        Values(np.array([[0.8, 0.6, 0.5, 0.4, 0.3, 0.2], [0.3] * K])),
    )
    curve_s_D = 1.0 - 0.08 * np.arange(11)
    split = best_split(6, deep_CK, values, curve_s_D, FREE, NO_LIMIT)
    assert split.num_drafts == 10
    assert split.price_s == 0.0
    price_C, rest = token_prices(split, 6, deep_CK, values)
    assert min(*price_C, rest) > 0.0
    steep_s_D = np.where(np.arange(11) < 8, curve_s_D, 9.0)
    priced = best_split(6, deep_CK, values.weighted(price_C, rest), steep_s_D, FREE, NO_LIMIT)
    assert priced.num_drafts == 7
    assert deal(priced, class_S, available_S, turn=0).sum() == 7


def test_a_draft_costs_what_the_step_grows_by() -> None:
    deep_CK, values = np.full((1, K), 10.0), Values(np.full((1, K), 0.9))
    line = best_split(10, deep_CK, values, 1.0 + 0.01 * np.arange(61), FREE, NO_LIMIT)
    assert line.num_drafts > 20
    assert line.price_s == pytest.approx(0.01)
    assert best_split(10, deep_CK, values, 1.0 + np.arange(61), FREE, NO_LIMIT).price_s == 0.0
    # Free up to 20 drafts, too dear behind: worth what the 20th brings in the time that tokens take here.
    kink = best_split(10, deep_CK, values, np.where(np.arange(61) <= 20, 1.0, np.arange(61) - 15.0), FREE, NO_LIMIT)
    assert kink.num_drafts == 20
    assert kink.price_s == pytest.approx(0.81 / kink.expected_tokens)


def test_where_tokens_are_worth_less_fewer_are_drafted() -> None:
    deep_CK, curve_s_D = np.full((2, K), 5.0), 1.0 + 0.04 * np.arange(61)
    values = Values(np.full((2, K), 0.9))
    alike = best_split(10, deep_CK, values, curve_s_D, FREE, NO_LIMIT)
    weighted = best_split(10, deep_CK, values.weighted(np.array([0.5, 1.5]), 1.0), curve_s_D, FREE, NO_LIMIT)
    assert alike.depth_C[0] == alike.depth_C[1]
    assert weighted.depth_C[0] < alike.depth_C[0] <= weighted.depth_C[1]
    tokens = 10 + sum(5 * 0.9 ** (k + 1) for c in range(2) for k in range(weighted.depth_C[c]))
    more = (
        0.0 if not weighted.num_deeper else weighted.num_deeper * 0.9 ** (weighted.depth_C[weighted.deeper_class] + 1)
    )
    assert weighted.expected_tokens == pytest.approx(tokens + more), "tokens are tokens"


def test_prices_never_decide_whether_to_draft() -> None:
    """That is for the tokens per second at present: prices are those of drafting on."""
    rng = np.random.default_rng(5)
    drafted = 0
    for _ in range(200):
        times_ms = np.cumsum(rng.exponential([8.0, 4.0, 6.0, 100.0])).tolist()
        proposing = FREE if rng.random() < 0.5 else PASSES
        gains, values = gains_of(times_ms, proposing), Values(rng.uniform(0.02, 0.95, (3, K)))
        size_C = rng.integers(0, 40, 3).astype(float)
        num = int(size_C.sum()) + int(rng.integers(1, 40))
        deep_CK = np.stack([size * (np.arange(K) < rng.integers(1, K + 1)) for size in size_C])
        batch = Batch(num, 64 * num, 10_000, num_waiting=10_000, slot_S=np.arange(num))
        split = gains.split(batch, 0, deep_CK, values, proposing.lookup_s(num))
        curve_s_D, lookup_s = gains.cost.curve_s(num, 64 * num, 0, num * K), proposing.lookup_s(num)
        most = best_split(num, deep_CK, values, curve_s_D, proposing, NO_LIMIT, lookup_s)
        assert bool(split.num_drafts) == bool(most.num_drafts)
        gain = max(most.expected_tokens / num * most.plain_s / (most.seconds + lookup_s) - 1.0, 0.0)
        assert gains.expected(batch, 0, deep_CK / num, 1.0, values) == pytest.approx(gain)
        assert split.expected_tokens / split.seconds >= num / split.plain_s
        drafted += bool(split.num_drafts)
    assert 20 < drafted < 180


def test_sequences_without_candidates_count_by_what_their_tokens_are_worth() -> None:
    """Five of ten have a candidate. Where the tokens of the others are worth much, a step must not wait for drafts."""
    deep_CK, values = np.array([[5.0], [0.0]]), Values(np.array([[0.6], [0.5]]))
    for rest, num_drafts in ((1.0, 5), (4.0, 0)):
        weighted = values.weighted(np.ones(2), rest)
        split = best_split(10, deep_CK, weighted, 1.0 + 0.04 * np.arange(11), FREE, NO_LIMIT)
        assert split.num_drafts == num_drafts
        assert weighted.plain(10, deep_CK) == pytest.approx(5 + 5 * rest)
