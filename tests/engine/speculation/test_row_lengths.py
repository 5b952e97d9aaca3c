"""How many tokens each sequence drafts, by what became of its last drafts."""

import numpy as np

from pipeline.engine.drafts.policy import Verdict
from pipeline.engine.speculation.row_lengths import RowLengths


def lengths_after(rows: RowLengths, accepted: list[int], cost: float, slot: int = 3) -> list[int]:
    """What a sequence drafts in steps in which so many of its drafts would be accepted."""
    slot_S, seen = np.array([slot]), []
    for each in accepted:
        (length,) = rows.lengths(slot_S).tolist()
        seen.append(length)
        if length:
            rows.observe(Verdict(slot_S, np.array([length]), np.array([min(each, length)])), cost)
    return seen


def test_a_row_drafts_as_much_as_pays() -> None:
    rows = RowLengths(8)
    rows.admitted(3)
    assert lengths_after(rows, [8] * 20, cost=0.5)[-1] == 8
    falling = lengths_after(rows, [0] * 20, cost=0.5)
    assert falling[:9] == sorted(falling[:9], reverse=True), "ever less"
    assert falling[-1] == 0
    assert 0 < sum(length > 0 for length in lengths_after(rows, [0] * 60, cost=0.5)) < 12, "it tries now and then"
    assert lengths_after(rows, [8] * 40, cost=0.5)[-1] == 8, "and goes on with it"


def test_a_new_row_drafts_as_the_others_do_whatever_its_slot_held() -> None:
    rows = RowLengths(8)
    rows.admitted(3)
    lengths_after(rows, [0] * 60, cost=0.3)
    rows.admitted(5)
    assert rows.lengths(np.array([5])).tolist() == [1], "what drafts are worth in this text is known"
    rows = RowLengths(8)
    for slot in (3, 4):
        rows.admitted(slot)
    for _ in range(20):
        lengths_after(rows, [8], cost=0.3, slot=4)
        lengths_after(rows, [0], cost=0.3, slot=3)
    before = rows.lengths(np.array([3, 4])).tolist()
    rows.admitted(3)
    assert before[0] < rows.lengths(np.array([3])).tolist()[0]
