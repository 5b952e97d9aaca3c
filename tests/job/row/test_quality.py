"""`quality.sample` in a job: the same rows in each run, figures in all reports of a run, refusals."""

import json

import pytest

from pipeline.engine.completion import Completion, RowQuality
from pipeline.engine.request import QualitySample, Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import ConfigError, InputError, ModelError
from pipeline.job.actor.backends import OwnEngine
from pipeline.job.actor.tokenize import is_sampled
from pipeline.job.planning.actor_specs import flow_spec
from pipeline.job.planning.plan import make_plan
from pipeline.job.preview.describe import describe
from pipeline.job.preview.validation import validate_job
from pipeline.job.process.child import Ended
from pipeline.job.process.open_rows import OpenRows
from pipeline.job.running.run import run_job
from pipeline.report.render import html, markdown, text
from pipeline.report.run_report import RunReport
from tests.job.conftest import TEXTS, runs
from tests.job.conftest import run as run_fakes
from tests.model_folders import FAMILIES, make_family

pytestmark = pytest.mark.usefixtures("without_ray", "engines_in_threads")
PROMPTS = [f"site Tor #{i}; unit pump; fault noise {i}; cause a loose wire; Summary:" for i in range(24)]
SHARE = 0.5


def watched(job, output="out", quality=None, **more):
    job.output = job.folder / output
    return job.config(
        model={"path": "demo:target-awq", **more.pop("model", {})},
        engine={"dtype": "float32", **more.pop("engine", {})},
        sampling={"max_tokens": 12, "ignore_eos": True, **more.pop("sampling", {})},
        output={"path": str(job.output)},
        run={**job.settings["run"], **more.pop("run", {})},
        quality={"sample": SHARE, **({"model": "demo:target"} if quality is None else quality)},
        **more,
    )


def chosen(job) -> list[int]:
    return [i for i in range(len(PROMPTS)) if is_sampled(SHARE, 0, "f0.parquet", i)]


def test_rows_are_chosen_by_their_position_and_a_larger_share_keeps_those_of_a_smaller_one():
    def sampled(share: float, seed: int = 0, file: str = "a.parquet") -> set[int]:
        return {row for row in range(4000) if is_sampled(share, seed, file, row)}

    assert sampled(0.0) == set()
    assert len(sampled(1.0)) == 4000
    tenth = sampled(0.1)
    assert 320 < len(tenth) < 480
    assert sampled(0.02) < tenth == sampled(0.1)
    assert tenth != sampled(0.1, seed=1)
    assert tenth != sampled(0.1, file="b.parquet")


def test_a_stopped_job_compares_the_same_rows_and_record_report_status_and_notification_show_it(job):
    job.rows(PROMPTS)
    notified = job.folder / "notified.jsonl"
    # a reference of one layer, so that answers differ
    settings = watched(job, quality={"model": "demo:draft", "max_drop": 0.001}, run={"notify": str(notified)})
    run_job(settings, sample=9)
    report = run_job(settings)
    rows = {row["id"]: row for row in job.table().to_pylist()}
    found = report.quality
    assert found is not None
    assert found.sums.rows == len(chosen(job)) > 5
    assert found.sums.tokens == sum(rows[i]["num_generated_tokens"] for i in chosen(job))
    assert 0.1 < (found.token_agreement or 0) < 0.999
    assert (found.kl_nats_per_token or 0) > 0.001
    assert found.machine_us > 0
    assert set(found.drops) == {"agreement"}

    kept = runs(job)
    assert [r["row_stats"]["quality"]["rows"] for r in kept] == [0, found.sums.rows], "delivered by the second run"
    assert all(sum(actor["stats"]["quality_us"] for actor in r["actors"]) > 0 for r in kept)
    assert RunReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    status = json.loads((job.output / "_pipeline" / "status.json").read_text())
    assert status["quality_rows"] == found.sums.rows
    assert status["token_agreement"] == found.token_agreement
    assert status["quality_drops"] == ["agreement"]
    (event,) = [json.loads(line) for line in notified.read_text().splitlines()]
    assert (event["event"], event["measure"]) == ("quality_drop", "agreement")
    log = (job.output / "_pipeline" / "logs" / report.runs[-1].run_id / "driver.log").read_text()
    assert log.count("warning quality: after") == 1
    for shown in (text(report), markdown(report), html(report)):
        assert "ALARM: token agreement dropped by" in " ".join(shown.split())

    job.output = job.folder / "unwatched"
    run_job(watched(job, "unwatched", quality={"sample": 0}))
    assert {row["id"]: row["generated_text"] for row in job.table().to_pylist()} == {
        i: row["generated_text"] for i, row in rows.items()
    }


def test_right_answers_are_counted_for_both_models_and_their_column_is_not_in_the_output(job):
    job.rows(PROMPTS[:8])
    report = run_job(watched(job, quality={"sample": 1, "model": "demo:target", "column": "text"}))
    assert report.quality is not None
    assert report.quality.sums.expected_rows == 8
    assert (report.quality.served_correct_share, report.quality.reference_correct_share) == (0.0, 0.0)
    assert job.table().column_names[0] == "id"
    assert "text" not in job.table().column_names


def test_a_row_whose_process_ended_is_not_compared_again():
    rows = OpenRows(lambda text: None, "")
    ticket = rows.add([Request(i, [1], SamplingParams(), QualitySample("x")) for i in range(2)])
    assert [r.quality for r in rows.admit()] == [QualitySample("x")] * 2
    rows.finish((Completion(0, [1], "", "length", 1, quality=RowQuality(1, 1)),))
    rows.process_ended(Ended("killed", ""))
    assert [(r.row_id, r.quality) for r in rows.admit()] == [(1, None)]
    rows.finish((Completion(1, [1], "", "length", 1),))
    assert [c.quality for c in ticket.completions] == [RowQuality(1, 1), None]


def test_the_engines_get_a_reference_that_approximates_nothing(job):
    job.rows(PROMPTS)
    config = watched(job, model={"path": "demo:target", "quantization": "int8"}, quality={})
    spec = flow_spec(make_plan(config, "cpu"), (), OwnEngine(), "0001").work
    assert spec.reference is not None
    assert (spec.reference.engine.model, spec.reference.engine.quantization) == (spec.engine.model, "none")
    assert (spec.reference.generates, spec.job.config.quality.sample) == (False, SHARE)
    columns = ({"temperature": {"column": "id"}}, {"structured_outputs": {"regex": {"column": "text"}}})
    for sampling in ({"temperature": 0.5}, {"structured_outputs": {"regex": "[a-f]+"}}, *columns):
        work = flow_spec(make_plan(watched(job, sampling=sampling), "cpu"), (), OwnEngine(), "0001").work
        assert work.reference is not None
        assert work.reference.generates
    off = flow_spec(make_plan(watched(job, quality={"sample": 0}), "cpu"), (), OwnEngine(), "0001").work
    assert (off.reference, off.job.config.quality.sample) == (None, 0)


def test_it_is_no_part_of_the_jobs_identity(job):
    run_fakes(job.rows(TEXTS))
    _, statuses = run_fakes(job, quality={"model": "demo:target", "max_drop": 0.5})
    assert statuses[-1].phase == "already complete"


def refused(job, key: str, **sections) -> str:
    """Return the problem that `validate` lists for `key` and that `run` raises before anything is written."""
    config = watched(job, **sections)
    (mistake,) = validate_job(config).mistakes
    assert mistake.key == key
    assert mistake.location.startswith(str(job.folder / "job.yaml"))
    with pytest.raises((ConfigError, InputError, ModelError)) as raised:
        run_job(config)
    assert not (job.output / "_pipeline").exists()
    return f"{mistake.problem}\n{raised.value}"


def test_a_pointless_comparison_is_refused_before_a_model_is_loaded(job):
    job.rows(PROMPTS)
    problems = refused(job, "quality.model", quality={})
    assert problems.count("is quantized (AWQ int4, groups of 128)") == 2
    assert problems.count("name the 16-bit model in quality.model") == 2
    problems = refused(job, "quality.model", quality={}, model={"path": "demo:target"})
    assert problems.count("there is nothing to compare it with") == 2


def test_a_reference_with_other_tokens_is_refused(job, tmp_path):
    other = make_family(tmp_path / "other", FAMILIES[0], seed=1)
    problems = refused(job.rows(PROMPTS), "quality.model", quality={"model": str(other)})
    assert problems.count("its tokens are not those of model.path (") == 2


def test_mistakes_in_the_job_file_are_reported_with_their_key(job):
    for key, value in (("sample", 1.5), ("max_drop", 2), ("model", "demo:nothing")):
        with pytest.raises(ConfigError, match=rf"quality\.{key}"):
            job.config(quality={key: value})


def test_validate_shows_what_is_compared_with_what(job):
    config = watched(job.rows(PROMPTS), quality={"model": "demo:target", "column": "text"})
    found = validate_job(config)
    assert not found.mistakes
    assert "50% of the rows against demo:target (embedded); right answers from text" in describe(found)
    own = watched(job, model={"path": "demo:target", "quantization": "int8"}, quality={})
    assert "against the model's stored weights" in describe(validate_job(own))
