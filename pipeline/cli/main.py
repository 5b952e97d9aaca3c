"""The command line: the group of all commands, and the process's exit code.

A call goes through these files in order: `main` -> a command in `commands/` -> what it calls -> `console` (what is
printed, and the exit code of an error). `run` goes on in a fork (`guard`). Everything heavy is imported by the command
that needs it.
"""

import sys

import click

from pipeline import __version__
from pipeline.cli.commands import (
    bench,
    checkpoints,
    cluster,
    completion,
    convert,
    doctor,
    init,
    jobs,
    logs,
    manifests,
    plan,
    prompts,
    report,
    schema,
)
from pipeline.cli.console import leave_with_exit_code
from pipeline.cli.options import Commands

EPILOG = """\b
Start here:
  pipeline init my.yaml --input data       write a job file for a dataset
  pipeline validate my.yaml                what the job is; nothing is run
  pipeline plan my.yaml                    what it will take, in hours and money
  pipeline run my.yaml                     run it, or go on where it stopped
  pipeline report out/my                   what it cost
  pipeline submit my.yaml                  the same on a Ray cluster
  pipeline generate --input prompts.txt    a handful of prompts, without a job
  pipeline doctor my.yaml                  whether this machine can run it

\b
Exit codes:
  0   finished; error rows within run.max_error_rate
  1   stopped by run.max_error_rate; can be resumed
  2   the job file, the input or the output has to be changed
  3   the environment failed (disk, store, actors); can be resumed
  70  a defect of this program
  75  interrupted; the same command goes on
"""


@click.group(
    cls=Commands,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="pipeline")
def cli() -> None:
    """Prompts in Parquet to completions in Parquet, and what they cost.

    A job is one YAML file. A run that was stopped goes on when the same command is given again: every input
    row is in the output exactly once, as a completion or as an error row.
    """


COMMANDS = (
    *(
        init.init,
        jobs.validate,
        plan.plan,
        jobs.run,
        jobs.status,
        logs.logs,
        report.report,
        jobs.compact,
        jobs.verify,
        convert.convert,
    ),
    *(cluster.submit, cluster.cancel, manifests.manifests),
    *(prompts.generate, doctor.doctor, schema.schema, checkpoints.eval_command, checkpoints.quantize_command),
    *(bench.bench, completion.completion),
)
for command in COMMANDS:
    cli.add_command(command)


def main() -> None:
    """The console script. Leaves with an exit code that means what EPILOG says."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a narrow locale must not end a run
    with leave_with_exit_code():
        cli.main(standalone_mode=False)
