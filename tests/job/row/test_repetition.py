"""Rows that repeat themselves in a job: their column, the report, and a run that reuses rows of an earlier one."""

import json
from collections import Counter

import pytest

from pipeline.errors import ConfigError
from pipeline.job.planning.plan import make_plan
from pipeline.job.running.run import run_job
from pipeline.report.render import html, markdown, text
from pipeline.report.run_report import RunReport
from tests.job.conftest import runs

LOOP = {"max_pattern_size": 24, "min_count": 3}
PROMPTS = [f"The pump number {i} was repaired by the" for i in range(8)]

pytestmark = pytest.mark.usefixtures("without_ray", "engines_in_threads")


def configured(job, output="out", **sampling):
    """Return a job of the demonstration model, which repeats itself if nothing stops it."""
    return job.config(
        model={"path": "demo:target"},
        engine={"dtype": "float32"},
        sampling={"max_tokens": 70, "ignore_eos": True, **sampling},
        output={"path": str(job.folder / output)},
        cost={"hourly_usd": 2.0},
    )


def test_looping_rows_end_early_and_the_report_counts_those_of_all_runs(job):
    job.rows(PROMPTS)
    free = run_job(configured(job))
    whole = {row["id"]: row for row in job.table().to_pylist()}
    assert free.loops is None
    assert "stopped for repetition" not in text(free)

    job.output = job.folder / "guarded"
    settings = configured(job, "guarded", repetition_detection=LOOP)
    run_job(settings, sample=5)  # kept, and reused by the next run
    report = run_job(settings)
    rows = job.table().to_pylist()
    reasons = Counter(row["finish_reason"] for row in rows)
    assert reasons["length_loop"] >= 2, "the demonstration model repeats itself"
    for row in rows:
        assert whole[row["id"]]["generated_text"].startswith(row["generated_text"])
        assert (row["num_generated_tokens"] < 70) == (row["finish_reason"] == "length_loop")
    tokens = sum(row["num_generated_tokens"] for row in rows if row["finish_reason"] == "length_loop")
    loops = report.loops
    assert loops is not None
    assert (loops.rows, loops.tokens) == (reasons["length_loop"], tokens)
    share = tokens / report.tokens.generated
    assert loops.usd == pytest.approx((report.cost.generated_usd or 0) * share)
    assert 0 < loops.machine_us <= report.machine_us * share
    assert runs(job)[-1]["row_stats"]["looped"] == {"rows": loops.rows, "generated_tokens": tokens}
    for page in (text(report), markdown(report), html(report)):
        assert f"{loops.rows} rows were stopped for repetition" in " ".join(page.split())
    assert RunReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_it_is_part_of_the_jobs_identity_if_it_is_on(job):
    job.rows(PROMPTS)

    def identity(**sampling):
        return make_plan(job.config(sampling=sampling), "cpu").fingerprint.identity["sampling"]

    assert identity() == identity(repetition_detection=None)
    assert identity()["repetition_detection"] is None
    assert identity(repetition_detection=LOOP)["repetition_detection"] == {**LOOP, "min_pattern_size": 1}


def test_a_mistake_in_the_job_file_is_reported_with_its_key(job):
    for given, message in [
        (LOOP | {"min_pattern_size": 25}, "min_pattern_size 25 is more than"),
        ({"max_pattern_size": 4}, "min_count"),
        (LOOP | {"max_pattern_size": 4000}, "max_pattern_size"),
        ({"column": "loops"}, "column"),
    ]:
        with pytest.raises(ConfigError, match=rf"sampling\.repetition_detection(.|\n)*{message}"):
            job.config(sampling={"repetition_detection": given})
