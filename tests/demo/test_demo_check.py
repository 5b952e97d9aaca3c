"""Checker of summaries: it accepts the right summary, and finds each single wrong fact."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.demo.check import check_output, facts_of, wrong_facts
from pipeline.demo.reports import FACT_NAMES, SUMMARY, Facts, Report, make_report

# Turns the right value of each fact into a similar, wrong one.
_NEAR_MISS = {
    "date": lambda value: value + "0",
    "site": lambda value: value[:-1] + str((int(value[-1]) + 1) % 10),
    "technician": lambda value: " ".join(reversed(value.split())) + "a",
    "device": lambda value: value[:-3] + value[-2:] + value[-3],
    "fault": lambda value: "no load" if value != "no load" else "no flow",
    "cause": lambda value: "a worn " + value,
    "action": lambda value: value.replace("the ", "the old "),
    "part": lambda value: value[1] + "Q" + value[2:],
    "hours": lambda value: value + "5",
    "cost": lambda value: value + "1",
}


def summary_of(facts: Facts) -> str:
    return SUMMARY.format(**{name: getattr(facts, name) for name in FACT_NAMES})


def test_the_reference_summary_is_right() -> None:
    for index in range(20):
        report = make_report("heldout", index)
        assert wrong_facts(report.text, report.summary) == ()
        assert wrong_facts(report.text, f" {report.summary} \n") == ()


@pytest.mark.parametrize("name", FACT_NAMES)
def test_one_wrong_fact_is_found_and_named(name: str) -> None:
    for index in range(20):
        report = make_report("heldout", index)
        wrong = replace(report.facts, **{name: _NEAR_MISS[name](getattr(report.facts, name))})
        if wrong == report.facts:  # device 222, with two digits swapped
            continue
        assert wrong_facts(report.text, summary_of(wrong)) == (name,)


def test_missing_cut_and_repeated_summaries_are_wrong() -> None:
    report = make_report("heldout", 2)
    for text in ("", "The pump works again.", "On May 24 at"):
        assert wrong_facts(report.text, text) == FACT_NAMES
    assert "cost" in wrong_facts(report.text, report.summary[:-1])
    assert wrong_facts(report.text, f"{report.summary} {report.summary}")


def test_a_foreign_report_is_refused() -> None:
    with pytest.raises(ValueError, match="states date 0 times"):
        facts_of("The pump works again.")
    report = make_report("heldout", 3).text
    with pytest.raises(ValueError, match="2 times"):
        facts_of(report + " " + report)


@pytest.fixture
def job(tmp_path: Path) -> tuple[Path, Path, list[Report]]:
    """Write an input folder of ten reports and an empty output folder."""
    reports = [make_report("job", index) for index in range(10)]
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    (out / "_pipeline").mkdir(parents=True)
    (out / "_pipeline" / "part-0.parquet").write_text("not Parquet")
    columns = {"report_id": [r.report_id for r in reports], "report": [r.text for r in reports]}
    pq.write_table(pa.table(columns), data / "reports.parquet")
    return data, out, reports


def write_part(out: Path, number: int, rows: list[tuple[str, str | None, str | None]]) -> None:
    schema = pa.schema([(name, pa.string()) for name in ("report_id", "generated_text", "error")])
    table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
    pq.write_table(table, out / f"part-{number:05d}.parquet")


def test_a_right_output_passes(job: tuple[Path, Path, list[Report]], capsys: pytest.CaptureFixture[str]) -> None:
    data, out, reports = job
    rows = [(r.report_id, r.summary, None) for r in reports]
    write_part(out, 0, rows[5:])
    write_part(out, 1, rows[:5])
    assert check_output(out, data, at_least=1.0, num_examples=3)
    assert "10  (100.00% in every fact" in capsys.readouterr().out


def test_wrong_and_failed_rows_count_against_the_share(
    job: tuple[Path, Path, list[Report]], capsys: pytest.CaptureFixture[str]
) -> None:
    data, out, reports = job
    rows: list[tuple[str, str | None, str | None]] = [(r.report_id, r.summary, None) for r in reports]
    rows[0] = (reports[0].report_id, reports[0].summary.replace("logged", "logged 1"), None)
    rows[1] = (reports[1].report_id, None, "timeout")
    write_part(out, 0, rows)
    assert check_output(out, data, at_least=0.8, num_examples=3)
    assert not check_output(out, data, at_least=0.81, num_examples=3)
    printed = capsys.readouterr().out
    assert "hours 1" in printed
    assert "error timeout" in printed


def test_a_missing_or_duplicate_row_fails(job: tuple[Path, Path, list[Report]]) -> None:
    data, out, reports = job
    rows = [(r.report_id, r.summary, None) for r in reports]
    write_part(out, 0, rows[1:])
    assert not check_output(out, data, at_least=0.5, num_examples=3)
    write_part(out, 1, rows[:2])
    assert not check_output(out, data, at_least=0.5, num_examples=3)


def test_an_unknown_row_and_an_empty_folder_are_refused(job: tuple[Path, Path, list[Report]]) -> None:
    data, out, reports = job
    with pytest.raises(ValueError, match="no part"):
        check_output(out, data, at_least=0.5, num_examples=3)
    write_part(out, 0, [("report-of-another-job", reports[0].summary, None)])
    with pytest.raises(ValueError, match="without a report"):
        check_output(out, data, at_least=0.5, num_examples=3)
