"""Rendering of a job's report as terminal text, Markdown (`report.md`), and a single html file without scripts.

Names and messages are untrusted: they are escaped in Markdown and html, and made printable for a terminal.
"""

import re
import textwrap
from html import escape
from pathlib import Path

from pipeline.formatting import printable, table
from pipeline.report.run_report import RunReport
from pipeline.report.sections import Bar, Cell, outcome_text, sections

BAR_WIDTH = 24  # characters of a full bar


def text(report: RunReport, width: int | None = None) -> str:
    """Return the report for a terminal of `width` characters; None: no wrapping."""
    lines = [f"{printable(report.job)}: {outcome_text(report)}"]
    for section in sections(report):
        if not section.on_terminal:
            continue
        lines += ["", f"  {section.title}"]
        rows = [[_bar(cell) if isinstance(cell, Bar) else cell for cell in row] for row in section.rows]
        lines.append(table(rows, head=section.columns, sides=section.sides, width=width, indent=4))
        for note in map(printable, section.notes):
            lines.append(textwrap.fill(note, (width or 10**6) - 1, initial_indent=" " * 4, subsequent_indent=" " * 4))
    return "\n".join(lines)


def markdown(report: RunReport) -> str:
    """Return the report as Markdown."""
    return _page(report, "report.md.jinja", autoescape=False)


def html(report: RunReport) -> str:
    """Return the report as a self-contained html page."""
    from pipeline.report.charts import charts

    return _page(report, "report.html.jinja", autoescape=True, charts=charts(report))


def _page(report: RunReport, template: str, autoescape: bool, **values: object) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes 40 ms, saved in `pipeline status`

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["printable"] = lambda value: printable(" ".join(value.split()))
    environment.filters["markdown"] = in_markdown
    environment.tests["bar"] = lambda cell: isinstance(cell, Bar)
    page = environment.get_template(template)
    return page.render(job=report.job, outcome=outcome_text(report), sections=sections(report), **values)


def _bar(bar: Bar) -> str:
    """Return a bar of text, at least one character for shares of 0.05% and more."""
    return "█" * max(round(bar.share * BAR_WIDTH), 1 if bar.share >= 0.0005 else 0)


def in_markdown(cell: Cell) -> str:
    """Return a table cell or a line of text, with Markdown and html escaped."""
    if isinstance(cell, Bar):
        return f"`{_bar(cell)}`" if _bar(cell) else ""
    return re.sub(r"([\\|\[`])", r"\\\1", escape(printable(" ".join(cell.split())), quote=False))
