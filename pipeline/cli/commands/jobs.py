"""Commands for a job and its output: run, validate, status, compact, verify."""

import re
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import click

from pipeline.cli.console import (
    handle_errors,
    json_flag,
    logging_options,
    print_answer,
    print_json,
    print_message,
    print_result,
    result_width,
    results_stream,
    stdout_is_claimed,
)
from pipeline.cli.data_flags import NAMES, data_flags, job_of
from pipeline.cli.options import Grouped, job_overlays, var_option
from pipeline.errors import ConfigError, EnvironmentFailed, LimitReached, OutputError
from pipeline.formatting import counted

if TYPE_CHECKING:
    from pipeline.config import JobConfig
    from pipeline.job.actor.rows_again import Kind
    from pipeline.job.telemetry.logs import Level
    from pipeline.job.telemetry.status import Status


def _host_and_port(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and re.fullmatch(r"[A-Za-z0-9.\-\[\]:]+:[0-9]{1,5}", value) is None:
        raise click.BadParameter(f"{value!r}: expected HOST:PORT, such as 0.0.0.0:9400", ctx, param)
    return value


def _kinds(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(kind.strip() for kind in value.split(","))) if value is not None else ()
    for kind in kinds:
        if kind not in ("truncated", "invalid"):
            raise click.BadParameter(f"{kind!r}: expected truncated, invalid, or both: truncated,invalid", ctx, param)
    return kinds


_RUN_GROUPS = {
    "Job of a file": ("sets", "presets", "overlays", "vars", "limit", "logical_date"),
    "Job without a file": (*NAMES, "save"),
    "Resuming": ("accept_numerics", "retry_failed", "redo", "append"),
}


@click.command(cls=Grouped, groups=_RUN_GROUPS)
@click.argument("target", metavar="JOB.yaml|DATA", type=click.Path())
@data_flags
@click.option("--save", type=click.Path(), metavar="JOB.yaml", help="Write the job as a job file, too.")
@job_overlays
@click.option("--accept-numerics", is_flag=True,
              help="Resume even if dtype or device differ from the first run of this output.")  # fmt: skip
@click.option("--retry-failed", is_flag=True,
              help="Compute error rows again, with another engine.max_model_len if --set gives one. Each part that "
              "has such rows is replaced as a whole.")  # fmt: skip
@click.option("--redo", metavar="KINDS", callback=_kinds,
              help="Compute completions again that were cut (truncated) or whose JSON is not valid (invalid), with "
              "another sampling.max_tokens or engine.max_model_len by --set. Other rows stay as they are.")  # fmt: skip
@click.option("--append", is_flag=True,
              help="Accept input files added since the first run; only their rows are computed.")  # fmt: skip
@click.option("--logical-date", metavar="TIME",
              help="Use this time instead of now for variables of {today: ZONE}: @ and seconds since 1970, or a time "
              "with its zone. For schedulers.")  # fmt: skip
@click.option("--limit-exit-code", type=click.IntRange(0, 255), metavar="CODE", default=75, show_default=True,
              help="Exit with this code if cost.budget_usd or run.max_runtime ends the run; 0 for schedulers that "
              "would restart a failed job.")  # fmt: skip
@click.option("--metrics", metavar="HOST:PORT", callback=_host_and_port,
              help="Serve Prometheus /metrics during the run.")  # fmt: skip
@click.option("--sample", type=click.IntRange(min=1), metavar="N",
              help="Compute N rows of all lengths and show them; the full run reuses them.")  # fmt: skip
@logging_options
@json_flag
@handle_errors
def run(
    target: str,
    flags: dict[str, Any],
    save: str | None,
    accept_numerics: bool,
    retry_failed: bool,
    redo: "tuple[Kind, ...]",
    append: bool,
    logical_date: str | None,
    limit_exit_code: int,
    metrics: str | None,
    sample: int | None,
    verbose: bool,
    log_level: "Level",
    as_json: bool,
    **overlays: Any,
) -> None:
    """Run a job, or resume it where it stopped.

    \b
    Examples:
      pipeline run reviews.csv --prompt "Sentiment of: {text}" --labels good,bad --model Qwen/Qwen3-4B
      pipeline run data/ --prompt "Summarize: {text}" --model Qwen/Qwen3-4B --save my.yaml
      pipeline run my.yaml
      pipeline run my.yaml --limit 20 --set output.path=out/try
      pipeline run my.yaml --preset h100 --set run.actors=8
      pipeline run my.yaml --json > report.json
      pipeline run my.yaml --sample 20           look at 20 rows first
      pipeline run my.yaml --append              files were added to the input
      pipeline run my.yaml --retry-failed        compute error rows again
      pipeline run my.yaml --retry-failed --set engine.max_model_len=8192
      pipeline run my.yaml --redo truncated,invalid --set sampling.max_tokens=2048

    Writes parts to output.path as they finish, _SUCCESS when all are written, and the report to
    output.path/_pipeline/report.md. After one Ctrl-C the run writes what is finished and exits; the same command
    resumes it. `pipeline logs` shows the logs of the driver and of each engine.

    A job without a file is the same job: each flag is a key of a job file, --set sets any other one, and --save writes
    the file. DATA is what input.path takes: a file, a folder, a glob or a url.
    """
    from pipeline.config.variables import moment_of

    def load() -> "JobConfig":
        job = job_of(target, flags, **overlays, now=moment_of(logical_date))
        if save is not None:
            from pipeline.starter import save_job

            save_job(save, job)
        return job

    run_and_report(
        load,
        as_json=as_json,
        verbose=verbose,
        log_level=log_level,
        limit_exit_code=limit_exit_code,
        accept_numerics=accept_numerics,
        retry_failed=retry_failed,
        redo=redo,
        append=append,
        sample=sample,
        metrics=metrics,
    )


def run_and_report(
    load: Callable[[], "JobConfig"],
    *,
    as_json: bool,
    verbose: bool,
    log_level: "Level",
    limit_exit_code: int = LimitReached.exit_code,
    **options: Any,
) -> None:
    """Run a job in a fork and print its report; without a fork if its output would be lost.

    load: returns the job; called in the fork, since it may start threads. options: of `run_job`.
    """
    from pipeline.cli.guard import guarded
    from pipeline.cli.progress import progress_for
    from pipeline.stores.redaction import shown_url

    with guarded() if stdout_is_claimed() else nullcontext():
        from pipeline.job.running.run import run_job
        from pipeline.job.telemetry.logs import LogOptions
        from pipeline.report.render import text

        config = load()
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
            return print_json(report.to_json())
        if report.was_complete:
            rows, errors = counted(report.rows.written, "row"), counted(report.rows.errors, "error row")
            show = f"pipeline report {shlex.quote(output)}"
            return print_result(f"Finished already: {rows}, {errors} in {output}. `{show}` shows the report.")
        print_result(
            f"{text(report, result_width())}\n\n  Results     {output}\n  Report      {output}/_pipeline/report.md"
        )


@click.command()
@click.argument("job", metavar="JOB.yaml", type=click.Path())
@job_overlays
@json_flag
@handle_errors
def validate(job: str, as_json: bool, **overlays: Any) -> None:
    """Check a job and list every mistake, or show its settings and first prompt.

    \b
    Examples:
      pipeline validate my.yaml
      pipeline validate my.yaml --preset h100 --set input.path=other.parquet

    Reads the job file, the input's footers and a few rows, the model's tokenizer and the output folder. Reads no
    weights and writes nothing.
    """
    from pipeline.config import JobFileError, load_job
    from pipeline.job.preview.describe import describe
    from pipeline.job.preview.validation import validate_job

    found = validate_job(load_job(job, **overlays))
    if found.mistakes:
        raise JobFileError(found.mistakes)
    if found.failures:
        raise EnvironmentFailed("\n".join(found.failures))
    if as_json:
        print_json(found.to_json())
    else:
        print_result(describe(found))


@click.command()
@click.argument("target", metavar="OUTPUT|JOB.yaml", type=click.Path())
@var_option
@click.option(
    "-w",
    "--watch",
    is_flag=True,
    help="Keep showing progress until the run ends; with --json print an object at each change.",
)
@json_flag
@handle_errors
def status(target: str, vars: tuple[str, ...], watch: bool, as_json: bool) -> None:
    """Show a job's progress, from its output folder.

    \b
    Examples:
      pipeline status out/summarize
      pipeline status my.yaml --watch
      pipeline status s3://bucket/labels --watch --json

    On a terminal --watch draws a live table of rows, tokens and engines; elsewhere it prints lines. It exits with the
    run's exit code.
    """
    from pipeline.job.output.read_output import open_output
    from pipeline.job.output.run_follower import RunFollower
    from pipeline.job.telemetry.status import status_line

    seen = RunFollower(store := open_output(target, vars))
    now, doubt = seen.status, seen.staleness

    def as_object(status: "Status", doubt: str | None) -> None:
        print_json({**status.to_json(), "output": store.path, "stale": doubt})

    if watch:
        from pipeline.cli.watch import watch_json, watch_lines, watch_live

        stream = results_stream()
        if as_json:
            watch_json(seen, as_object)
        elif stream.isatty():
            watch_live(seen, target, stream)
        else:
            watch_lines(seen, stream)
            if seen.staleness:
                print_message(seen.staleness)
        sys.exit(seen.exit_code)
    if as_json:
        return as_object(now, doubt)
    shown = now.outcome if doubt is None else "stale" if now.outcome == "running" else "damaged"
    print_result(f"{target}: {shown}")
    print_result(f"  {status_line(now)}")
    print_result(f"  run {now.run_id}, {counted(now.units, 'unit')} written, {counted(now.actors, 'actor')}")
    if doubt:
        print_result(f"  {doubt}")


@click.command()
@click.argument("target", metavar="OUTPUT|JOB.yaml", type=click.Path())
@var_option
@click.option("--output", required=True, type=click.Path(), metavar="PATH",
              help="New folder, or an fsspec url.")  # fmt: skip
@click.option("--order", type=click.Choice(["parts", "input"]), default="parts", show_default=True,
              help="input: sort rows by (source_file, source_row).")  # fmt: skip
@click.option("--by", type=click.Choice(["source_file"]),
              help="Write one row for each input file, with the texts of its rows joined in order.")  # fmt: skip
@click.option(
    "--target-size", default="256MB", show_default=True, metavar="SIZE", help="Approximate size of each file."
)
@json_flag
@handle_errors
def compact(
    target: str,
    vars: tuple[str, ...],
    output: str,
    order: Literal["parts", "input"],
    by: Literal["source_file"] | None,
    target_size: str,
    as_json: bool,
) -> None:
    """Merge the parts of a finished job into a few large files in a new folder.

    \b
    Examples:
      pipeline compact out/summarize --output out/summaries
      pipeline compact my.yaml --output s3://bucket/labels --order input --target-size 1GB
      pipeline compact out/ocr --output out/documents --by source_file

    The job's output stays unchanged, and no file is replaced. Rows are counted against the job's _SUCCESS; the new
    folder gets its own when all rows are written. After an interruption the same command resumes. Options of an
    s3:// folder come from the job file or from the environment.
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
    storage = storage_for(output, output_of(target, vars)[1])
    done = merge(
        open_output(target, vars), PartStore(output, storage, option="--output"), by or order, size, print_message
    )
    print_answer(done, as_json)


@click.command()
@click.argument("target", metavar="OUTPUT|JOB.yaml", type=click.Path())
@var_option
@click.option("--deep", is_flag=True, help="Read every page of every part, and check that each row occurs once.")
@json_flag
@handle_errors
def verify(target: str, vars: tuple[str, ...], deep: bool, as_json: bool) -> None:
    """Check the output of a finished job, and list everything that is damaged.

    \b
    Examples:
      pipeline verify out/summarize
      pipeline verify my.yaml --deep

    Compares names and sizes of the parts with the counts in _SUCCESS and reads every footer. --deep also verifies the
    checksum of every page, and that rows have no gaps and no duplicates.

    Changes nothing. Exits with 0 if the output is finished and sound, with 2 if something is missing or damaged.
    Options of an s3:// output come from the job file or from the environment.
    """
    from pipeline.job.output.audit import audit
    from pipeline.job.output.read_output import open_output

    found = audit(open_output(target, vars), deep, print_message)
    print_answer(found, as_json)
    if not found.sound:
        sys.exit(OutputError.exit_code)
