"""`pipeline plan` on the demonstration job: before any run, after one, and compared with the next run."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.estimate.cards import STARTUP_S
from pipeline.estimate.job_estimate import _Work
from pipeline.estimate.render import NOTHING_KNOWN
from pipeline.report.account import accounted
from pipeline.report.estimate import Estimate, Interval, compare
from pipeline.report.faults import LostWork
from pipeline.report.record.run_record import PHASES, ActorRecord, RunRecord, no_phases

pytestmark = pytest.mark.usefixtures("engines_in_threads")
JOB = ["jobs/summarize.yaml", "--limit", "96", "--set", "sampling.max_tokens=24"]


def call(*args) -> str:
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 0, result.output
    return result.stdout


def plan(output, *args) -> str:
    return call("plan", *JOB, "--set", f"output.path={output}", *args)


def run(output) -> dict:
    return json.loads(call("run", *JOB, "--set", f"output.path={output}", "--json"))


def test_a_plan_is_compared_with_the_actual_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    shown = plan(first)
    assert NOTHING_KNOWN.split(".")[0] in shown
    assert "an assumption: half of max_tokens, 24 on average" in shown
    assert not first.exists()
    alone = run(first)
    assert alone["estimate"] is None

    found = json.loads(plan(second, "--json", "--hardware", "l4", "--actors", "1,2"))
    assert found["prompts"]["expected"] == alone["tokens"]["input"]  # the sample is the whole input
    assert found["lengths"]["come_from"] == "96 rows of 1 earlier run of this job"
    assert found["generated"]["expected"] == pytest.approx(alone["tokens"]["generated"], rel=1 / 32)
    assert [pool["actors"] for pool in found["here"]] == [1, 2]
    assert [(pool["machine"], pool["lacks"]) for pool in found["cards"]] == [("L4", "")] * 2
    assert found["cards"][0]["usd"]["low"] < found["cards"][0]["usd"]["expected"] < found["cards"][0]["usd"]["high"]
    expected = found["estimate"]["machine_us"]["expected"]
    assert sum(found["estimate"]["phases_us"].values()) == pytest.approx(expected, abs=10)

    report = run(second)
    lines = {line["what"]: line for line in report["estimate"]["lines"]}
    assert lines["rows"]["expected"] == lines["rows"]["actual"] == 96
    assert lines["machine_us"]["actual"] == report["machine_us"] == sum(lines[phase]["actual"] for phase in PHASES)
    of_machine = lines["machine_us"]  # its accuracy is measured, not tested: docs/cost.md
    assert report["estimate"]["ratio"] == pytest.approx(of_machine["actual"] / of_machine["expected"], rel=1e-3)
    assert "Estimate and actual" in call("report", str(second))
    assert "## Estimate and actual" in (second / "_pipeline" / "report.md").read_text()
    assert "Nothing is left to compute" in plan(second)


def test_several_samples_of_a_row_are_planned(tmp_path):
    samples = ["--set", "sampling.n=3", "--set", "sampling.temperature=0.8"]
    one, three = (json.loads(plan(tmp_path / "out", "--json", "--hardware", "l4", *flags)) for flags in ([], samples))
    assert three["generated"]["expected"] == 3 * one["generated"]["expected"]
    assert three["prompts"] == one["prompts"]
    times = [found["cards"][0]["machine_us"]["expected"] - STARTUP_S * 1e6 for found in (one, three)]
    assert 1.5 < times[1] / times[0] < 3.1
    plan(tmp_path / "out", *samples, "--probe", "16")
    found = json.loads(plan(tmp_path / "other", "--json", *samples))
    assert found["lengths"]["come_from"] == "48 samples of 1 earlier run of this job"
    made = found["estimate"]
    tokens = json.loads(call("run", *JOB, *samples, "--set", f"output.path={tmp_path}/other", "--json"))["tokens"]
    assert made["generated_tokens"]["expected"] == pytest.approx(tokens["generated"], rel=0.2)


def test_a_probe_is_enough_and_the_run_reuses_its_rows(tmp_path):
    shown = plan(tmp_path / "out", "--probe", "16")
    assert "from 16 rows of 1 earlier run of this job" in shown
    assert "On this machine, by 1 earlier run, the last on" in shown
    report = run(tmp_path / "out")
    assert report["work"]["resumed_rows"] == 16
    assert report["rows"]["completed"] == 96
    assert report["estimate"]["estimate"]["runs_before"] == 1


@pytest.mark.parametrize(("args", "message"), [
    (["--hardware", "h1000"], "--hardware h1000: no such card; expected one of H200"),
    (["--actors", "1,x"], "--actors 1,x: expected whole numbers"),
    (["--actors", "0"], "--actors 0: expected whole numbers"),
    (["--hardware", "h100=free"], "--hardware h100=free: expected CARD=USD"),
])  # fmt: skip
def test_wrong_options_are_named(tmp_path, args, message):
    result = CliRunner().invoke(cli, ["plan", *JOB, "--set", f"output.path={tmp_path}/out", *args])
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_input_without_a_usable_prompt_has_no_estimate(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"report_id": 1, "report": ""}\n')
    args = ["plan", *JOB, "--set", f"input.path={tmp_path}/in.jsonl", "--set", "prompt.template={report}"]
    result = CliRunner().invoke(cli, [*args, "--set", f"output.path={tmp_path}/out"])
    assert result.exit_code == 2
    assert "none of the 1 sampled rows has a usable prompt" in result.stderr
    none = pa.table({"report_id": pa.array([], pa.int64()), "report": pa.array([], pa.string())})
    pq.write_table(none, tmp_path / "none.parquet")
    without_rows = ["--set", f"input.path={tmp_path}/none.parquet", "--set", f"output.path={tmp_path}/out"]
    result = CliRunner().invoke(cli, [*args, *without_rows])
    assert result.exit_code == 2
    assert f"{tmp_path}/none.parquet: has no rows, so there is nothing to plan" in result.stderr


def test_tokens_beyond_the_models_context_are_not_planned(tmp_path):
    """A prompt that is too long is no work, and the context bounds each answer (a batch API's default is 4,096)."""
    texts = ["A pump."] * 3 + ["word " * 3000]
    lines = [json.dumps({"report_id": i, "report": text}) + "\n" for i, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    args = [*JOB, "--set", f"input.path={tmp_path}/in.jsonl", "--set", f"output.path={tmp_path}/out", "--json"]
    whole = json.loads(call("plan", *args, "--set", f"sampling.max_tokens={10**20}", "--hardware", "l4"))
    assert (whole["sample"]["rows"], whole["sample"]["errors"]) == (4, 1)
    assert whole["prompts"]["expected"] < 300
    assert 900 < whole["lengths"]["each"]["high"] < 1024, "a summary's prompt and it fill the context"
    assert whole["cards"][0]["lacks"] == ""
    shorter = json.loads(call("plan", *args, "--set", "engine.max_model_len=64"))
    assert shorter["sample"]["errors"] == 1
    assert shorter["lengths"]["each"]["high"] == 24


def test_rows_that_do_not_meet_the_condition_are_no_work(tmp_path):
    rows = [{"report_id": i, "report": "A pump."} for i in range(8)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = [*JOB, "--set", f"input.path={tmp_path}/in.jsonl", "--set", f"output.path={tmp_path}/out"]
    whole = json.loads(call("plan", *args, "--json"))
    quarter = [*args, "--set", "input.when=report_id > 5"]
    some = json.loads(call("plan", *quarter, "--json"))
    assert (some["sample"]["rows"], some["sample"]["errors"], some["sample"]["dropped"]) == (8, 0, 6)
    assert some["prompts"]["expected"] == whole["prompts"]["expected"] / 4
    assert "75% do not meet input.when" in call("plan", *quarter)


def test_rows_with_their_own_limits_are_planned_with_them(tmp_path):
    """Limits are from a column or from requests. A row whose limit is refused is no work."""
    limits = [40, 200, 300, -1]
    rows = [{"report_id": i, "report": "A pump.", "budget": limit} for i, limit in enumerate(limits)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = {"method": "POST", "url": "/v1/chat/completions"}
    chat = {"model": "m", "messages": [{"role": "user", "content": "A pump."}]}
    lines = [request | {"custom_id": str(limit), "body": chat | {"max_tokens": limit}} for limit in limits[:3]]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = tmp_path / "requests.yaml"
    job.write_text(f"input: {{path: {tmp_path}/requests.jsonl, format: openai}}\nmodel: {{path: demo}}\n")
    by_column = [JOB[0], "--set", f"input.path={tmp_path}/in.jsonl", "--set", "sampling.max_tokens={column: budget}"]
    for args, refused in ((by_column, 1), ([str(job)], 0)):
        found = json.loads(call("plan", *args, "--set", f"output.path={tmp_path}/out", "--json"))
        assert found["lengths"]["each"] == {"low": 18, "expected": 90, "high": 180}, args
        assert found["sample"]["errors"] == refused


@pytest.mark.parametrize(
    ("units", "actors", "expected"), [(20.5, 1, 1), (8, 8, 1), (9, 8, 16 / 9), (800, 64, 13 / 12.5)]
)
def test_the_last_engine_takes_a_whole_unit(units, actors, expected):
    assert _Work(Interval(0, 0, 0), Interval(0, 0, 0), 0, units, 0).imbalance(actors) == pytest.approx(expected)


def test_only_runs_since_the_estimate_are_compared_with_it():
    def a_run(decode):
        return RunRecord("1", "", actors=[ActorRecord(0, no_phases() | {"decode": decode})], rows_written=3)

    each = Interval(1, 2, 3)
    made = Estimate("", 1, 3, each, 0.0, each, Interval(50, 100, 150), each, {"decode": 100}, hourly_usd=3.6e9)
    runs = [a_run(1000), a_run(70), a_run(50)]
    accounts = accounted(runs, [LostWork()] * 3)
    assert compare(made, runs[:1], accounts[:1]) is None
    found = compare(made, runs, accounts)
    assert found.ratio == pytest.approx(1.2)
    assert {line.what: line.actual for line in found.lines}["rows"] == 6
    assert {line.what: line.expected for line in found.lines}["usd"] == pytest.approx(100)
