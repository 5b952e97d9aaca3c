"""The job benchmark at a small size: a real job and the engine alone, on the same rows."""

import json

import pytest

from benchmarks import job as bench
from benchmarks.job import Times, bench_job
from pipeline.errors import PipelineError


def fake(answers, seconds):
    return bench._Run(Times(4.0, 1.0, seconds, 0.1, 1.0, 9.0, 30 / seconds), 9, 0, 30, "float32", answers)


@pytest.fixture
def runs(monkeypatch):
    """Replace both runs by instant ones, and return their answers for a test to change."""
    answers = {"job": {("a", 0): "x", ("a", 1): "y"}, "engine": {("a", 1): "y", ("a", 0): "x"}}
    monkeypatch.setattr(bench, "_run_job", lambda job_file, output: fake(answers["job"], 3.0))
    monkeypatch.setattr(bench, "_run_engine", lambda job_file: fake(answers["engine"], 2.5))
    return answers


def test_a_job_and_the_engine_alone_on_the_same_rows():
    found = bench_job("demo:target-awq", 5, 1, "float32")
    (job,), (engine,) = found.job, found.engine
    assert (found.rows, found.equal_rows, found.dtype) == (5, 5, "float32")
    assert found.generated_tokens > 5 * 20
    for times in (job, engine):
        assert min(times.startup_s, times.load_s, times.work_s) > 0
        assert 0 <= times.idle_s < times.work_s
        assert times.startup_s + times.load_s + times.work_s + times.end_s <= times.whole_s + 0.01
    assert found.ratio.median == job.work_s / engine.work_s
    assert json.loads(json.dumps(found.to_json()))["job_by_engine"]["count"] == 1


def test_the_table_compares_work_times(runs):
    lines = bench_job("demo:target", 2, 2, server="http://localhost:8000/v1").to_lines()
    assert "Job's work time / engine's: 1.200 (1.200 to 1.200)." in lines
    assert "Server's work time / job's: 1.00 (1.00 to 1.00)." in lines
    assert "Equal completions in all runs of job and engine: 2 of 2 rows." in lines


def test_different_completions_are_not_compared(runs):
    runs["engine"] = {("a", 0): "x", ("a", 1): "z"}
    with pytest.raises(PipelineError, match="1 of 2 float32 completions of the job and of the engine alone differ"):
        bench_job("demo:target", 2, 1)
