"""The command that says whether an output is sound."""

import sys

import click

from pipeline.cli.console import answers, json_flag, print_json, print_result, say
from pipeline.errors import OutputError


@click.command("verify")
@click.argument("place", metavar="OUTPUT|JOB.yaml")
@click.option("--deep", is_flag=True, help="Read every page of every part, and see that each row is there once.")
@json_flag
@answers
def verify_command(place: str, deep: bool, as_json: bool) -> None:
    """Say whether the output of a finished job is sound, and name all that is damaged.

    \b
    Examples:
      pipeline verify out/summarize
      pipeline verify jobs/summarize.yaml --deep

    Compares names and sizes of the parts with what _SUCCESS counts, and reads every footer. --deep reads the parts
    whole, with the checksum of each page, and sees that their rows follow each other without a gap and without one
    twice.

    Changes nothing. Leaves with 0 when the output is finished and sound, with 2 when something is missing or damaged.
    An s3:// output takes its options from the job file, or from the environment.
    """
    from pipeline.job.audit import audit
    from pipeline.job.read_output import open_output

    found = audit(open_output(place), deep, say)
    if as_json:
        print_json(found.to_json())
    else:
        print_result(found.to_text())
    if not found.sound:
        sys.exit(OutputError.exit_code)
