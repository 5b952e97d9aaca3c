"""Commands that run a job on a Ray cluster and stop it: submit, cancel."""

import sys
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.console import handle_errors, json_flag, print_json, print_message, print_result
from pipeline.cli.options import job_overlays
from pipeline.errors import ConfigError, EnvironmentFailed
from pipeline.formatting import duration, printable_lines

if TYPE_CHECKING:
    from pipeline.cluster.submission import JobDetails

_NOT_FOUND = 127  # a shell's exit code for a command that does not exist

address_option = click.option(
    "--address", metavar="URL",
    help="The head's job server, http://HEAD:8265. Default: RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else this machine's "
    "Ray.",
)  # fmt: skip


@click.command()
@click.argument("job", metavar="JOB.yaml", type=click.Path())
@job_overlays
@address_option
@click.option("--detach", is_flag=True, help="Exit once the job is sent.")
@click.option("--if-running", type=click.Choice(["join", "leave"]), default="join", show_default=True,
              help="What to do when this job runs already: follow it, or exit with 0.")  # fmt: skip
@click.option("--append", is_flag=True, help="Same as in `pipeline run`.")
@click.option("--retry-failed", is_flag=True, help="Same as in `pipeline run`.")
@click.option("--accept-numerics", is_flag=True, help="Same as in `pipeline run`.")
@json_flag
@handle_errors
def submit(
    job: str,
    address: str | None,
    detach: bool,
    if_running: str,
    append: bool,
    retry_failed: bool,
    accept_numerics: bool,
    as_json: bool,
    **overlays: Any,
) -> None:
    """Run a job on a Ray cluster, driven from there, and follow it.

    \b
    Examples:
      pipeline submit my.yaml --address http://head:8265
      pipeline submit nightly.yaml --var date=2026-11-20 --detach
      pipeline submit nightly.yaml --if-running leave     from cron: no second run next to a long one
      RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=token pipeline submit my.yaml

    The job file is checked and filled in here and sent; data and models are not. Local paths must exist under the same
    name on every machine of the cluster.

    A second call for the same output joins the run. After its end a call resumes where it stopped, as `pipeline run`
    does. Ctrl-C leaves the job running; `pipeline cancel` stops it, `ray job list` shows all jobs of the cluster. Exits
    with the driver's exit code.
    """
    from pipeline.cluster.shipped_job import ShippedJob
    from pipeline.cluster.submission import JobServer, exit_code
    from pipeline.config import load_job

    shipped = ShippedJob.from_config(load_job(job, **overlays))
    flags = {"--append": append, "--retry-failed": retry_failed, "--accept-numerics": accept_numerics}
    server = JobServer(address)
    found, is_new = server.submit(shipped, [flag for flag, given in flags.items() if given], print_message)
    name = str(found.submission_id)
    print_message(f"{name} was sent to {server.url}" if is_new else f"{name} is running at {server.url}")
    if shipped.is_local:
        print_message(f"Its output is {shipped.output}, a path that every machine of the cluster must have.")
    if detach or (not is_new and if_running == "leave"):
        return _print(found, as_json)
    try:
        ended = server.follow(name, lambda text: click.echo(printable_lines(text), err=True, nl=False), print_message)
    except KeyboardInterrupt:
        print_message(f"\n{name} continues. The same command follows it again; stop it with: pipeline cancel {name}")
        raise
    _print(ended, as_json)
    code = exit_code(ended)
    if code == _NOT_FOUND:
        print_message(
            "Error: the cluster has no `pipeline` command. Install parquet-batch-inference there, in the environment "
            "in which `ray start` runs, or use an image that has it"
        )
    elif code == EnvironmentFailed.exit_code:
        print_message(
            f"Error: {(ended.message or '').strip() or f'it ended as {ended.status.value} without a message'}"
        )
    sys.exit(code)


@click.command()
@click.argument("target", metavar="JOB.yaml|SUBMISSION", type=click.Path())
@job_overlays
@address_option
@json_flag
@handle_errors
def cancel(target: str, address: str | None, as_json: bool, **overlays: Any) -> None:
    """Stop a job that was submitted to a cluster. Rows that run finish within run.drain_timeout, and all finished rows
    are kept.

    \b
    Examples:
      pipeline cancel my.yaml
      pipeline cancel summarize-3f2a9c1b04-1 --address http://head:8265

    A job file takes the options that it was submitted with, since they decide its output. The next `pipeline submit`
    resumes the job. Exits with 0 when the job has ended.
    """
    from pipeline.cluster.shipped_job import ShippedJob
    from pipeline.cluster.submission import JobServer
    from pipeline.config import load_job

    is_file = target.endswith((".yaml", ".yml"))
    name = ShippedJob.from_config(load_job(target, **overlays)).name if is_file else target
    if not is_file and any(overlays.values()):
        raise ConfigError(f"{target}: is a submission; --set, --config, --var and --limit are for a job file")
    server = JobServer(address)
    found = server.running(name) if is_file else server.find(name)
    if found is None:
        raise ConfigError(f"{target}: no run of this job at {server.url}. `ray job list` shows all jobs of the cluster")
    if not found.status.is_terminal():
        print_message(f"{found.submission_id} is draining.")
        found = server.stop(str(found.submission_id))
    _print(found, as_json)


def _print(details: "JobDetails", as_json: bool) -> None:
    from pipeline.cluster.submission import to_json

    found = to_json(details)
    if as_json:
        return print_json(found)
    ended = details.status.is_terminal()
    elapsed = f" after {duration(found['seconds'])}" if ended and found["seconds"] is not None else ""
    code = f", exit code {found['exit_code']}" if ended else ""
    print_result(f"{found['submission_id']}: {found['state'].lower()}{elapsed}{code}\n  Results     {found['output']}")
