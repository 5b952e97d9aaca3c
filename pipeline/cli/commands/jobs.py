"""The commands about a job and its output: run, validate, status, compact, verify."""

import re
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import click

from pipeline.cli.console import (
    answers,
    json_flag,
    logging_options,
    print_answer,
    print_json,
    print_result,
    result_width,
    results_stream,
    say,
    stdout_is_claimed,
)
from pipeline.cli.options import Renamed, job_overlays, var_option
from pipeline.errors import ConfigError, EnvironmentFailed, LimitReached, OutputError
from pipeline.formatting import counted

if TYPE_CHECKING:
    from pipeline.config import JobConfig
    from pipeline.job.telemetry.logs import Level
    from pipeline.job.telemetry.status import Status
    from pipeline.report.run_report import RunReport


def _host_and_port(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and re.fullmatch(r"[A-Za-z0-9.\-\[\]:]+:[0-9]{1,5}", value) is None:
        raise click.BadParameter(f"{value!r}: expected HOST:PORT, such as 0.0.0.0:9400", ctx, param)
    return value


@click.command()
@click.argument("job", metavar="JOB.yaml", type=click.Path())
@job_overlays
@click.option("--accept-numerics", is_flag=True,
              help="Go on although dtype or device differ from the output's first run.")  # fmt: skip
@click.option("--retry-failed", is_flag=True,
              help="Compute the error rows of what is written again, under another engine.max_model_len where --set "
              "gives one; each part is replaced whole.")  # fmt: skip
@click.option("--append", is_flag=True,
              help="Take in input files that are new since the first run: they alone are computed.")  # fmt: skip
@click.option("--logical-date", metavar="TIME",
              help="Take this time for now in variables of {today: ZONE}: @ and seconds since 1970, or a time with its "
              "zone. For schedulers.")  # fmt: skip
@click.option("--limit-exit-code", type=click.IntRange(0, 255), metavar="CODE", default=75, show_default=True,
              help="Exit with this code where cost.budget_usd or run.max_runtime ends the run; 0 for schedulers that "
              "would start a failed one again.")  # fmt: skip
@click.option("--target-exit-code", type=click.IntRange(0, 255), metavar="CODE", default=0, show_default=True,
              help="Exit with this code where the finished run missed one of targets.")  # fmt: skip
@click.option("--metrics", metavar="HOST:PORT", callback=_host_and_port,
              help="Serve /metrics for Prometheus, and /healthz, while the run lasts.")  # fmt: skip
@click.option("--sample", type=click.IntRange(min=1), metavar="N",
              help="Compute N rows of all lengths and show them; the full run takes them over.")  # fmt: skip
@logging_options
@json_flag
@answers
def run(
    job: str,
    accept_numerics: bool,
    retry_failed: bool,
    append: bool,
    logical_date: str | None,
    limit_exit_code: int,
    target_exit_code: int,
    metrics: str | None,
    sample: int | None,
    verbose: bool,
    log_level: "Level",
    as_json: bool,
    **overlays: Any,
) -> None:
    """Run a job, or go on with it where it stopped.

    \b
    Examples:
      pipeline run my.yaml
      pipeline run my.yaml --limit 20 --set output.path=out/try
      pipeline run my.yaml --preset h100 --set run.actors=8
      pipeline run my.yaml --json > report.json
      pipeline run my.yaml --sample 20           look at 20 rows first
      pipeline run my.yaml --append              files were added to the input since
      pipeline run my.yaml --retry-failed        only the rows that became errors, once more
      pipeline run my.yaml --retry-failed --set engine.max_model_len=8192

    Parts appear in output.path as they are finished, _SUCCESS when all are there, and the report in
    output.path/_pipeline/report.md. Ctrl-C once lets finished work be written; then the same command goes on.
    Logs of the driver and of each engine are kept in output.path/_pipeline/logs; `pipeline logs` shows them.
    """
    from pipeline.config import load_job
    from pipeline.config.variables import moment_of

    run_and_report(
        load_job(job, **overlays, now=moment_of(logical_date)),
        as_json=as_json,
        verbose=verbose,
        log_level=log_level,
        limit_exit_code=limit_exit_code,
        target_exit_code=target_exit_code,
        accept_numerics=accept_numerics,
        retry_failed=retry_failed,
        append=append,
        sample=sample,
        metrics=metrics,
    )


def run_and_report(
    config: "JobConfig",
    *,
    as_json: bool,
    verbose: bool,
    log_level: "Level",
    limit_exit_code: int = LimitReached.exit_code,
    target_exit_code: int = 0,
    **options: Any,
) -> None:
    """Run a job and print its report; in a fork, but where a fork's results would be lost. options: of `run_job`."""
    from pipeline.cli.guard import guarded
    from pipeline.cli.progress import progress_for
    from pipeline.stores.redaction import shown_url

    with guarded() if stdout_is_claimed() else nullcontext():
        from pipeline.job.running.run import run_job
        from pipeline.job.telemetry.logs import LogOptions
        from pipeline.report.render import text

        with progress_for(with_log=verbose) as progress:
            logs = LogOptions(log_level, progress.line if verbose else None)
            try:
                report = run_job(config, progress=progress, logs=logs, **options)
            except LimitReached as error:
                error.exit_code = limit_exit_code
                raise
        output = shown_url(config.output.path).rstrip("/")
        if report.outcome == "sampled":
            from pipeline.cli.sample import print_sample

            return print_sample(config, report, output, as_json)
        if as_json:
            print_json(report.to_json())
            return _leave_if_missed(report, target_exit_code)
        print_result(
            f"{text(report, result_width())}\n\n  Results     {output}\n  Report      {output}/_pipeline/report.md"
        )
        _leave_if_missed(report, target_exit_code)


def _leave_if_missed(report: "RunReport", exit_code: int) -> None:
    if report.missed and exit_code:
        say(f"Targets missed: {', '.join(target.key for target in report.missed)}")
        sys.exit(exit_code)


@click.command()
@click.argument("job", metavar="JOB.yaml", type=click.Path())
@job_overlays
@json_flag
@answers
def validate(job: str, as_json: bool, **overlays: Any) -> None:
    """Say what a job is, with its first prompt as the model gets it, or everything that is wrong with it.

    \b
    Examples:
      pipeline validate my.yaml
      pipeline validate my.yaml --preset h100 --set input.path=other.parquet

    Looks at the job file, the input's footers and a few rows, the model's tokenizer and the output folder. Reads no
    weights and writes nothing.
    """
    from pipeline.config import JobFileError, load_job
    from pipeline.job.preview.describe import describe
    from pipeline.job.preview.examine import examine

    found = examine(load_job(job, **overlays))
    if found.mistakes:
        raise JobFileError(found.mistakes)
    if found.failures:
        raise EnvironmentFailed("\n".join(found.failures))
    if as_json:
        print_json(found.to_json())
    else:
        print_result(describe(found))


@click.command()
@click.argument("place", metavar="OUTPUT|JOB.yaml", type=click.Path())
@var_option
@click.option("-w", "--watch", is_flag=True, help="Go on until the run ends; with --json an object at each change.")
@json_flag
@answers
def status(place: str, vars: tuple[str, ...], watch: bool, as_json: bool) -> None:
    """Say how far a job is, from its output folder.

    \b
    Examples:
      pipeline status out/summarize
      pipeline status my.yaml --watch
      pipeline status s3://bucket/labels --watch --json

    --watch draws rows, tokens and each engine actor on a terminal and prints lines elsewhere. It leaves with the run's
    exit code.
    """
    from pipeline.job.output.following import Following
    from pipeline.job.output.read_output import open_output
    from pipeline.job.telemetry.status import status_line

    seen = Following(store := open_output(place, vars))
    now, doubt = seen.status, seen.doubt

    def as_object(status: "Status", doubt: str | None) -> None:
        print_json({**status.to_json(), "output": store.path, "stale": doubt})

    if watch:
        from pipeline.cli.watch import watch_json, watch_lines, watch_live

        stream = results_stream()
        if as_json:
            watch_json(seen, as_object)
        elif stream.isatty():
            watch_live(seen, place, stream)
        else:
            watch_lines(seen, stream)
            if seen.doubt:
                say(seen.doubt)
        sys.exit(seen.exit_code)
    if as_json:
        return as_object(now, doubt)
    believed = now.outcome if doubt is None else "stale" if now.outcome == "running" else "damaged"
    print_result(f"{place}: {believed}")
    print_result(f"  {status_line(now)}")
    print_result(f"  run {now.run_id}, {counted(now.units, 'unit')} written, {counted(now.actors, 'actor')}")
    if doubt:
        print_result(f"  {doubt}")


@click.command()
@click.argument("place", metavar="OUTPUT|JOB.yaml", type=click.Path())
@var_option
@click.option("--output", cls=Renamed, old="--to", required=True, type=click.Path(), metavar="PATH",
              help="A new folder, or an fsspec url.")  # fmt: skip
@click.option("--order", type=click.Choice(["parts", "input"]), default="parts", show_default=True,
              help="input: rows in the order of (source_file, source_row).")  # fmt: skip
@click.option("--target-size", default="256MB", show_default=True, metavar="SIZE", help="About how large a file is.")
@json_flag
@answers
def compact(
    place: str, vars: tuple[str, ...], output: str, order: Literal["parts", "input"], target_size: str, as_json: bool
) -> None:
    """Merge the parts of a finished job into a few large files in a new folder.

    \b
    Examples:
      pipeline compact out/summarize --output out/summaries
      pipeline compact my.yaml --output s3://bucket/labels --order input --target-size 1GB

    The job's output is read and left as it is; nothing is replaced anywhere. Rows are counted against the job's
    _SUCCESS, and the new folder gets its own when all are there. After an interruption the same command goes on.
    An s3:// folder takes its options from the job file, or from the environment.
    """
    from pipeline.config import parse_bytes
    from pipeline.data.output.compact import MAX_FILE_BYTES
    from pipeline.data.output.compact import compact as merge
    from pipeline.data.output.parts import PartStore
    from pipeline.job.output.read_output import open_output, output_of
    from pipeline.stores.filesystem import storage_for

    size = parse_bytes(target_size)
    if size is None or not 0 < size <= MAX_FILE_BYTES:
        raise ConfigError(f"--target-size {target_size}: expected a size of at most 4 GiB, such as 256MB")
    storage = storage_for(output, output_of(place, vars)[1])
    done = merge(open_output(place, vars), PartStore(output, storage, what="--output"), order, size, say)
    print_answer(done, as_json)


@click.command()
@click.argument("place", metavar="OUTPUT|JOB.yaml", type=click.Path())
@var_option
@click.option("--deep", is_flag=True, help="Read every page of every part, and see that each row is there once.")
@json_flag
@answers
def verify(place: str, vars: tuple[str, ...], deep: bool, as_json: bool) -> None:
    """Say whether the output of a finished job is sound, and name all that is damaged.

    \b
    Examples:
      pipeline verify out/summarize
      pipeline verify my.yaml --deep

    Compares names and sizes of the parts with what _SUCCESS counts, and reads every footer. --deep reads the parts
    whole, with the checksum of each page, and sees that their rows follow each other without a gap and without one
    twice.

    Changes nothing. Leaves with 0 when the output is finished and sound, with 2 when something is missing or damaged.
    An s3:// output takes its options from the job file, or from the environment.
    """
    from pipeline.job.output.audit import audit
    from pipeline.job.output.read_output import open_output

    found = audit(open_output(place, vars), deep, say)
    print_answer(found, as_json)
    if not found.sound:
        sys.exit(OutputError.exit_code)
