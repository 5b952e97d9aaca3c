"""`input.when` and `output.accept`: rows that do not meet them stay in the output, and counts add up."""

import json

import pyarrow.parquet as pq
import pytest

from pipeline.config import JobFileError
from pipeline.config.identity import identity_of
from pipeline.data.output.compact import compact
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import PartStore
from pipeline.errors import ConfigError, FingerprintError, OutputError
from pipeline.job.output.audit import audit
from pipeline.job.output.convert import convert
from pipeline.job.output.success import read_success
from pipeline.report.render import text
from tests.job.conftest import TEXTS, run, runs, stop_in_a_unit, success
from tests.job.input.test_repaired import Damaged, rows_of_group

pytestmark = pytest.mark.usefixtures("without_ray")

WHEN = "id not in (3, 4) and (id < 30 or text is null)"


def is_met(i: int, value: str | None) -> bool:
    return i not in (3, 4) and (i < 30 or value is None)


@pytest.fixture
def texts(job):
    """Texts of 50 rows. Two have none: one meets the condition and becomes an error row, the other is dropped."""
    texts = [None if i in (4, 40) else value for i, value in enumerate(TEXTS)]
    job.rows(texts).settings["input"]["when"] = WHEN
    return texts


def store(job) -> PartStore:
    return PartStore(str(job.output))


def by_id(job):
    return {row["id"]: row for row in job.table().to_pylist()}


def check_when(job, texts):
    rows = by_id(job)
    assert sorted(rows) == list(range(len(texts)))
    for i, value in enumerate(texts):
        row = rows[i]
        if is_met(i, value):
            assert row["dropped_by"] is None
            assert (row["generated_text"] is None) == (row["error"] is not None) == (value is None)
        else:
            nothing = ("generated_text", "finish_reason", "error", "error_message")
            assert [row[name] for name in (*nothing, "dropped_by")] == [None] * 4 + ["input.when"]
            assert [row[f"num_{name}_tokens"] for name in ("input", "cached", "generated")] == [0, 0, 0]


def test_rows_that_do_not_meet_the_condition_are_not_computed(job, texts):
    report, _ = run(job, cost={"hourly_usd": 3.6})
    check_when(job, texts)
    dropped = sum(not is_met(i, value) for i, value in enumerate(texts))
    counts = success(job)
    assert (counts["completed_rows"], counts["error_rows"]) == (49 - dropped, 1)
    assert counts["dropped_rows"] == {"input.when": dropped}
    assert (report.rows.written, report.rows.completed, report.rows.uncomputed) == (50, 49 - dropped, dropped)
    assert f"50 of 50: {49 - dropped} completed, 1 error row, {dropped} not computed (input.when)" in text(report)
    assert report.cost.total_usd is not None
    assert report.cost.per_row_usd == report.cost.total_usd / (50 - dropped)
    assert runs(job)[-1]["dropped_rows"] == {"input.when": dropped}
    computed = [value for i, value in enumerate(texts) if is_met(i, value) and value is not None]
    assert runs(job)[-1]["actors"][0]["stats"]["prompt_tokens"] == sum(len(f"Say {t}".encode()) for t in computed)
    assert audit(store(job), deep=True, log=lambda text: None).sound
    assert read_success(store(job)) == store(job).totals()
    (job.output / "_SUCCESS").write_text(json.dumps({**counts, "dropped_rows": counts["dropped_rows"] | {"x": 1}}))
    found = audit(store(job), deep=False, log=lambda text: None)
    assert found.problems == (f"dropped_rows: the parts contain {counts['dropped_rows']}, _SUCCESS counts "
                              f"{counts['dropped_rows'] | {'x': 1}}",)  # fmt: skip


def test_the_answers_are_those_of_a_job_without_conditions(job, texts):
    run(job)
    with_condition = by_id(job)
    run(job, input={"when": None}, output={"path": str(job.folder / "all")})
    job.output = job.folder / "all"
    assert "dropped_by" not in job.table().column_names
    for i, row in by_id(job).items():
        if is_met(i, texts[i]):
            assert {**row, "dropped_by": None} == with_condition[i]


def test_the_identity_contains_the_condition_only_if_there_is_one(job, texts):
    run(job)
    with pytest.raises(FingerprintError, match=r"input\.when"):
        run(job, input={"when": "id < 3"})
    with pytest.raises(FingerprintError, match=r"output\.accept"):
        run(job, output={"accept": "id < 3"})
    identity = json.loads((job.output / "_pipeline/job.json").read_text())
    assert identity["identity"]["input"]["when"] == WHEN
    del job.settings["input"]["when"]
    assert "when" not in identity_of(job.config(), only_set=True).get("input", {})


def test_a_stopped_run_resumes(job):
    job.rows(TEXTS[:16]).fake(step_s=0.05).settings["input"]["when"] = WHEN
    kept = stop_in_a_unit(job)
    report, _ = run(job, output={"rows_per_file": 16})
    assert (report.rows.completed, report.rows.uncomputed, report.work.resumed_rows) == (14, 2, len(kept))
    check_when(job, TEXTS[:16])


def test_samples_and_limits(job, texts):
    report, _ = run(job, sample=10)
    assert sum(bucket.completed.rows for bucket in report.lengths) == 0  # a sample delivers nothing yet
    (sampled,) = (job.output / "_pipeline/samples").iterdir()
    rows = [row for file in sampled.iterdir() for row in pq.read_table(file).to_pylist()]
    assert len(rows) == 7  # two windows have enough computed rows for their share of ten, the third has one
    assert all(row["dropped_by"] is None for row in rows)
    run(job, input={"limit": 20}, output={"path": str(job.folder / "some")})
    job.output = job.folder / "some"
    assert success(job)["dropped_rows"] == {"input.when": 2}
    assert success(job)["completed_rows"] == 18


def test_a_job_in_which_no_row_meets_the_condition(job):
    job.rows(TEXTS)
    report, _ = run(job, input={"when": "id > 50"})
    assert (report.rows.completed, report.rows.uncomputed) == (0, 50)
    assert report.cost.per_row_usd is None
    assert {row["dropped_by"] for row in by_id(job).values()} == {"input.when"}
    assert run(job, input={"when": "id > 50"})[0].was_complete


@pytest.mark.parametrize("samples_as", ["lists", "rows"])
def test_accepted_rows(job, samples_as):
    """Rejected rows keep their results. Error rows have no dropped_by of output.accept, dropped ones their own."""
    texts = [None if i == 7 else value for i, value in enumerate(TEXTS)]
    accept = "num_generated_tokens >= 5 and (answer is not null or id = 0)"
    output = {"rename": {"generated_text": "answer"}, "accept": accept, "samples_as": samples_as}
    sampling = {"n": 2, "temperature": 1.0}
    report, _ = run(job.rows(texts), output=output, sampling=sampling, input={"when": "id != 9"})
    found = job.table().to_pylist()
    for row in found:
        expected = "output.accept" if row["error"] is None and row["num_generated_tokens"] < 5 else None
        assert row["dropped_by"] == ("input.when" if row["id"] == 9 else expected)
        assert (row["answer"] is None) == (row["id"] in (7, 9))
    rejected = sum(row["dropped_by"] == "output.accept" for row in found)
    completed = len(found) - 2
    assert 0 < rejected < completed
    assert success(job)["dropped_rows"] == {"input.when": 1, "output.accept": rejected}
    assert report.rows.completed == 48
    assert f"{completed - rejected} of {completed} completed rows; {rejected} were dropped" in text(report)
    assert audit(store(job), deep=True, log=lambda text: None).sound
    compact(store(job), PartStore(str(job.folder / "merged")), "input", 3000, lambda text: None)
    merged = json.loads((job.folder / "merged/_SUCCESS").read_text())
    assert merged["dropped_rows"] == success(job)["dropped_rows"]


def test_a_task_with_both_conditions(job):
    job.settings.pop("sampling")
    job.rows(TEXTS)
    conditions = {"input": {"when": "id > 4"}, "output": {"accept": "label = 'yes'"}}
    run(job, task={"type": "choice", "labels": ["yes", "no"]}, **conditions)
    rows = by_id(job)
    assert {row["label"] for i, row in rows.items() if i <= 4} == {None}
    expected = {i: None if row["label"] == "yes" else "output.accept" for i, row in rows.items() if i > 4}
    assert {i: row["dropped_by"] for i, row in rows.items() if i > 4} == expected
    assert len({*expected.values()}) == 2


def test_footers_without_dropped_rows_stay_as_they_were(job):
    run(job.rows(TEXTS))
    totals = store(job).totals()
    assert "dropped" not in totals.to_json()
    assert PartTotals.from_json(totals.to_json()) == totals


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"input": {"when": "txet is null"}}, "input.when: character 1: no column 'txet' (did you mean 'text'?)"),
        ({"input": {"when": "id = 'x'"}}, "input.when: character 4: `id` is a number (int64), but 'x' is a text"),
        ({"input": {"when": "generated_text is null"}}, "no column 'generated_text'"),
        ({"output": {"accept": "text is null"}}, "output.accept: character 1: no column 'text'"),
        ({"output": {"accept": "dropped_by is null"}}, "output.accept: character 1: no column 'dropped_by'"),
        ({"output": {"accept": "finish_reason = 3"}}, "`finish_reason` is a text (string), but 3 is a number"),
    ],
)
def test_mistakes_are_found_before_any_row_is_computed(job, section, problem):
    job.rows(TEXTS)
    with pytest.raises(ConfigError) as raised:
        run(job, **section)
    assert problem in str(raised.value)
    assert not job.output.exists()


def test_a_mistake_of_the_language_is_found_with_the_line_of_the_file(job):
    with pytest.raises(JobFileError) as raised:
        job.rows(TEXTS).config(input={"when": "id >> 3"})
    assert "input.when: character 5: found `>`" in str(raised.value)
    assert "job.yaml:" in str(raised.value)


def test_an_output_with_conditions_is_not_converted_to_a_batch_api(job, texts):
    run(job)
    with pytest.raises(OutputError, match=r"input\.when or output\.accept"):
        convert(store(job), str(job.folder / "answers.jsonl"), None, {})


def test_damaged_rows_are_error_rows_until_their_values_are_known(job):
    job.settings["input"]["when"] = "id not in (11, 13)"
    damaged = Damaged(job, 1)
    run(job)
    assert damaged.corrupt() == rows_of_group(1)
    assert success(job)["dropped_rows"] == {}
    damaged.repair()
    run(job, retry_failed=True)
    assert success(job)["errors"] == {}
    assert success(job)["dropped_rows"] == {"input.when": 2}
    assert {i for i, row in by_id(job).items() if row["dropped_by"]} == {11, 13}
