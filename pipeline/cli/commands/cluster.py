"""The commands that hand a job to a cluster and look after it there: submit, submissions, cancel."""

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.console import answers, json_flag, print_json, print_result, say
from pipeline.cli.options import job_overlays
from pipeline.errors import ConfigError, EnvironmentFailed
from pipeline.formatting import duration, printable_lines

if TYPE_CHECKING:
    from pipeline.cluster.job_server import Submission

address_option = click.option(
    "--address", metavar="URL",
    help="The head's job server, http://HEAD:8265. Left out, RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else the Ray of "
    "this machine.",
)  # fmt: skip


@click.command()
@click.argument("job", metavar="JOB.yaml", type=click.Path())
@job_overlays
@address_option
@click.option("--detach", is_flag=True, help="Leave once the job is sent.")
@click.option("--if-running", type=click.Choice(["join", "leave"]), default="join", show_default=True,
              help="Where a run of this job is under way: follow it, or leave with 0.")  # fmt: skip
@click.option("--append", is_flag=True, help="As of `pipeline run`.")
@click.option("--retry-failed", is_flag=True, help="As of `pipeline run`.")
@click.option("--accept-numerics", is_flag=True, help="As of `pipeline run`.")
@json_flag
@answers
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
      pipeline submit nightly.yaml --if-running leave     from cron: no second run beside a long one
      RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=token pipeline submit my.yaml

    The job file is checked and filled in here and sent; data and models are not. Paths of a disk have to be there under
    the same name on every machine of the cluster.

    A second call for the same output joins the run that is under way. After its end a call goes on where it stopped, as
    `pipeline run` does. Ctrl-C leaves the job running; `pipeline cancel` stops it. Leaves with the driver's exit code.
    """
    from pipeline.cluster.job_server import JobServer
    from pipeline.cluster.shipped_job import ShippedJob
    from pipeline.config import load_job

    shipped = ShippedJob.of(load_job(job, **overlays))
    flags = {"--append": append, "--retry-failed": retry_failed, "--accept-numerics": accept_numerics}
    server = JobServer(address)
    found, is_new = server.submit(shipped, [flag for flag, given in flags.items() if given])
    say(f"{found.id} was sent to {server.url}" if is_new else f"{found.id} is under way at {server.url}")
    if shipped.is_local:
        say(f"Its output is {shipped.output}, a path that every machine of the cluster has to have.")
    if detach or (not is_new and if_running == "leave"):
        return _print(found, as_json)
    try:
        ended = server.follow(found.id, lambda text: click.echo(printable_lines(text), err=True, nl=False), say)
    except KeyboardInterrupt:
        say(f"\n{found.id} goes on. The same command follows it again; stop it with: pipeline cancel {found.id}")
        raise
    _print(ended, as_json)
    if ended.exit_code in (EnvironmentFailed.exit_code, 127):
        say(f"Error: {server.why_it_failed(ended)}")
    sys.exit(ended.exit_code)


@click.command()
@click.argument("place", metavar="JOB.yaml|SUBMISSION", type=click.Path())
@job_overlays
@address_option
@json_flag
@answers
def cancel(place: str, address: str | None, as_json: bool, **overlays: Any) -> None:
    """Stop a job that was submitted to a cluster: what is being computed is finished within run.drain_s and kept.

    \b
    Examples:
      pipeline cancel my.yaml
      pipeline cancel summarize-3f2a9c1b04-1 --address http://head:8265

    A job file takes the options that it was submitted with, since they say which output it has. The next
    `pipeline submit` goes on from there. Leaves with 0 when the job has ended.
    """
    from pipeline.cluster.job_server import JobServer

    name = _name_of(place, overlays)
    server = JobServer(address)
    found = server.submission(place) if name is None else server.running(name)
    if found is None:
        raise ConfigError(f"{place}: no run of this job is under way at {server.url}. See `pipeline submissions`")
    if not found.is_over and server.stop(found.id):
        say(f"{found.id} is draining.")
        found = server.ended(found.id)
    _print(found, as_json)


@click.command()
@address_option
@json_flag
@answers
def submissions(address: str | None, as_json: bool) -> None:
    """List the jobs that were submitted to a cluster, with how each stands.

    \b
    Examples:
      pipeline submissions
      pipeline submissions --address http://head:8265 --json
    """
    from pipeline.cluster.job_server import JobServer

    server = JobServer(address)
    found = server.submissions()
    if as_json:
        return print_json({"submissions": [one.to_json() for one in found]})
    if not found:
        return print_result(f"None of this program at {server.url}.")
    wide = max(len(one.id) for one in found)
    for one in found:
        print_result(f"{one.id:<{wide}}  {_state(one):<34}  {one.output}")


def _name_of(place: str, overlays: dict[str, Any]) -> str | None:
    """The name of a job file's submissions; None where `place` is a submission."""
    from pipeline.cluster.shipped_job import ShippedJob
    from pipeline.config import load_job

    if place.endswith((".yaml", ".yml")):
        return ShippedJob.of(load_job(place, **overlays)).name
    given = shlex.join(name for name, value in overlays.items() if value)
    if given:
        raise ConfigError(f"{place} is a submission, which takes no {given}")
    return None


def _print(found: "Submission", as_json: bool) -> None:
    if as_json:
        print_json(found.to_json())
    else:
        print_result(f"{found.id}: {_state(found)}\n  Results     {found.output}")


def _state(found: "Submission") -> str:
    took = "" if found.seconds is None else f" after {duration(found.seconds)}" if found.is_over else ""
    code = "" if found.exit_code is None else f", exit code {found.exit_code}"
    return f"{found.state.lower()}{took}{code}"
