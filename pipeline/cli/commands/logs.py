"""Command that shows a job's logs: logs."""

import sys

import click

from pipeline.cli.console import handle_errors, print_json, print_lines, print_message
from pipeline.cli.options import var_option
from pipeline.errors import ConfigError
from pipeline.formatting import printable_lines


@click.command()
@click.argument("target", metavar="OUTPUT|JOB.yaml", type=click.Path())
@var_option
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until the run ends.")
@click.option("--actor", "actors", multiple=True, metavar="N",
              help="Show only this engine's log, or the driver's: 0, driver. May be repeated.")  # fmt: skip
@click.option("--run", "run_id", metavar="N", help="Show an earlier run, by its number or name; default: the last.")
@click.option("-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Start with the last N lines.")
@click.option("as_json", "--json", is_flag=True, help="Print one JSON object a line.")
@handle_errors
def logs(
    target: str,
    vars: tuple[str, ...],
    follow: bool,
    actors: tuple[str, ...],
    run_id: str | None,
    tail: int | None,
    as_json: bool,
) -> None:
    """Show the log lines of a run's driver and engines, ordered by time.

    \b
    Examples:
      pipeline logs out/summarize
      pipeline logs my.yaml --follow
      pipeline logs s3://bucket/labels --actor 0 --actor driver --tail 100
      pipeline logs out/summarize --run 3 --json

    Engine logs include the output of the engine's process. --follow ends with the run and exits with its exit code.
    """
    from pipeline.job.output.read_output import open_output
    from pipeline.job.output.run_follower import RunFollower
    from pipeline.job.telemetry.log_reader import LogReader, logged_run

    folder = (store := open_output(target, vars)).folder
    run_id = logged_run(folder, run_id)
    reader = LogReader(folder, run_id, [_name_of(actor) for actor in actors])
    following = RunFollower(store, run_id) if follow else None
    lines = reader.new_lines()
    while True:
        for line in lines[-tail:] if tail else lines if tail is None else ():
            if as_json:
                print_json({"run_id": run_id, **line.to_json()})
            else:
                print_lines(printable_lines(line.text if len(actors) == 1 else f"{line.log:<10} {line.text}"))
        tail = None
        if following is None:
            return
        if following.is_over:
            break
        following.wait()
        lines = reader.new_lines()
    if following.staleness:
        print_message(following.staleness)
    sys.exit(following.exit_code)


def _name_of(actor: str) -> str:
    """Return the name of the log for `--actor`. Raises ConfigError."""
    if not actor.isdigit() and actor not in ("driver", "ray"):
        raise ConfigError(f"--actor {actor}: expected an engine's number, such as 0, or driver")
    return f"engine-{actor}" if actor.isdigit() else actor
