"""Command that writes a job's Kubernetes manifests: manifests."""

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from pipeline.cli.console import handle_errors, json_flag, print_json, print_lines, print_message
from pipeline.cli.options import job_overlays
from pipeline.errors import ConfigError, OutputError


@click.command()
@click.argument("job", metavar="JOB.yaml", type=click.Path())
@job_overlays
@click.option("--schedule", metavar="CRON", help="Minute, hour, day, month, day of the week: '0 2 * * *'.")
@click.option("--time-zone", default="Etc/UTC", show_default=True, metavar="ZONE", help="Time zone of the schedule.")
@click.option("--output", type=click.Path(), metavar="FILE", help="Write to a file instead of standard output.")
@json_flag
@handle_errors
def manifests(
    job: str,
    schedule: str | None,
    time_zone: str,
    output: str | None,
    as_json: bool,
    **overlays: Any,
) -> None:
    """Write the Kubernetes manifests of a job: a Ray cluster of its own, once or on a schedule.

    \b
    Examples:
      pipeline manifests my.yaml > my.k8s.yaml
      pipeline manifests my.yaml --set kubernetes.image=registry/image@sha256:... --output my.k8s.yaml
      pipeline manifests nightly.yaml --schedule '0 2 * * *' --time-zone Europe/Berlin

    The job file's section `kubernetes` holds image and sizes, and patches for all else. The job file is sent along in a
    ConfigMap. Variables of {today: ZONE} get the date of each firing; the others are filled in here. A cluster that
    fails is replaced by another one, which resumes from the parts that are written.
    """
    from pipeline.cluster.manifests import Schedule, to_yaml
    from pipeline.cluster.manifests import manifests as manifests_of
    from pipeline.config import load_job
    from pipeline.config.variables import TodaySection

    config, timed = load_job(job, **overlays), None
    if schedule is not None:
        given = {flag.partition("=")[0] for flag in overlays["vars"]}
        days = {name for name, kind in config.vars.items() if isinstance(kind, TodaySection)} - given
        if not days:
            raise ConfigError(
                "--schedule: every firing would have the same output. Declare vars: {date: {today: ZONE}}"
            )
        open_vars = {name: f"logical-date-{name}" for name in sorted(days)}
        overlays["vars"] = (*overlays["vars"], *(f"{name}={text}" for name, text in open_vars.items()))
        config = load_job(job, **overlays)
        timed = Schedule(cron=schedule, time_zone=time_zone, open_vars=open_vars)
    made = manifests_of(config, timed)
    if as_json:
        return print_json({"manifests": made})
    text = to_yaml(made, shlex.join(["pipeline", *sys.argv[1:]]))
    if output is None:
        return print_lines(text.rstrip("\n"))
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--output {output}: {error.strerror}") from None
    print_message(f"{len(made)} manifests are in {output}: kubectl apply -f {shlex.quote(output)}")
