"""`pipeline plan DATA --models A,B`: the same rows by each model."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.demo.example import report_table
from pipeline.demo.reports import PROMPT_TEMPLATE


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = report_table(0, 12)
    rows = rows.set_column(1, "report", [pa.array([None, *rows["report"].to_pylist()[1:]])])
    pq.write_table(rows, "reports.parquet")


@pytest.mark.usefixtures("engines_in_threads")
def test_models_compute_the_same_first_rows(pipe, tmp_path):
    flags = ["--prompt", PROMPT_TEMPLATE, "--models", "demo:target-awq,demo:target", "--probe", "8"]
    flags += ["--max-tokens", "40", "--hourly-price", "0.5", "--hardware", "h100"]
    code, out, err = pipe("plan", "reports.parquet", *flags, "--json")
    assert code == 0, err
    first, second = json.loads(out)["models"]
    assert (first["model"], first["rows"], first["errors"], first["agreement"]) == ("demo:target-awq", 8, 1, None)
    assert (second["model"], second["rows"], second["errors"]) == ("demo:target", 8, 1)
    answers = [
        {row["source_row"]: row["generated_text"] for row in pq.read_table(folder).to_pylist() if row["error"] is None}
        for folder in sorted((tmp_path / "out").iterdir())
        if list(folder.glob("*.parquet"))
    ]
    assert [sorted(each) for each in answers] == [list(range(1, 8))] * 2
    same = sum(answers[0][row].strip() == answers[1][row].strip() for row in range(1, 8)) / 7
    assert second["agreement"] == pytest.approx(same)
    for each in (first, second):
        assert each["estimate"]["rows"] == 12
        assert each["estimate"]["here"][0]["usd"]["expected"] > 0
    code, out, err = pipe("plan", "reports.parquet", *flags)
    assert code == 0, err
    assert "x H100" in out
    assert "same answers (as the first model) on the first 8 rows" in out


@pytest.mark.parametrize(
    ("target", "arguments", "expected"),
    [
        ("my.yaml", ["--models", "a,b"], "--models: expected DATA and --prompt, not the job file my.yaml"),
        ("reports.parquet", ["--models", "a,b", "--output", "x"], "--output: not with --models"),
        ("reports.parquet", ["--models", "a"], "--models a: expected at least two models"),
        ("reports.parquet", ["--models", "a,b@nowhere"], "--models b@nowhere: expected NAME, NAME@URL or"),
        (
            "reports.parquet",
            ["--models", "demo,b@http://localhost:1/v1=x"],
            "--token-price: cost.usd_per_million.input",
        ),
    ],
)
def test_mistakes_are_found_before_a_row_is_computed(pipe, target, arguments, expected):
    code, out, err = pipe("plan", target, "--prompt", "{report}", *arguments)
    assert (code, out) == (2, "")
    assert expected in err
    assert not Path("out").exists()
