"""The command line: parse, call, print, exit code. Everything else is imported by the command that needs it.

Standard output holds results, standard error everything on the way. With `--json` standard output is one JSON
object and nothing else, also for errors. Exit codes are those of `errors.py`.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click

from pipeline import __version__
from pipeline.errors import (
    ConfigError,
    EnvironmentFailed,
    Interrupted,
    PipelineError,
    TooManyRowErrors,
)

EPILOG = """\b
Start here:
  pipeline validate jobs/summarize.yaml      what the job is; nothing is run
  pipeline run jobs/summarize.yaml           run it, or go on where it stopped
  pipeline report out/summarize              what it cost

\b
Exit codes:
  0   finished; error rows within run.max_error_rate
  1   stopped by run.max_error_rate; can be resumed
  2   the job file, the input or the output has to be changed
  3   the environment failed (disk, store, actors); can be resumed
  70  a defect of this program
  75  interrupted; the same command goes on
"""


def _overlays(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that change a job file on the way in."""
    for option in reversed(
        [
            click.option("sets", "--set", metavar="KEY=VALUE", multiple=True,
                         help="Change one key of the job file: sampling.max_tokens=32. May be repeated."),
            click.option("overlays", "--config", metavar="FILE", multiple=True,
                         help="Lay a file of the same form over the job file: configs/h100.yaml."),
            click.option("--limit", type=click.IntRange(min=1), metavar="N",
                         help="Only the first N rows. Another N is another job, with an output of its own."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


_json_flag = click.option("as_json", "--json", is_flag=True, help="Print one JSON object, and nothing else.")


def _answers(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a command's errors into a message and an exit code, and with --json into the answer."""

    @wraps(command)
    def answer(*args: Any, as_json: bool, **options: Any) -> None:
        try:
            command(*args, as_json=as_json, **options)
        except PipelineError as error:
            if as_json:
                _print_json({"error": _error_json(error)})
            _print_error(error)
            sys.exit(error.exit_code)

    return answer


@click.group(
    epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="pipeline")
def cli() -> None:
    """Prompts in Parquet to completions in Parquet, and what they cost.

    A job is one YAML file. A run that was stopped goes on when the same command is given again: every input
    row is in the output exactly once, as a completion or as an error row.
    """


@cli.command()
@click.argument("job", metavar="JOB.yaml")
@_overlays
@click.option("--accept-numerics", is_flag=True,
              help="Go on although dtype or device differ from the output's first run.")  # fmt: skip
@_json_flag
@_answers
def run(
    job: str,
    sets: tuple[str, ...],
    overlays: tuple[str, ...],
    limit: int | None,
    accept_numerics: bool,
    as_json: bool,
) -> None:
    """Run a job, or go on with it where it stopped.

    \b
    Examples:
      pipeline run jobs/summarize.yaml
      pipeline run jobs/summarize.yaml --limit 20 --set output.path=out/try
      pipeline run my.yaml --config configs/h100.yaml --set run.actors=8
      pipeline run my.yaml --json > report.json

    Parts appear in output.path as they are finished, _SUCCESS when all are there, and the report in
    output.path/_pipeline/report.md. Ctrl-C once lets finished work be written; then the same command goes on.
    """
    from pipeline.config import load_job

    config = load_job(job, sets, overlays, limit)
    from pipeline.job.run import run_job
    from pipeline.progress import progress_for

    with _results_only_on_stdout(), progress_for() as progress:
        report = run_job(config, accept_numerics=accept_numerics, progress=progress)
    if as_json:
        _print_json(report.to_json())
        return
    click.echo(report.to_text())
    click.echo(f"\n  Results     {config.output.path}")
    click.echo(f"  Report      {Path(config.output.path) / '_pipeline' / 'report.md'}")


@cli.command()
@click.argument("job", metavar="JOB.yaml")
@_overlays
@_json_flag
@_answers
def validate(
    job: str, sets: tuple[str, ...], overlays: tuple[str, ...], limit: int | None, as_json: bool
) -> None:
    """Say what a job is, with its first prompt, or everything that is wrong with it.

    \b
    Examples:
      pipeline validate jobs/summarize.yaml
      pipeline validate my.yaml --config configs/l4.yaml --set input.path=other.parquet

    Looks at the job file, the input's footers and the output folder. Loads no model and writes nothing.
    """
    from pipeline.config import JobFileError, load_job
    from pipeline.examine import describe, examine

    config = load_job(job, sets, overlays, limit)
    found = examine(config)
    if found.mistakes:
        raise JobFileError(found.mistakes)
    if as_json:
        _print_json(found.to_json())
    else:
        click.echo(describe(found, config))


@cli.command()
@click.argument("place", metavar="OUTPUT|JOB.yaml")
@_json_flag
@_answers
def status(place: str, as_json: bool) -> None:
    """Say how far a job is, from its output folder.

    \b
    Examples:
      pipeline status out/summarize
      pipeline status jobs/summarize.yaml
    """
    from pipeline.output import doubt_of, open_output, status_of
    from pipeline.progress import status_line

    store = open_output(place)
    now = status_of(store)
    doubt = doubt_of(store, now)
    if as_json:
        _print_json({**now.to_json(), "output": store.path, "stale": doubt})
        return
    click.echo(f"{place}: {'stale' if doubt else now.outcome}")
    click.echo(f"  {status_line(now)}")
    click.echo(f"  run {now.run_id}, {now.units:,} units written, {now.actors} actors")
    if doubt:
        click.echo(f"  {doubt}")


@cli.command()
@click.argument("place", metavar="OUTPUT|JOB.yaml")
@_json_flag
@_answers
def report(place: str, as_json: bool) -> None:
    """Print what a job did and cost, over all its runs, killed ones included.

    \b
    Examples:
      pipeline report out/summarize
      pipeline report jobs/summarize.yaml --json
    """
    from pipeline.output import open_output, report_of

    told = report_of(open_output(place))
    if as_json:
        _print_json(told.to_json())
    else:
        click.echo(told.to_text())


def main() -> None:
    """The console script: no traceback for what a person can change, and always a meaningful exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a narrow locale must not end a run
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ConfigError.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        sys.exit(Interrupted.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
        sys.exit(1)
    except Exception:
        import traceback

        traceback.print_exc()
        click.echo("\nThis is a defect of this program, please report it with the lines above.", err=True)
        sys.exit(PipelineError.exit_code)


@contextmanager
def _results_only_on_stdout() -> Iterator[None]:
    """While a job runs, whatever libraries and child processes print goes to standard error."""
    sys.stdout.flush()
    try:
        kept = os.dup(sys.stdout.fileno())
    except OSError:  # not a real file: a test's
        yield
        return
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, sys.stdout.fileno())
        os.close(kept)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _error_json(error: PipelineError) -> dict[str, Any]:
    mistakes = [vars(mistake) for mistake in getattr(error, "mistakes", ())]
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "exit_code": error.exit_code,
        "mistakes": mistakes,
    }


def _print_error(error: PipelineError) -> None:
    count = len(getattr(error, "mistakes", ()))
    click.echo(f"{count} mistakes:\n\n{error}" if count > 1 else f"Error: {error}", err=True)
    if isinstance(error, TooManyRowErrors | EnvironmentFailed | Interrupted):
        click.echo("Nothing that was written is lost: the same command goes on from there.", err=True)


if __name__ == "__main__":
    main()
