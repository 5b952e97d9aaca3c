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
from pipeline.cli.options import FiniteRange, var_option
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
@click.option("--hosted", metavar="USD,USD",
              help="Compare with a hosted service, at its prices of 1M prompt and 1M generated tokens: "
              "0.15,0.60.")  # fmt: skip
@click.option("--rows-per-month", type=FiniteRange(min=0, min_open=True), metavar="N",
              help="With two outputs: estimate the savings of the second at this volume.")  # fmt: skip
@click.option("--effort-usd", type=FiniteRange(min=0), metavar="USD", default=0.0,
              help="With two outputs: one-off cost of the change, for its payback time.")  # fmt: skip
@json_flag
@handle_errors
def report(
    targets: tuple[str, ...],
    vars: tuple[str, ...],
    page: str | None,
    column: str | None,
    top: int,
    hosted: str | None,
    rows_per_month: float | None,
    effort_usd: float,
    as_json: bool,
) -> None:
    """Show what a job did and cost, over all its runs, killed ones included; or compare two jobs.

    \b
    Examples:
      pipeline report out/summarize
      pipeline report my.yaml --json
      pipeline report out/summarize --html report.html
      pipeline report out/summarize --by source_file
      pipeline report out/summarize --hosted 0.15,0.60
      pipeline report out/before out/after --rows-per-month 50e6 --effort-usd 4000

    If you ran `pipeline plan` first, the report shows its estimate next to the actual figures. Each figure is marked as
    measured or modelled.
    """
    from pipeline.job.output.read_output import damage_of, divided_by, open_output, report_of
    from pipeline.report.render import text

    if len(targets) > 2:
        raise ConfigError(f"{targets[2]}: expected one output, or two to compare")
    if len(targets) == 2:
        if page or hosted or column:
            raise ConfigError("--html, --by and --hosted: expected one output, got two")
        return _compare(targets[0], targets[1], vars, rows_per_month, effort_usd, as_json)
    if rows_per_month is not None or effort_usd:
        raise ConfigError("--rows-per-month, --effort-usd: expected two outputs, before and after a change")
    store = open_output(next(iter(targets)), vars)
    run = report_of(store)
    if column is not None:
        return print_tables(divided_by(store, run, column, top), as_json)
    if hosted is not None:
        return _hosted(run, hosted, as_json)
    doubt = damage_of(store) if run.outcome == "finished" else None
    if page is not None:
        _write_page(run, page)
    if as_json:
        print_json({**run.to_json(), "stale": doubt})
        return
    print_result(text(run, result_width()))
    if doubt:
        print_result(f"\n  {doubt}")


def _compare(
    before: str, after: str, vars: tuple[str, ...], rows_per_month: float | None, effort_usd: float, as_json: bool
) -> None:
    from pipeline.job.output.read_output import open_output, report_of
    from pipeline.report.comparison import compare_reports

    first, second = (report_of(open_output(target, vars)) for target in (before, after))
    print_tables(compare_reports((before, after), first, second, rows_per_month, effort_usd), as_json)


def _hosted(run: "RunReport", prices: str, as_json: bool) -> None:
    from pipeline.report.comparison import Hosted

    try:
        prompt_usd, generated_usd = (float(each) for each in prices.split(","))
    except ValueError:
        prompt_usd = generated_usd = -1.0
    if not (0 <= prompt_usd < 1e6 and 0 <= generated_usd < 1e6):
        raise ConfigError(f"--hosted {prices}: expected two prices in US dollars, such as 0.15,0.60")
    print_tables(Hosted.from_report(run, prompt_usd, generated_usd), as_json)


def _write_page(run: "RunReport", page: str) -> None:
    from pipeline.report.render import html

    try:
        Path(page).write_text(html(run), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--html {page}: {error.strerror or error}") from None
    print_message(f"Wrote {page}")
