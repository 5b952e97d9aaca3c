"""`pipeline report`: its text, its facts in JSON, two jobs, and refused options."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import golden
from tests.report.records import full_report


@pytest.fixture
def output(tmp_path, monkeypatch) -> Path:
    """Write an output as its last run left it, in the working directory."""
    monkeypatch.chdir(tmp_path)
    report = full_report()
    (tmp_path / "out" / "_pipeline" / "runs").mkdir(parents=True)
    for run in report.runs:
        (tmp_path / "out" / "_pipeline" / "runs" / f"{run.run_id}.json").write_text(json.dumps(run.to_json()))
    (tmp_path / "out" / "_pipeline" / "report.json").write_text(json.dumps(report.to_json()))
    return tmp_path / "out"


def test_the_text_of_a_report(output, pipe):
    code, out, err = pipe("report", "out")
    assert (code, err) == (0, "")
    golden("report.txt", out)


def test_the_text_of_a_comparison(output, pipe):
    code, out, err = pipe("report", "out", "out")
    assert (code, err) == (0, "")
    golden("report-two.txt", out)


def test_the_facts_in_json(output, pipe):
    raw = json.loads(pipe("report", "out", "--json")[1])
    assert raw["rows"] | {"completed": 177, "errors": 3} == raw["rows"]
    assert raw["machine_us"] == sum(raw["phases_us"].values()) == sum(run["machine_us"] for run in raw["runs"])
    assert (raw["work"]["wasted_generated_tokens"], raw["work"]["wasted_prompt_tokens"]) == (500, 1600)
    assert {fault["kind"]: fault["count"] for fault in raw["faults"]} == {"engine_restarted": 1, "storage_retried": 4}
    assert raw["cost"]["total_usd"] == pytest.approx(raw["machine_us"] / 1e9)
    two = json.loads(pipe("report", "out", "out", "--json")[1])
    assert {figure["ratio"] for figure in two["figures"]} <= {1.0, None}


def test_a_page_is_written(output, pipe):
    assert pipe("report", "out", "--html", "page.html")[0] == 0
    assert "<h2>Machine time by phase</h2>" in Path("page.html").read_text()


@pytest.mark.parametrize(("args", "message"), [
    (["out", "out", "out"], "expected one output, or two"),
    (["out", "out", "--html", "x.html"], "expected one output, got two"),
    (["out", "--html", "/nowhere/x.html"], "--html /nowhere/x.html"),
])  # fmt: skip
def test_wrong_combinations_of_options_are_refused(output, pipe, args, message):
    code, out, err = pipe("report", *args)
    assert (code, out, message in err) == (2, "", True)
