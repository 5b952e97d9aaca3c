"""Comparison of two jobs, and the worked example of docs/cost.md."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.data.output.part_totals import PartTotals
from pipeline.report.build import build_report
from pipeline.report.comparison import compare_reports
from pipeline.report.record.run_record import ActorRecord, RunRecord
from pipeline.report.run_report import RunReport

EXAMPLE = Path("docs/cost.md").read_text().partition("### A worked example")[2]
WORDS = {"startup": "start-up", "wasted": "wasted work", "quality": "quality watch", "idle": "idle time"}
SECONDS = {"startup": 60, "load": 120, "prefill": 1200, "decode": 3600, "wasted": 60, "quality": 5, "idle": 355}
HALF = SECONDS | {"prefill": 600, "decode": 2040}


def a_report(phases=SECONDS, hourly_usd: float | None = 2.5) -> RunReport:
    """Return the report of the job in docs/cost.md."""
    actor = ActorRecord(0, {phase: s * 10**6 for phase, s in phases.items()})
    run = RunRecord("1", "", "finished", wall_us=actor.machine_us, actors=[actor], hourly_usd=hourly_usd)
    return build_report("x", "f" * 64, [run], PartTotals(100_000, 90, {}, 30_000_000, 0, 6_000_000), 100_000)


def test_the_worked_example_of_a_cost_equals_the_computed_one():
    for phase, seconds in SECONDS.items():
        assert re.search(rf"\b{seconds:,} s\s+of\s+{WORDS.get(phase, phase)}\b", EXAMPLE), phase
    report = a_report()
    for found, label in (
        (report.machine_us / 1e6, "machine time"),
        (report.cost.total_usd, "total"),
        (report.cost.prompt_usd, "money of prompts"),
        (report.cost.per_1m_prompt_usd, "1M prompt tokens"),
        (report.cost.per_1m_generated_usd, "1M generated tokens"),
        (report.cost.per_1m_blended_usd, "1M tokens, both"),
        (report.cost.per_row_usd, "cost of a row"),
        (report.batch_efficiency, "batch efficiency"),
    ):
        (number,) = re.findall(rf"^\| {re.escape(label)} \| ([0-9.,]+)", EXAMPLE, re.M)
        assert found == pytest.approx(float(number.replace(",", "")), abs=5e-6), label


def test_every_figure_of_two_reports_is_compared():
    figures = {figure.what: figure for figure in compare_reports(("a", "b"), a_report(), a_report(HALF)).figures}
    assert figures["machine time"].ratio == pytest.approx(3240 / 5400)
    assert figures["cost"].ratio == pytest.approx(0.6)
    assert figures["error rows"].ratio is None
    assert compare_reports(("a", "b"), a_report(), a_report(hourly_usd=None)).figures[-1].ratio is None
    assert replace(a_report(), machine_us=0).batch_efficiency == 0
