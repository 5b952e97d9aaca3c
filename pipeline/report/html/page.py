"""A job's report as one HTML file: no script, no network, nothing beside it.

Names and messages are data: jinja2 escapes them here, matplotlib in the charts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.formatting import printable
from pipeline.report.facts import facts, skipped_files
from pipeline.report.html.charts import charts
from pipeline.report.number_formats import percent, seconds
from pipeline.report.record.run_record import PHASE_MEANING
from pipeline.report.render import LATENCY_NOTE, LENGTHS_NOTE, RUN_HEAD, ended
from pipeline.report.run_report import RunReport
from pipeline.report.tables import (
    cost_rows,
    draft_rows,
    error_rows,
    estimate_rows,
    example_line,
    fault_rows,
    latency_rows,
    length_rows,
    phase_rows,
    run_row,
    saving_rows,
    target_rows,
)


@dataclass(frozen=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def html(report: RunReport) -> str:
    """The page, in UTF-8."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    told = [
        Table(t.title, t.head, tuple(tuple(printable(str(cell)) for cell in row) for row in t.rows), printable(t.note))
        for t in _tables(report)
    ]
    page = environment.get_template("report.html.jinja")
    return page.render(
        job=printable(report.job),
        ended=ended(report),
        facts=[(label, printable(value)) for label, value in facts(report)],
        charts=charts(report),
        tables=told,
    )


def _tables(report: RunReport) -> list[Table]:
    method = f"How it is divided: {report.cost.method}."
    phases = [(phase, PHASE_MEANING[phase], *told) for phase, *told, _ in phase_rows(report)]
    phases.append(("all", "machine time of all engines", seconds(report.machine_us), ""))
    tables = [
        _table("Where the machine time went", ("phase", "what it is", "time", "share"), phases),
        _table("Cost", ("", "US dollars"), cost_rows(report), method),
    ]
    tables.append(_table("Targets", ("", "limit", "came", ""), target_rows(report)))
    if report.estimate is not None:
        made = report.estimate.estimate
        note = f"Estimated {made.made_at} from {made.speeds_from}; lengths of completions: {made.lengths_from}."
        tables.append(
            _table("Estimate and actual", ("", "expected", "came", "ratio"), estimate_rows(report.estimate), note)
        )
    tables.append(_table("Latency of a row", ("", "p50", "p95", "p99"), latency_rows(report), f"{LATENCY_NOTE}."))
    lengths = [(*told, percent(share)) for *told, share in length_rows(report)]
    tables.append(_table("What was saved", ("", "machine time", "US dollars", "against"), saving_rows(report)))
    head = ("prompt tokens", "rows", "tokens in", "of them from cache", "tokens out", "machine time", "US dollars",
            "share")  # fmt: skip
    tables.append(_table("Rows by length of prompt", head, lengths, f"{LENGTHS_NOTE}."))
    drafts = [(*told, percent(on)) for *told, on in draft_rows(report.speculated)]
    head = ("sequences at once", "steps", "with drafts", "tokens a sequence and step", "saved", "on")
    note = "On: the share of steps in which drafting was on. Saved: against plain steps, by the measured cost of steps."
    tables.append(_table("Drafts by sequences at once", head, drafts, note))
    errors = [
        (*told, "; ".join(example_line(e) for e in report.examples.get(told[0], ()))) for told in error_rows(report)
    ]
    head = ("code", "rows", "tokens computed", "machine time", "US dollars", "for example")
    tables.append(_table("Error rows by code", head, errors))
    skipped = [(f.file, f"{f.bytes:,}", f.reason) for f in skipped_files(report)]
    tables.append(_table("Damaged files that were left out", ("file", "bytes", "why"), skipped))
    head = ("fault", "times", "tokens", "machine time", "US dollars")
    tables.append(_table("What faults cost, estimated", head, fault_rows(report)))
    tables.append(_table("Runs", RUN_HEAD, [run_row(run) for run in report.runs]))
    if report.runs:
        last = report.runs[-1]
        ran_on = [(key, str(value)) for key, value in (last.resolved | last.versions).items()]
        tables.append(_table("What it ran on (last run)", ("", ""), ran_on))
    return [table for table in tables if table.rows]


def _table(title: str, head: tuple[str, ...], rows: Iterable[Iterable[str]], note: str = "") -> Table:
    return Table(title, head, tuple(tuple(row) for row in rows), note)
