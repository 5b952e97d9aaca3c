"""`--sample N`: rows of all lengths, shown and kept; the full run reuses them, and a changed job starts over."""

import json
import signal

import pytest

from pipeline.data.output.parts import PartStore
from pipeline.data.source import InputWindow
from pipeline.errors import ConfigError, FingerprintError, Interrupted
from pipeline.job.dataflow.spec import WindowTask
from pipeline.job.running.sample import MAX_WINDOWS, read_sample, sample_tasks
from tests.job.conftest import FAKES, TEXTS, run, runs, success

pytestmark = pytest.mark.usefixtures("without_ray")


def sampled(job) -> list:
    """Return the rows of the last run's sample."""
    return list(read_sample(PartStore(str(job.output)), runs(job)[-1]["run_id"]))


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_rows_of_all_lengths_are_shown_and_nothing_is_written(job, rows):
    report, statuses = run(job.rows(TEXTS), sample=rows)
    found = sampled(job)
    assert len({(row.source_file, row.source_row) for row in found}) == len(found) == rows
    assert report.outcome == statuses[-1].outcome == runs(job)[0]["outcome"] == "sampled"
    assert (statuses[-1].rows_done, statuses[-1].rows_total) == (rows, rows)
    assert not job.parts()
    assert not (job.output / "_SUCCESS").exists()
    assert not report.work.wasted_generated_tokens
    if rows > 6:
        lengths = [len(row.prompt) for row in found]
        assert min(lengths) < 15 < 20 < max(lengths)


def test_the_full_run_reuses_the_rows_and_gives_the_same_output(job):
    job.rows(TEXTS)
    run(job, sample=5)
    run(job, sample=12)  # includes those of the smaller one
    before = {(row.source_file, row.source_row): row.text for row in sampled(job)}
    report, _ = run(job)
    job.check(TEXTS)
    assert success(job)["completed_rows"] == 50
    assert 12 <= report.work.resumed_rows <= 17
    assert report.work.computed_generated_tokens == report.tokens.generated, "no row was computed twice"
    after = {(row["source_file"], row["source_row"]): row["generated_text"] for row in job.table().to_pylist()}
    assert before == {row: after[row] for row in before}


def test_error_rows_are_shown_and_computed_again_by_the_full_run(job):
    texts = [None if i % 2 else text for i, text in enumerate(TEXTS)]
    run(job.rows(texts), sample=50)
    assert sorted(row.error or "" for row in sampled(job)) == [""] * 25 + ["null_prompt"] * 25
    run(job)
    job.check(texts)


def test_a_prompt_is_tried_and_changed_in_one_folder(job):
    """The output belongs to the job of the last sample, until another run computes rows in it."""
    job.rows(TEXTS)
    run(job, sample=4, prompt={"template": "Read {text}"})
    run(job, sample=4, engine={"dtype": "bfloat16"})
    run(job, sample=4)
    assert runs(job)[-1]["actors"][0]["resumed_rows"] == 0, "other numerics start over too"
    assert [row.prompt[:4] for row in sampled(job)] == ["Say "] * 4
    assert len(runs(job)) == 1, "the cost of another prompt is not this job's"
    run(job)
    job.check(TEXTS)
    with pytest.raises(FingerprintError):
        run(job, sample=4, prompt={"template": "Read {text}"})
    job.check(TEXTS)


def test_what_an_ordinary_run_left_is_never_given_to_another_job(job):
    job.rows(TEXTS).fake(step_s=0.2)
    with pytest.raises(Interrupted):
        run(job, [(lambda status: status.rows_done > 0, signal.SIGTERM)], run={"drain_timeout": "0.1 s"})
    for part in job.parts():
        part.unlink()
    with pytest.raises(FingerprintError):
        run(job, sample=4, prompt={"template": "Read {text}"})


def test_a_finished_job_has_nothing_to_sample_and_its_error_rows_are_not_tried_with_a_sample(job):
    run(job.rows(TEXTS))
    report, _ = run(job, sample=3)
    assert report.outcome == "finished"
    with pytest.raises(ConfigError, match="--sample"):
        run(job, sample=3, retry_failed=True)
    job.check(TEXTS)


@pytest.mark.parametrize(("windows", "rows"), [(1, 5), (3, 2), (3, 7), (50, 2), (50, 9)])
def test_few_windows_evenly_spread_with_all_the_rows(windows, rows):
    tasks = tuple(WindowTask(InputWindow(i, 10 * i, 10 * i + 10), {}, None) for i in range(windows))
    chosen = sample_tasks(tasks, rows)
    assert sum(task.sample or 0 for task in chosen) == rows
    assert len({task.window.index for task in chosen}) == len(chosen) == min(windows, rows, MAX_WINDOWS)
    assert max(task.window.index for task in chosen) >= windows // 2 or len(chosen) == 1


def test_the_command_shows_rows_with_their_prompts(job, pipe, monkeypatch):
    monkeypatch.setattr("pipeline.job.running.run.backend_of", lambda config: FAKES)
    job.rows(TEXTS)
    job.config()
    path = str(job.folder / "job.yaml")
    code, out, _ = pipe("run", path, "--sample", "20")
    assert code == 0
    assert out.count("  | Say text ") == 8
    assert "20 rows of 50, 0 error rows" in out
    code, out, _ = pipe("run", path, "--sample", "3", "--json")
    result = json.loads(out)
    assert code == 0
    assert len(result["sample"]) == 3
    assert result["sample"][0]["prompt"].startswith("Say text")
    code, out, _ = pipe("status", path)
    assert "sampled" in out
