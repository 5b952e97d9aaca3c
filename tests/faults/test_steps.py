"""Short campaigns of kills on jobs with steps and with a row function: see `steps`. The long ones are run by hand."""

from tests.faults.row_function import FLOW
from tests.faults.steps import play


def test_rows_of_three_steps_a_repetition_and_a_vote_survive_kills():
    counts = play(kills=3, seed=1, num_rows=200)
    assert counts.kills.total() == 3
    assert counts.rows >= 200


def test_rows_of_a_function_survive_kills():
    counts = play(kills=2, seed=3, num_rows=60, flow=FLOW)
    assert counts.kills.total() == 2
