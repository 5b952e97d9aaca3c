"""Writes a job's report out for people: text for a terminal, Markdown for `report.md`.

Owns the layout; what is in it comes from `facts.py` and `tables.py`. Names and messages are data: on a page they are
escaped, for a terminal spelled out.
"""

import re
from collections.abc import Sequence
from html import escape
from textwrap import wrap

from pipeline.formatting import printable
from pipeline.report.facts import facts, skipped_files
from pipeline.report.number_formats import aligned, bar, percent, seconds
from pipeline.report.record.row_stats import HISTOGRAM_ERROR
from pipeline.report.record.run_record import PHASE_MEANING
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
    unseen_rows,
)

LATENCY_NOTE = "From when the engine took the row in, its queue included: a batch trades it for throughput"
LATENCY_ERROR = f"From histograms: off by at most {HISTOGRAM_ERROR * 100:.1f} % of itself"
LENGTHS_NOTE = (
    "Completed rows. Time is all machine time, divided as the cost is: what prompts are charged by prompt tokens"
    " computed, the rest by generated ones; rows share steps, so that no row has a time of its own"
)
DRAFTS_NOTE = (
    "Bars: the share of steps in which drafting was on. Saved: against plain steps, by the measured cost of steps"
)
RUN_HEAD = ("run", "started", "outcome", "wall", "actors", "rows written", "tokens in", "of them from cache",
            "in error rows", "tokens out", "USD per hour")  # fmt: skip
_WIDTH = 80  # of a terminal
_NARROW = 20
_ENDED = {
    "finished": "finished",
    "sampled": "a sample was computed; the same command without --sample does the rest",
    "stopped": "stopped by run.max_error_rate",
    "interrupted": "interrupted; the same command goes on",
    "failed": "failed; the same command goes on",
    "killed": "killed; the same command goes on",
    "running": "not finished",
}


class _Markdown(str):
    """A cell that is Markdown of our own making, not data."""


def text(report: RunReport) -> str:
    """The report as a terminal shows it at the end of a run."""
    lines = [f"{printable(report.job)}: {ended(report)}", ""]
    for label, value in facts(report):
        lines += wrap(value, _WIDTH, initial_indent=f"  {label:<12}", subsequent_indent=" " * 14)
    lines += _columns(["Where the machine time went"], phase_rows(report), "<>><")
    lines += _columns(["Cost"], cost_rows(report), "<>")
    if report.cost.total_usd is None:
        lines.append("    To price it, set cost.hourly_usd: what one actor's machine costs for an hour.")
    if report.targets:
        lines += _columns(["Targets", "limit", "came", ""], target_rows(report), "<>><")
    if report.estimate is not None:
        head = ["Estimate and actual", "expected", "came", "ratio"]
        lines += _columns(head, estimate_rows(report.estimate), "<>>>")
    if latency := latency_rows(report):
        lines += [*_columns(["Latency of a row", "p50", "p95", "p99"], latency, "<>>>"), f"    {LATENCY_NOTE}."]
    if report.lengths:
        head = ["By length of prompt", "rows", "tokens in", "from cache", "out", "time", "USD", ""]
        rows = [(*told, bar(share, 8)) for *told, share in length_rows(report)]
        lines += _columns(head, rows, "<>>>>>><")
    if drafts := draft_rows(report.speculated):
        head = ["Drafts by sequences at once", "steps", "with drafts", "tokens/step", "saved", ""]
        rows = [(*told, bar(on, _NARROW)) for *told, on in drafts]
        lines += [*_columns(head, rows, "<>>>><"), f"    {DRAFTS_NOTE}."]
    if savings := saving_rows(report):
        lines += _columns(["What was saved", "time", "USD", ""], savings, "<>><")
    if report.error_costs:
        titles = ["Error rows", "rows", "tokens computed", "time", "USD"]
        blank, head, *errors = _columns(titles, error_rows(report), "<>>>>")
        lines += [blank, head]
        for code, line in zip(report.error_costs, errors, strict=True):
            lines.append(line)
            for example in map(example_line, report.examples.get(code, ())):
                lines += wrap(
                    example, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 8, break_on_hyphens=False
                )
    if report.faults:
        head = ["What faults cost, estimated", "times", "tokens", "time", "USD"]
        lines += _columns(head, fault_rows(report), "<>>>>")
        lines += [f"      {fault.title}: {node}" for fault in report.faults for node in fault.where]
    if len(report.runs) > 1:
        runs = [(run.run_id, run.outcome, seconds(run.wall_us), f"{run.rows_written:,} rows") for run in report.runs]
        lines += _columns([f"Over {len(runs)} runs"], runs, "<<>>")
    return "\n".join(lines)


def markdown(report: RunReport) -> str:
    """The report as `report.md` keeps it."""
    lines = [f"# {_cell(report.job)}", "", f"Outcome: **{ended(report)}**", ""]
    lines += _table(["", ""], facts(report))
    phases = [(phase, PHASE_MEANING[phase], *told, _bar_cell(bars)) for phase, *told, bars in phase_rows(report)]
    phases.append((_Markdown("**all**"), "machine time of all actors", seconds(report.machine_us), "", ""))
    written = f"Writing results took {seconds(report.write_us)} beside it."
    lines += _section("Where the machine time went", ["phase", "what it is", "time", "share", ""], phases, written)
    if report.driver_us:
        driver = ", ".join(f"{name.removesuffix('_us')} {seconds(us)}" for name, us in report.driver_us.items())
        lines += [f"The driver's own time, not in the machine time: {driver}."]
    unpriced = "Unpriced: set `cost.hourly_usd`, what one actor's machine costs for an hour."
    notes = [unpriced] * (report.cost.total_usd is None) + [f"How it is divided: {report.cost.method}."]
    lines += _section("Cost", ["", "US dollars"], cost_rows(report), *notes)
    if report.targets:
        lines += _section("Targets", ["", "limit", "came", ""], target_rows(report))
    if report.estimate is not None:
        made = report.estimate.estimate
        note = f"Estimated {made.made_at} from {made.speeds_from}; lengths of completions: {made.lengths_from}."
        head = ["", "expected", "came", "ratio"]
        lines += _section("Estimate and actual", head, estimate_rows(report.estimate), note)
    if latency := latency_rows(report):
        lines += _section("Latency of a row", ["", "p50", "p95", "p99"], latency, f"{LATENCY_NOTE}. {LATENCY_ERROR}.")
    if drafts := draft_rows(report.speculated):
        head = ["sequences at once", "steps", "with drafts", "tokens a sequence and step", "saved", "on"]
        rows = [(*told, _bar_cell(bar(on, _NARROW))) for *told, on in drafts]
        lines += _section("Drafts by sequences at once", head, rows, f"{DRAFTS_NOTE}.")
    if savings := saving_rows(report):
        lines += _section("What was saved", ["", "machine time", "US dollars", "against"], savings)
    if report.lengths:
        head = ["prompt tokens", "rows", "tokens in", "of them from cache", "tokens out", "machine time", "US dollars",
                "share", ""]  # fmt: skip
        rows = [(*told, percent(share), _bar_cell(bar(share))) for *told, share in length_rows(report)]
        lines += _section("Rows by length of prompt", head, rows, f"{LENGTHS_NOTE}.{unseen_rows(report)}")
    if report.error_costs:
        rows = [
            (*told, _Markdown("<br>".join(_cell(example_line(e)) for e in report.examples.get(told[0], ()))))
            for told in error_rows(report)
        ]
        head = ["code", "rows", "tokens computed", "machine time", "US dollars", "for example"]
        lines += _section("Error rows by code", head, rows)
    if skipped := skipped_files(report):
        rows = [(f.file, f"{f.bytes:,}", f.reason) for f in skipped]
        lines += _section("Damaged files, left out as `input.on_corrupt: skip` asks", ["file", "bytes", "why"], rows)
    if report.faults:
        head = ["fault", "times", "tokens", "machine time", "US dollars"]
        how = "Tokens that were computed for nothing or computed again. How the machine time is estimated:"
        lines += [*_section("What faults cost, estimated", head, fault_rows(report), how), ""]
        lines += [f"- {fault.title}: {fault.how}." for fault in report.faults]
        lines += [f"- {fault.title}: {_cell(node)}" for fault in report.faults for node in fault.where]
        if any(fault.at_least for fault in report.faults):
            lines += ["", "At least: of a killed run's last second or two, after its last record, nothing is known."]
    if report.work.restart_reasons:
        lines += ["", "How engine processes ended (what they printed: `_pipeline/logs/<run>/engine-<actor>.log`):", ""]
        lines += [f"- {count:,} times: {_cell(reason)}" for reason, count in report.work.restart_reasons.items()]
    lines += _section("Runs", list(RUN_HEAD), [run_row(run) for run in report.runs])
    if report.runs:
        last = report.runs[-1]
        ran_on = [(key, str(value)) for key, value in (last.resolved | last.versions).items()]
        lines += _section("What it ran on (last run)", ["", ""], ran_on)
    return "\n".join(lines) + "\n"


def ended(report: RunReport) -> str:
    """How the job's last run ended, and what to do."""
    limit = report.runs[-1].stopped_by if report.runs else ""
    if limit and report.outcome == "interrupted":
        return f"stopped inside {limit}; the same command goes on" + " with a higher one" * (limit != "run.max_runtime")
    return _ENDED.get(report.outcome, report.outcome)


def _columns(head: list[str], rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """For a terminal: the head of a table and its rows, indented below it; a head of one cell is a line of its own."""
    below = [(f"  {label}", *told) for label, *told in rows]
    if len(head) == 1:
        return ["", f"  {head[0]}", *(f"  {line}" for line in aligned(below, sides=sides))]
    return ["", *(f"  {line}" for line in aligned([head, *below], sides=sides))]


def _bar_cell(bars: str) -> str:
    return _Markdown(f"`{bars}`" if bars else "")


def _section(title: str, head: list[str], rows: Sequence[Sequence[str]], *notes: str) -> list[str]:
    """Of a page: a title, a table, and paragraphs after it."""
    after = [line for note in notes for line in ("", note)]
    return ["", f"## {title}", "", *_table(head, rows), *after]


def _table(head: list[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + [
        "| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows
    ]


def _cell(value: str) -> str:
    """Of a table, or text in a line: data cannot be Markdown or HTML there."""
    if isinstance(value, _Markdown):
        return value
    shown = escape(printable(" ".join(value.split())), quote=False)
    return re.sub(r"([\\|\[`])", r"\\\1", shown)
