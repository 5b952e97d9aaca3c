"""Comparison of two jobs, and the same tokens at a hosted price."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.data.output.part_totals import PartTotals
from pipeline.errors import ConfigError
from pipeline.report.build import build_report
from pipeline.report.comparison import Hosted, compare_reports
from pipeline.report.record.row_stats import LengthBucket, RowStats
from pipeline.report.record.run_record import ActorRecord, RunRecord
from pipeline.report.run_report import RunReport

EXAMPLES = Path("docs/cost.md").read_text().partition("### A worked example")[2]
EXAMPLE = EXAMPLES.rpartition("### A worked example")[2]
WORDS = {"startup": "start-up", "wasted": "wasted work", "quality": "quality watch", "idle": "idle time"}
SECONDS = {"startup": 60, "load": 120, "prefill": 1200, "decode": 3600, "wasted": 60, "quality": 5, "idle": 355}
TAIL_S = 120  # of the idle time
HALF = dict(SECONDS.items()) | {"prefill": 600, "decode": 2040}


def a_report(phases=SECONDS, hourly_usd: float | None = 2.5) -> RunReport:
    """Return the report of the job in docs/cost.md."""
    actor = ActorRecord(0, {phase: s * 10**6 for phase, s in phases.items()}, {"num_steps": 1}, tail_us=TAIL_S * 10**6)
    stats = RowStats(lengths={512: LengthBucket(100_000, 30_000_000, 0, 6_000_000)})
    run = RunRecord("1", "", "finished", wall_us=actor.machine_us, actors=[actor], hourly_usd=hourly_usd,
                    units_written=90, row_stats=stats)  # fmt: skip
    return build_report("x", "f" * 64, [run], PartTotals(100_000, 90, {}, 30_000_000, 0, 6_000_000), 100_000)


def documented(label: str, text: str = EXAMPLE) -> float:
    (number,) = re.findall(rf"^\| {re.escape(label)} \| ([0-9.,]+)", text, re.M)
    return float(number.replace(",", ""))


def test_the_worked_example_of_a_cost_equals_the_computed_one():
    for phase, seconds in SECONDS.items():
        assert re.search(rf"\b{seconds:,} s\s+of\s+{WORDS.get(phase, phase)}\b", EXAMPLES), phase
    report = a_report()
    assert report.machine_us == documented("machine time", EXAMPLES) * 1e6
    for found, label in (
        (report.cost.total_usd, "total"),
        (report.cost.prompt_usd, "money of prompts"),
        (report.cost.per_1m_prompt_usd, "1M prompt tokens"),
        (report.cost.per_1m_generated_usd, "1M generated tokens"),
        (report.cost.per_1m_blended_usd, "1M tokens, both"),
        (report.batch_efficiency, "batch efficiency"),
    ):
        assert found == pytest.approx(documented(label, EXAMPLES), abs=5e-6), label


def test_the_worked_example_of_a_comparison_equals_the_computed_one():
    before, after = a_report(), a_report(phases=HALF)
    assert after.cost.total_usd == pytest.approx(2.25)
    assert before.cost.per_row_usd == pytest.approx(documented("cost of a row before"))
    worth = compare_reports(("a", "b"), before, after, 5e6, 1500).returns
    assert worth.before_usd == pytest.approx(documented("a month before"))
    assert worth.after_usd == pytest.approx(documented("a month after"))
    assert worth.savings_usd == pytest.approx(documented("savings a month"))
    assert worth.payback_months == pytest.approx(documented("payback"))
    assert Hosted.from_report(before, 0.15, 0.60).total_usd == pytest.approx(documented("hosted, at 0.15 and 0.60"))


def test_a_change_for_the_worse_is_never_paid_back_and_an_unpriced_job_has_no_return():
    worth = compare_reports(("a", "b"), a_report(phases=HALF), a_report(), 5e6, 10).returns
    assert worth.payback_months is None
    assert "$75.00 more per month" in worth.to_text()
    with pytest.raises(ConfigError, match="b has no cost per row"):
        compare_reports(("a", "b"), a_report(), a_report(hourly_usd=None), 5e6)
    assert compare_reports(("a", "b"), a_report(), a_report(hourly_usd=None)).returns is None


def test_every_figure_of_two_reports_is_compared():
    figures = {figure.what: figure for figure in compare_reports(("a", "b"), a_report(), a_report(phases=HALF)).figures}
    assert figures["machine time"].ratio == pytest.approx(3240 / 5400)
    assert figures["cost"].ratio == pytest.approx(0.6)
    assert figures["error rows"].ratio is None
    assert replace(a_report(), machine_us=0).batch_efficiency == 0


@pytest.fixture
def output(tmp_path) -> Path:
    folder = tmp_path / "out" / "_pipeline"
    (folder / "runs").mkdir(parents=True)
    report = a_report()
    (folder / "runs" / "1.json").write_text(json.dumps(report.runs[0].to_json()))
    (folder / "report.json").write_text(json.dumps(report.to_json()))
    return tmp_path / "out"


@pytest.mark.parametrize(("args", "message"), [
    (["--hosted", "0.15,0.6"], "would cost $8.10; this job cost $3.75, 0.46 times that"),
    (["--html", "{}/page.html"], "Machine time by phase"),
    (["{}/out", "--rows-per-month", "1e6"], "At 1,000,000 rows per month"),
])  # fmt: skip
def test_the_command_answers(output, args, message):
    filled = [arg.format(output.parent) for arg in args]
    result = CliRunner().invoke(cli, ["report", str(output), *filled])
    assert result.exit_code == 0, result.output
    assert message in result.stdout
    as_json = CliRunner().invoke(cli, ["report", str(output), *filled, "--json"])
    assert json.loads(as_json.stdout)


@pytest.mark.parametrize(("args", "message"), [
    (["{}", "{}"], "expected one output, or two"),
    (["{}", "--html", "x.html"], "expected one output, got two"),
    (["--rows-per-month", "5"], "expected two outputs"),
    (["--hosted", "cheap"], "expected two prices"),
    (["--html", "/nowhere/x.html"], "--html /nowhere/x.html"),
])  # fmt: skip
def test_wrong_combinations_of_options_are_refused(output, args, message):
    result = CliRunner().invoke(cli, ["report", str(output), *(arg.format(output) for arg in args)])
    assert result.exit_code == 2
    assert message in result.stderr
