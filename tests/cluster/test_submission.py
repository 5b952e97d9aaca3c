"""Submitting and following with a job server that refuses, races and loses connections."""

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from pipeline.cluster import submission
from pipeline.cluster.shipped_job import ShippedJob
from pipeline.cluster.submission import JobServer, exit_code
from pipeline.errors import ConfigError, EnvironmentFailed

JOB = ShippedJob(name="night-1f", output="s3://b/o", files={"job.json": "{}"}, made_absolute={}, drain_s=1)


class Head:
    """Fake of Ray's client on a head. `script`: functions that the next submissions call before one is accepted."""

    def __init__(self):
        self.jobs: dict[str, JobDetails] = {}
        self.script: list = []
        self.logs: list = []

    def get_address(self):
        return "http://head"

    def list_jobs(self):
        return list(self.jobs.values())

    def get_job_info(self, submission_id):
        return self.jobs[submission_id]

    def submit_job(self, *, submission_id, metadata, **_):
        if self.script:
            self.script.pop(0)(submission_id)
        self.jobs[submission_id] = details(submission_id, metadata=metadata)

    async def tail_job_logs(self, submission_id):
        for piece in self.logs.pop(0):
            if piece is None:
                raise RuntimeError("WebSocket connection closed unexpectedly")
            yield piece


def details(submission_id, status=JobStatus.RUNNING, **more):
    return JobDetails(type=JobType.SUBMISSION, status=status, entrypoint="x", submission_id=submission_id, **more)


@pytest.fixture
def head(monkeypatch):
    head = Head()
    monkeypatch.setattr(submission, "JobSubmissionClient", lambda: head)
    monkeypatch.setattr(submission, "POLL_S", 0.0)
    return head


def refuse(_):
    raise RuntimeError("Request failed with status code 500")


def test_a_second_call_joins_and_the_next_try_has_the_next_number(head):
    server, logged = JobServer(None), []
    first, is_new = server.submit(JOB, [], logged.append)
    assert (first.submission_id, is_new) == ("night-1f-1", True)
    assert server.submit(JOB, [], logged.append) == (first, False)
    other = ShippedJob(**{**vars(JOB), "files": {"job.json": "{1}"}})
    with pytest.raises(ConfigError, match="pipeline cancel night-1f-1"):
        server.submit(other, [], logged.append)
    head.jobs["night-1f-1"] = details("night-1f-1", JobStatus.FAILED, metadata=first.metadata)
    head.jobs["raysubmit_x"] = details("raysubmit_x")  # not ours
    assert server.submit(other, [], logged.append)[0].submission_id == "night-1f-2"
    assert logged == []


def test_a_caller_that_lost_the_race_joins(head):
    def win_race(submission_id):
        head.jobs[submission_id] = details(submission_id, metadata={"pipeline_job": JOB.digest})
        refuse(submission_id)

    head.script = [win_race]
    found, is_new = JobServer(None).submit(JOB, [], lambda _: None)
    assert (found.submission_id, is_new) == ("night-1f-1", False)


def test_submitting_to_a_starting_head_is_retried(head, monkeypatch):
    logged, head.script = [], [refuse, refuse]
    assert JobServer(None).submit(JOB, [], logged.append)[1]
    assert len(logged) == 1
    monkeypatch.setattr(submission, "HEAD_START_S", 0.0)
    head.jobs, head.script = {}, [refuse] * 3
    with pytest.raises(EnvironmentFailed, match="status code 500"):
        JobServer(None).submit(JOB, [], logged.append)


def test_a_broken_connection_neither_loses_nor_repeats_a_line(head):
    head.jobs["a-1"] = details("a-1", JobStatus.SUCCEEDED)
    head.logs = [["one\ntw", None], ["one\n", "two\nth", None], ["one\ntwo\nthree\n"]]
    written = []
    assert JobServer(None).follow("a-1", written.append, lambda _: None).submission_id == "a-1"
    assert "".join(written) == "one\ntwo\nthree\n"


def test_exit_codes():
    for status, code, expected in [
        (JobStatus.RUNNING, None, None), (JobStatus.SUCCEEDED, 0, 0), (JobStatus.FAILED, 1, 1),
        (JobStatus.FAILED, 75, 75), (JobStatus.STOPPED, -15, 75), (JobStatus.FAILED, -9, 3),
        (JobStatus.FAILED, None, 3),
    ]:  # fmt: skip
        assert exit_code(details("a-1", status, driver_exit_code=code)) == expected
