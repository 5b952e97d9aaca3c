"""What drafts are worth where no rows wait, and whose drafts they are then."""

import numpy as np
import pytest

from pipeline.engine.speculation.acceptance import count_deep
from pipeline.engine.speculation.budget import LossBudget
from pipeline.engine.speculation.choice import Values
from pipeline.engine.speculation.cost import StepCost
from pipeline.engine.speculation.gains import Gains
from pipeline.engine.speculation.messages import Batch
from pipeline.engine.speculation.proposing import ProposingCost

K = 4
GRID = [1, 2, 1024]
FREE = ProposingCost(0.0, 0.0)
SURE = np.full(K, 0.9)


def gains_of(step_ms: float, token_ms: float, share: float, proposing: ProposingCost = FREE) -> Gains:
    times_s = [1e-3 * (step_ms + token_ms * tokens) for tokens in GRID]
    budget = LossBudget()
    budget.open(1.0)
    gains = Gains(StepCost(GRID, [[times_s] * 2] * 3, (64, 1024)), [proposing], budget, K)
    gains.persistence.share = share
    return gains


def split_of(gains: Gains, available_S: list[int], num_waiting: int = 0, slow: float = 0.2):
    """Sequences of two classes in turn, the first sure of its drafts."""
    num = len(available_S)
    deep_CK = count_deep(np.arange(num) % 2, np.array(available_S), 2, K)
    batch = Batch(num, 100 * num, 10_000, num_waiting=num_waiting, slot_S=np.arange(num))
    return gains.split(batch, 0, deep_CK, Values(np.stack((SURE, np.full(K, slow)))), 0.0)


def test_in_a_tail_tokens_of_quick_rows_are_worth_less() -> None:
    """Two of four rows have candidates. A step costs more with drafts: worth it while rows wait, and not when those are
    what is waited for that have none."""
    gains = gains_of(10.0, 0.4, share=1.0)
    waiting, tail = split_of(gains, [K, 0, K, 0], num_waiting=1000), split_of(gains, [K, 0, K, 0])
    assert waiting.num_drafts > 4
    assert waiting.worth_s == pytest.approx(waiting.expected_tokens / 4 * waiting.plain_s)
    assert waiting.worth_s > 1.3 * waiting.seconds
    assert tail.num_drafts == 0
    assert tail.worth_s == tail.seconds == tail.plain_s


def test_where_everybodys_turn_comes_all_tokens_are_worth_the_same() -> None:
    none, some = (split_of(gains_of(10.0, 0.4, share), [K, 0, K, 0]) for share in (0.0, 0.2))
    assert none.worth_s == pytest.approx(none.expected_tokens / 4 * none.plain_s)
    assert none.num_drafts == some.num_drafts > 4
    assert some.seconds < some.worth_s < none.worth_s


def test_the_more_rows_wait_the_less_differences_count() -> None:
    gains = gains_of(10.0, 0.4, share=0.8)
    lasting = [gains.lasting(Batch(4, 400, 100, num_waiting=w, slot_S=np.arange(4))) for w in (0, 4, 400)]
    assert lasting == pytest.approx([0.8, 0.4, 0.8 / 101])
    assert gains.lasting(Batch(1, 100, 100, slot_S=np.arange(1))) == 0.0
    assert gains.lasting(Batch(4, 400, 100)) == 0.0


def test_where_the_slowest_decide_everybody_drafts_as_much() -> None:
    """Sure drafts alone would give more tokens; one more for each sequence brings the end nearer."""
    dear = ProposingCost(0.0, 0.0, [1, 64], [1.0e-3, 1.0e-3])  # a pass costs the same for whoever drafts
    gains = gains_of(10.0, 0.0, share=1.0, proposing=dear)
    most, even = split_of(gains, [K] * 4, num_waiting=1000), split_of(gains, [K] * 4)
    assert most.num_drafts > even.num_drafts == 4
    assert (even.depth_C == 1).all()
    assert even.worth_s == pytest.approx(1.2 * even.plain_s)
    assert even.worth_s / even.seconds == pytest.approx(1.2 * 10.0 / 11.0, rel=1e-3)
    deeper = split_of(gains, [K] * 4, slow=0.45)
    assert (deeper.depth_C == 2).all()
    assert deeper.worth_s == pytest.approx((1.0 + 0.45 + 0.45**2) * deeper.plain_s)
