"""`pipeline report --by`: machine time by a column of the output, from the parts; all time is counted once."""

import json
from collections import Counter

import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.job.running.run import run_job
from pipeline.report.by_column import ByColumn, Group
from pipeline.report.record.row_stats import LengthBucket
from tests.job.conftest import FAKES, Job

TEXTS: list[str | None] = [f"text {i} " + "x" * (i % 40) if i % 10 else None for i in range(60)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Job:
    job = Job(tmp_path_factory.mktemp("job")).rows(TEXTS, per_file=25)
    renamed = {"num_generated_tokens": "out tokens", "error": "what failed"}
    config = job.config(output={"rename": renamed}, cost={"hourly_usd": 2.0}, run={"window_rows": 100})
    job.report = run_job(config, backend=FAKES)
    return job


def by(job: Job, *args: str) -> dict:
    result = CliRunner().invoke(cli, ["report", str(job.output), *args, "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("column", "count"), [("source_file", 3), ("finish_reason", 3), ("what failed", 2), ("id", 60)]
)
def test_all_machine_time_and_money_is_divided_once(finished, column: str, count: int):
    divided, report = by(finished, "--by", column, "--top", "100"), finished.report
    rows = finished.table().to_pylist()
    expected = Counter(str(row[column]) if row[column] is not None else "(null)" for row in rows)
    assert {group["value"]: group["rows"] for group in divided["groups"]} == expected
    assert len(divided["groups"]) == count
    assert sum(group["machine_us"] for group in divided["groups"]) == divided["machine_us"] == report.machine_us
    assert sum(group["usd"] for group in divided["groups"]) == pytest.approx(report.cost.total_usd)
    tokens = [
        sum(g["completed"][f"{kind}_tokens"] for g in divided["groups"]) for kind in ("input", "cached", "generated")
    ]
    assert tokens == [report.tokens.input, report.tokens.cached, report.tokens.generated]


def test_more_tokens_cost_more_and_values_beyond_the_top_are_one_group(finished):
    divided = by(finished, "--by", "id", "--top", "3")
    all_of_them = by(finished, "--by", "id", "--top", "60")["groups"]
    assert divided["groups"] == all_of_them[:3]
    assert all_of_them[0]["machine_us"] > all_of_them[-1]["machine_us"] == 0  # an error row
    assert divided["others"]["value"] == "(57 others)"
    assert divided["others"]["machine_us"] == sum(group["machine_us"] for group in all_of_them[3:])
    assert divided["others"]["usd"] == pytest.approx(sum(group["usd"] for group in all_of_them[3:]))
    shown = CliRunner().invoke(cli, ["report", str(finished.output), "--by", "source_file"]).stdout
    names = [line.split()[0] for line in shown.splitlines()][1:]  # in order of measured time
    assert sorted(names) == [f"f{i}.parquet" for i in (0, 1, 2)]


def test_a_missing_column_is_named_with_a_suggestion(finished):
    result = CliRunner().invoke(cli, ["report", str(finished.output), "--by", "source_fil"])
    assert result.exit_code == 2
    assert "--by source_fil: the output has no such column (did you mean 'source_file'?)" in result.stderr


def test_long_values_are_cut_in_the_table_and_whole_as_json():
    """A value, for example of a column of prompts, must not make the table wider than a terminal."""
    groups = tuple(Group(text, 1, LengthBucket()) for text in ("a" * 60, "b" * 300_000, "\x1b" * 90))
    divided = ByColumn("text", 10, groups)
    shown = [line.split("  ")[0].strip() for line in divided.to_text().splitlines()]
    assert shown[1:] == ["a" * 60, "b" * 57 + "...", "\\x1b" * 14 + "\\..."]
    assert [group["value"] for group in divided.to_json()["groups"]] == [group.value for group in groups]
