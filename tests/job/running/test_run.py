"""A job's life around its dataflow: resume, refusals, error rate, signals, counts, report. Without Ray."""

import json
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
import pytest

from pipeline.data.output.parts import PartName, PartStore
from pipeline.errors import Interrupted, ModelError, TooManyRowErrors
from pipeline.job.dataflow.in_process import InProcessDataflow
from pipeline.job.running.run import run_job
from pipeline.report.account import Tokens
from pipeline.report.record.run_record import RunRecord
from pipeline.report.render import markdown, text
from tests.job.conftest import FAKES, TEXTS, Started, run, runs, stop_in_a_unit, success

pytestmark = pytest.mark.usefixtures("without_ray", "default_sighup")


def test_a_finished_job_has_each_row_once_and_its_counts(job):
    texts = [*TEXTS[:20], None, *TEXTS[20:]]
    report, statuses = run(job.rows(texts, per_file=30))
    job.check(texts, per_file=30)
    assert success(job)["input_rows"] == 51
    assert success(job)["errors"] == {"null_prompt": 1}
    assert (report.rows.input, report.rows.written, report.rows.errors) == (51, 51, 1)
    assert (report.warnings, "Warning" in text(report)) == ((), False)
    assert report.tokens.generated == report.work.computed_generated_tokens > 0
    assert statuses[-1].outcome == "finished"
    assert (statuses[-1].rows_done, statuses[-1].rows_written, statuses[-1].rows_total) == (51, 51, 51)
    status = json.loads((job.output / "_pipeline" / "status.json").read_text())
    assert (status["phase"], status["eta_s"]) == ("finished", None)
    assert (job.output / "_pipeline" / "report.md").read_text().startswith("# job")
    kept = pq.read_metadata(job.parts()[0]).metadata
    assert kept[b"pipeline.fingerprint"].decode() == success(job)["fingerprint"]
    for part in job.parts():
        rows = pq.read_table(part).to_pylist()
        assert rows == sorted(rows, key=lambda row: (row["source_file"], row["source_row"]))


def test_warnings_about_the_data_are_listed_at_the_end_and_in_the_report(job, tmp_path):
    texts = ["a<|end|>", *TEXTS[:8], "<|end|>b", None]
    job.rows(texts, per_file=6)
    (tmp_path / "in" / "README.md").write_text("# Data")
    report, _ = run(job, prompt={"template": "<|start|>{text}"})
    warnings = [(warning.kind, warning.count, warning.example) for warning in report.warnings]
    assert warnings == [("files_passed_over", 1, "README.md"), ("control_tokens_in_template", 10, "<|start|>")]
    raw = json.loads((job.output / "_pipeline" / "report.json").read_text())["warnings"]
    assert [(each["kind"], each["count"], each["example"]) for each in raw] == warnings
    for page in (text(report), markdown(report)):
        words = " ".join(page.split())
        assert "1 file of another format skipped (README.md): " in words
        assert "prompt.special_tokens: template" in words
    again, _ = run(job, prompt={"template": "<|start|>{text}"})  # of a finished job
    assert again.warnings == report.warnings


def test_tokens_refused_computed_and_cached_are_counted_separately_everywhere(job):
    texts = [*TEXTS[:20], "far too long " * 15_000]
    report, statuses = run(job.fake(max_model_len=1000, cached=4).rows(texts), cost={"hourly_usd": 1.0})
    refused, lengths = len(f"Say {texts[20]}"), [len(f"Say {text}") for text in texts[:20]]
    (record,) = runs(job)
    stats = report.runs[0].stat
    assert stats("prompt_tokens") == sum(lengths), "the engine does not count what it refuses"
    computed = stats("prompt_tokens") - stats("cached_tokens")
    assert report.tokens == Tokens(sum(lengths), stats("cached_tokens"), stats("generated_tokens"), refused)
    assert (record["input_tokens"], record["cached_tokens"]) == (sum(lengths), stats("cached_tokens"))
    assert record["error_input_tokens"] == success(job)["num_error_input_tokens"] == refused
    lengths_seen = record["row_stats"]["lengths"].values()
    assert success(job)["num_input_tokens"] == sum(bucket["input_tokens"] for bucket in lengths_seen)
    assert report.cost.per_1m_prompt_usd == pytest.approx(report.cost.prompt_usd * 1e6 / computed)
    assert [status.input_tokens for status in statuses if status.phase == "finished"] == [computed]
    (row,) = [row for row in job.table().to_pylist() if row["error"]]
    assert (row["error"], row["num_input_tokens"], row["generated_text"]) == ("prompt_too_long", refused, None)
    again, _ = run(job)
    assert again.tokens == report.tokens, "by _SUCCESS"


def test_phases_of_all_actors_sum_to_their_machine_time(job):
    report, _ = run(job.fake(step_s=0.01).rows(TEXTS), run={"actors": 2})
    (record,) = runs(job)
    assert len(record["actors"]) == 2
    for actor in record["actors"]:
        total = sum(actor["phases_us"].values())
        # an actor holds its machine from the run's start to its end, except for planning and counting
        driver_only_us = (
            record["driver_us"]["planning"] + record["driver_us"]["verify"] + record["driver_us"]["ray_stop"]
        )
        assert 0 <= record["wall_us"] - total <= driver_only_us + 500_000
    one, two = (sum(actor["phases_us"].values()) for actor in record["actors"])
    assert one == two  # both to the same end
    assert sum(report.phases_us.values()) == report.machine_us


def test_a_second_run_of_a_finished_job_computes_nothing(job):
    run(job.rows(TEXTS))
    before = {path: path.stat().st_mtime_ns for path in job.parts()}
    report, statuses = run(job)
    assert Started.count == 1
    assert statuses[-1].phase == "already complete"
    assert report.outcome == "finished"
    assert report.rows.written == 50
    assert len(runs(job)) == 1
    assert before == {path: path.stat().st_mtime_ns for path in job.parts()}


def test_only_units_without_a_part_are_computed_again(job):
    run(job.rows(TEXTS))
    parts = job.parts()
    lost = [parts[1], parts[-1]]
    for path in lost:
        path.unlink()
    (job.output / "_SUCCESS").unlink()
    report, _ = run(job)
    job.check(TEXTS)
    assert [record["units_written"] for record in runs(job)] == [len(parts), 2]
    assert report.work.computed_generated_tokens > report.tokens.generated


def test_a_run_killed_after_its_last_part_only_counts(job):
    run(job.rows(TEXTS))
    (job.output / "_SUCCESS").unlink()
    run(job)
    assert Started.count == 1
    assert success(job)["input_rows"] == 50


def test_no_rows_give_one_empty_part_with_all_columns(job):
    report, _ = run(job.rows([]))
    (part,) = job.parts()
    assert pq.read_table(part).num_rows == 0
    assert pq.read_schema(part).names[:3] == ["id", "generated_text", "finish_reason"]
    assert success(job)["input_rows"] == 0
    assert report.cost.total_usd is None
    assert Started.count == 0
    run(job)


def test_too_many_error_rows_stop_the_job_and_a_higher_limit_resumes_it(job):
    texts = [None if i % 4 == 0 else text for i, text in enumerate(TEXTS)]
    with pytest.raises(TooManyRowErrors, match=r"of 50 rows(.|\n)*f0.parquet row \d+: null_prompt"):
        run(job.rows(texts), run={"max_error_rate": 0.1})
    assert not (job.output / "_SUCCESS").exists()
    assert runs(job)[0]["outcome"] == "stopped"
    with pytest.raises(TooManyRowErrors):
        run(job, run={"max_error_rate": 0.1})
    run(job, run={"max_error_rate": 0.26})  # the 13 error rows are exactly that
    job.check(texts)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("one_unit_in_flight")
def test_a_signal_lets_open_units_finish_and_the_next_run_resumes(job, number):
    job.fake(step_s=0.1).rows(TEXTS)
    handler = signal.getsignal(number)
    with pytest.raises(Interrupted, match=r"^Stopped by SIG(TERM|INT) with \d+ of 50 rows written\.$"):
        run(job, [(lambda status: status.units > 0, number)])
    assert runs(job)[0]["outcome"] == "interrupted"
    num_parts = len(job.parts())
    assert 1 <= num_parts < 8
    assert signal.getsignal(number) == handler
    run(job)
    job.check(TEXTS)
    assert runs(job)[1]["units_written"] == len(job.parts()) - num_parts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_finished_rows_of_units_that_had_no_time_are_not_computed_again(job, number):
    job.fake(step_s=0.1, max_num_seqs=3).rows(TEXTS[:16])
    done = stop_in_a_unit(job, number)
    assert not job.parts()
    report, _ = run(job, output={"rows_per_file": 16})
    job.check(TEXTS[:16])
    tokens = pq.read_table(job.parts()[0])["num_generated_tokens"].to_pylist()
    kept_tokens = sum(len(row["token_ids"]) for row in done)
    assert report.runs[0].actors[0].kept_tokens.generated == kept_tokens
    assert report.work.resumed_rows == len(done)
    assert report.runs[1].stat("generated_tokens") == sum(tokens) - kept_tokens
    assert not list((job.output / "_pipeline" / "partial").iterdir())


def test_a_second_signal_stops_at_once(job):
    job.fake(step_s=5.0).rows(TEXTS)

    started = time.monotonic()
    when = [lambda status: status.phase.startswith("loading the model"), lambda status: status.phase == "draining"]
    with pytest.raises(Interrupted):
        run(job, [(holds, signal.SIGINT) for holds in when], run={"drain_timeout": "300.0 s"})
    assert time.monotonic() - started < 40


def test_the_error_and_the_status_of_a_stopped_run_name_one_number_of_rows(job, monkeypatch):
    """Rows that an engine has finished, in units that are not written, are in neither."""
    monkeypatch.setattr(InProcessDataflow, "order", lambda *_: None)  # no actor receives the order before the end
    job.fake(step_s=0.05, max_num_seqs=3).rows(TEXTS[:40])
    drained = [(lambda status: status.rows_done > status.rows_written, signal.SIGINT)]
    drained += [(lambda status: status.phase == "draining", signal.SIGINT)]
    with pytest.raises(Interrupted, match=r"with (\d+) of 40 rows") as stopped:
        run(job, drained, run={"drain_timeout": "300.0 s"}, output={"rows_per_file": 20})
    status = json.loads((job.output / "_pipeline" / "status.json").read_text())
    assert f"with {status['rows_done']} of 40 rows" in str(stopped.value)
    assert status["rows_done"] == status["rows_written"]
    assert status["eta_s"] is None


def test_two_runs_at_once_deliver_each_row_once(job):
    job.fake(step_s=0.005).rows(TEXTS)
    config = job.config()
    with ThreadPoolExecutor() as pool:
        assert len(list(pool.map(lambda _: run_job(config, backend=FAKES), range(2)))) == 2
    job.check(TEXTS)
    one, two = runs(job)
    assert one["units_written"] + two["units_written"] == len(job.parts())
    assert one["duplicate_units"] + two["duplicate_units"] > 0
    assert sum(actor.open.generated for raw in (one, two) for actor in RunRecord.from_json(raw).actors) > 0
    assert one["rows_written"] + two["rows_written"] == 50


def test_a_failing_engine_fails_the_run_with_its_message(job):
    job.fake(fail_load="ModelError").rows(TEXTS)
    with pytest.raises(ModelError, match="fake failure"):
        run(job)
    assert runs(job)[0]["outcome"] == "failed"


def test_the_limit_takes_the_first_rows(job):
    run(job.rows(TEXTS, per_file=20), input={"limit": 25})
    job.check(TEXTS[:25], per_file=20)


def test_errors_of_parts_that_were_removed_are_not_counted_again(job):
    job.rows([None, None, *TEXTS[2:]])
    run(job)
    for part in job.parts():
        part.unlink()
    _, statuses = run(job)
    assert statuses[1].error_rows == 0
    assert max(status.error_rows for status in statuses) == statuses[-1].error_rows == 2
    (ill,) = [part for part in job.parts() if pq.read_table(part)["error"].null_count < pq.read_metadata(part).num_rows]
    for part in set(job.parts()) - {ill}:
        part.unlink()
    _, statuses = run(job)
    assert {status.error_rows for status in statuses[1:]} == {2}, "the part with the error rows stayed"


@pytest.mark.usefixtures("one_unit_in_flight")
def complete_windows(job) -> set[int]:
    names = [name for part in job.parts() if (name := PartName.parse(part.name))]
    parts = Counter(name.window for name in names)
    return {name.window for name in names if parts[name.window] == name.num_units}


def test_resuming_opens_no_part_of_a_complete_window_before_the_count_at_the_end(job, monkeypatch):
    """The names of parts list their rows; reading a million footers from a store would take an hour."""
    job.fake(step_s=0.1).rows([None, *TEXTS[1:]])
    with pytest.raises(Interrupted):
        run(job, [(lambda status: len(complete_windows(job)) > 0, signal.SIGTERM)])
    complete = complete_windows(job)
    opened, phase, footer = [], ["planning"], PartStore.footer
    monkeypatch.setattr(PartStore, "footer", lambda store, name: opened.append((*phase, name)) or footer(store, name))
    _, statuses = run(job, show=lambda status: phase.__setitem__(0, status.phase))
    early = {name.window for phase, name in opened if not phase.startswith("verifying")}
    assert complete
    assert not early & complete
    assert statuses[1].error_rows == 1, "as the earlier run recorded it"
    opened.clear()
    report, _ = run(job)
    assert not opened, "of a finished job _SUCCESS has the counts"
    assert (report.rows.written, report.rows.errors) == (50, 1)
