"""A run that cannot continue ends with its reason, and no decision depends on wall time."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from pipeline.errors import EnvironmentFailed
from pipeline.job.dataflow.in_process import InProcessDataflow
from tests.job.conftest import TEXTS, run, runs

pytestmark = pytest.mark.usefixtures("without_ray")


class NoActors(InProcessDataflow):
    """A cluster that never has room for an engine actor."""

    def __init__(self, spec, run_began_us):
        pass

    def next(self, timeout_s):
        time.sleep(0.05)

    def actors(self, end=False):
        return []

    def order(self, order):
        pass

    def close(self):
        pass


class LostActors(InProcessDataflow):
    """A cluster whose machines disappear after the first unit and do not return."""

    def next(self, timeout_s):
        if not hasattr(self, "lost"):
            summary = super().next(timeout_s)
            if summary is not None:
                self.lost = super().actors()
            return summary
        time.sleep(0.05)
        return None

    def actors(self, end=False):
        return getattr(self, "lost", None) or super().actors(end)


def test_a_run_without_actors_ends_with_its_reason(job, monkeypatch):
    monkeypatch.setattr("pipeline.job.running.driver.InProcessDataflow", NoActors)
    job.rows(TEXTS)
    with pytest.raises(EnvironmentFailed, match=r"no engine actor could be started.*run\.actors"):
        run(job, run={"stall_timeout": "0.1 s"})


def test_actors_that_are_silent_for_too_long_end_the_run_and_the_next_one_resumes(job, monkeypatch):
    monkeypatch.setattr("pipeline.job.running.driver.InProcessDataflow", LostActors)
    job.rows(TEXTS)
    with pytest.raises(EnvironmentFailed, match=r"No progress for 1.2 s.*1 engine actors reported"):
        run(job, run={**job.settings["run"], "stall_timeout": "0.2 s"})
    assert runs(job)[-1]["outcome"] == "failed"
    monkeypatch.setattr("pipeline.job.running.driver.InProcessDataflow", InProcessDataflow)
    run(job)
    job.check(TEXTS)


def test_a_slow_load_is_not_a_stall(job):
    job.rows(TEXTS[:5]).fake(load_s=2.0)
    run(job, run={**job.settings["run"], "stall_timeout": "0.2 s"})
    job.check(TEXTS[:5])


def test_clocks_that_jump_change_nothing(job, monkeypatch):
    """Wall time jumps back by a day at each reading."""
    looks = 0

    class Jumping(datetime):
        @classmethod
        def now(cls, tz=None):
            nonlocal looks
            looks += 1
            return datetime(2026, 3, 1, tzinfo=UTC) - timedelta(days=looks)

    monkeypatch.setattr("pipeline.job.telemetry.run_log.datetime", Jumping)
    job.rows(TEXTS)
    run(job)
    job.parts()[0].unlink()
    (job.output / "_SUCCESS").unlink()
    run(job)
    job.check(TEXTS)
    assert looks >= 2
    assert [record["run_id"][:4] for record in runs(job)] == ["0001", "0002"], "runs are in the order of their numbers"
    assert [record["outcome"] for record in runs(job)] == ["finished", "finished"]
