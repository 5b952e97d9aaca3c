"""Command that reports what jobs did and cost: report."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.console import (
    handle_errors,
    json_flag,
    print_json,
    print_message,
    print_result,
    print_tables,
    result_width,
)
from pipeline.cli.options import var_option
from pipeline.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from pipeline.report.run_report import RunReport


@click.command()
@click.argument("targets", metavar="OUTPUT|JOB.yaml [OTHER]", nargs=-1, required=True, type=click.Path())
@var_option
@click.option("--html", "page", type=click.Path(dir_okay=False), metavar="FILE",
              help="Also write one HTML file with charts; it needs no network.")  # fmt: skip
@click.option("--by", "column", metavar="COLUMN",
              help="Break machine time and cost down by a column of the output: source_file, finish_reason, or one "
              "kept from the input.")  # fmt: skip
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, metavar="N",
              help="With --by: number of values to show, the most expensive first.")  # fmt: skip
@json_flag
@handle_errors
def report(
    targets: tuple[str, ...],
    vars: tuple[str, ...],
    page: str | None,
    column: str | None,
    top: int,
    as_json: bool,
) -> None:
    """Show what a job did and cost, over all its runs, killed ones included; or compare two jobs.

    \b
    Examples:
      pipeline report out/summarize
      pipeline report my.yaml --json
      pipeline report out/summarize --html report.html
      pipeline report out/summarize --by source_file
      pipeline report out/before out/after

    If you ran `pipeline plan` first, the report shows its estimate next to the actual figures.
    """
    from pipeline.job.output.read_output import damage_of, divided_by, open_output, report_of
    from pipeline.report.render import text

    if len(targets) > 2:
        raise ConfigError(f"{targets[2]}: expected one output, or two to compare")
    if len(targets) == 2:
        if page or column:
            raise ConfigError("--html and --by: expected one output, got two")
        return _compare(targets[0], targets[1], vars, as_json)
    store = open_output(next(iter(targets)), vars)
    run = report_of(store)
    if column is not None:
        return print_tables(divided_by(store, run, column, top), as_json)
    doubt = damage_of(store) if run.outcome == "finished" else None
    if page is not None:
        _write_page(run, page)
    if as_json:
        print_json({**run.to_json(), "stale": doubt})
        return
    print_result(text(run, result_width()))
    if doubt:
        print_result(f"\n  {doubt}")


def _compare(before: str, after: str, vars: tuple[str, ...], as_json: bool) -> None:
    from pipeline.job.output.read_output import open_output, report_of
    from pipeline.report.comparison import compare_reports

    first, second = (report_of(open_output(target, vars)) for target in (before, after))
    print_tables(compare_reports((before, after), first, second), as_json)


def _write_page(run: "RunReport", page: str) -> None:
    from pipeline.report.render import html

    try:
        Path(page).write_text(html(run), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--html {page}: {error.strerror or error}") from None
    print_message(f"Wrote {page}")
