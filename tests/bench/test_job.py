"""The job benchmark at a small size: a real job and the engine alone, and a peer's figures."""

import json
import sys

import pytest

from pipeline.bench import job as bench
from pipeline.bench.job import Times, bench_job
from pipeline.errors import ConfigError, PipelineError

PEER = """
import json, sys
request = json.load(open(sys.argv[1]))
assert request["dtype"] == "float32" and request["max_model_len"] >= 800, request
print("a word of some library")
print(json.dumps({"startup_s": 0.5, "work_s": 2.0, "rows": ROWS, "prompt_tokens": 9, "generated_tokens": 30,
                  "dtype": "float32"}))
"""


def fake(answers, seconds):
    return bench._Run(Times(4.0, 1.0, seconds, 0.1, 1.0, 9.0, 30 / seconds), 9, 0, 30, "float32", answers)


@pytest.fixture
def runs(monkeypatch):
    """Replace both runs by instant ones, and return their answers for a test to change."""
    answers = {"job": {("a", 0): "x", ("a", 1): "y"}, "engine": {("a", 1): "y", ("a", 0): "x"}}
    monkeypatch.setattr(bench, "_run_job", lambda job_file, output: fake(answers["job"], 3.0))
    monkeypatch.setattr(bench, "_run_engine", lambda job_file: fake(answers["engine"], 2.5))
    return answers


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """Return a function that makes a driver which completes `rows` rows."""

    def make(rows):
        driver = tmp_path / "ray_llm_driver.py"
        driver.write_text(PEER.replace("ROWS", str(rows)))
        monkeypatch.setitem(bench.PEERS, "ray-llm", driver)
        return {"ray-llm": sys.executable}

    return make


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


def test_a_peer_is_compared_by_its_work_on_the_same_input(runs, peer):
    found = bench_job("demo:target", 2, 2, peers=peer(2))
    text = found.to_text()
    assert "Job's work time / engine's: 1.200 (1.200 to 1.200)." in text
    assert "ray-llm's work time / job's: 0.67 (0.67 to 0.67)." in text
    assert "not reported" in text
    assert "Equal completions in all runs of job and engine: 2 of 2 rows." in text


def test_a_peer_that_did_other_work_is_refused(runs, peer):
    with pytest.raises(PipelineError, match="completed 1 rows with 30 tokens, the job 2 with 30"):
        bench_job("demo:target", 2, 1, peers=peer(1))
    with pytest.raises(ConfigError, match="--peer vllm: expected server, ray-llm"):
        bench_job("demo:target", 2, 1, peers={"vllm": sys.executable})


def test_different_completions_are_not_compared(runs):
    runs["engine"] = {("a", 0): "x", ("a", 1): "z"}
    with pytest.raises(PipelineError, match="1 of 2 float32 completions of the job and of the engine alone differ"):
        bench_job("demo:target", 2, 1)
