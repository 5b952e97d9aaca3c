"""The command that writes a job's Kubernetes manifests: render."""

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from pipeline.cli.console import answers, json_flag, print_json, print_lines, say
from pipeline.cli.options import job_overlays
from pipeline.errors import ConfigError, OutputError

_OPERATORS = ("1.7", "1.6", "1.5")


@click.command()
@click.argument("job", metavar="JOB.yaml", type=click.Path())
@job_overlays
@click.option("--target", type=click.Choice(["kuberay"]), default="kuberay", show_default=True)
@click.option("--schedule", metavar="CRON", help="Minute, hour, day, month, day of the week: '0 2 * * *'.")
@click.option("--time-zone", default="Etc/UTC", show_default=True, metavar="ZONE", help="Of the schedule.")
@click.option("--operator", type=click.Choice(_OPERATORS), default="1.7", show_default=True,
              help="KubeRay's version. Before 1.7 a schedule is a CronJob of Kubernetes.")  # fmt: skip
@click.option("--output", type=click.Path(), metavar="FILE", help="Where to write; else standard output.")
@json_flag
@answers
def render(
    job: str,
    target: str,
    schedule: str | None,
    time_zone: str,
    operator: str,
    output: str | None,
    as_json: bool,
    **overlays: Any,
) -> None:
    """Write the Kubernetes manifests of a job: a Ray cluster of its own, once or by a schedule.

    \b
    Examples:
      pipeline render my.yaml > nightly.k8s.yaml
      pipeline render my.yaml --set cluster.image=registry/image@sha256:... --output my.k8s.yaml
      pipeline render nightly.yaml --schedule '0 2 * * *' --time-zone Europe/Berlin
      pipeline render nightly.yaml --schedule '0 2 * * *' --operator 1.5

    What Kubernetes has to know stands in the job file's section `cluster`. The job file goes along in a ConfigMap.
    Variables of {today: ZONE} get the date of each firing; the others are filled in here. A cluster that fails is
    followed by another one, which goes on from the parts that are written.
    """
    from pipeline.cluster.kuberay.manifests import Schedule, manifests, to_yaml
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
        timed = Schedule(schedule, time_zone, open_vars, operator == "1.7")
    made = manifests(config, timed)
    if as_json:
        return print_json({"manifests": made})
    text = to_yaml(made, shlex.join(["pipeline", *sys.argv[1:]]))
    if output is None:
        return print_lines(text.rstrip("\n"))
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--output {output}: {error.strerror}") from None
    say(f"{len(made)} manifests are in {output}: kubectl apply -f {shlex.quote(output)}")
