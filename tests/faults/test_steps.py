"""A short campaign of kills on a job with steps: see `steps`. The long one is run by hand."""

from tests.faults.steps import play


def test_rows_of_three_steps_a_repetition_and_a_vote_survive_kills():
    counts = play(kills=3, seed=1, num_rows=200)
    assert counts.kills.total() == 3
    assert counts.rows >= 200
