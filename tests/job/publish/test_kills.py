"""Killed, repeated and concurrent publications leave each row once; `python -m tests.job.publish` kills more."""

import pytest

from tests.job.publish.fake_hub import FakeHub
from tests.job.publish.kills import Publisher, kill_on_delta, kill_on_hub, rows_in_folder, rows_in_table, rows_on_hub


@pytest.fixture(scope="module")
def publisher():
    return Publisher()


def test_a_killed_publication_to_the_hub_is_completed_by_the_next(publisher, states):
    assert kill_on_hub(publisher, *states, num_kills=4).total() == 4


def test_a_killed_publication_to_a_table_is_completed_by_the_next(publisher, states, tmp_path):
    assert kill_on_delta(publisher, *states, num_kills=4, folder=tmp_path).total() == 4


def test_two_publications_at_the_same_time_are_one(publisher, states, tmp_path):
    old, new = states
    with FakeHub() as hub:
        for state in (old, new):
            for target in (hub.url, str(tmp_path / "table")):
                both = [publisher.begin(state, target) for _ in range(2)]
                for process in both:
                    process.join(60)
                assert [process.exitcode for process in both] == [0, 0]
            assert rows_on_hub(hub) == rows_in_table(tmp_path / "table") == rows_in_folder(state)
        assert [title[:7] for title in hub.datasets["me/answers"].titles] == ["initial", "Publish", "Publish"]
