"""The command line: the group of all commands, and the process's exit code.

Call order: `main` -> a command in `commands/` -> the package it calls -> `console` (output, and the exit code of an
error). `run` continues in a fork (`guard`). Each command imports heavy modules itself.
"""

import sys

import click

from pipeline import __version__
from pipeline.cli.commands import (
    checkpoints,
    completion,
    convert,
    demo,
    doctor,
    init,
    jobs,
    logs,
    manifests,
    plan,
    prompts,
    publish,
    report,
    schema,
)
from pipeline.cli.console import exit_on_error
from pipeline.cli.options import Commands

EPILOG = """\b
Start here:
  pipeline demo                            write an example to try, with its data
  pipeline run DATA --prompt TEXT --model NAME   run a job without a file
  pipeline init my.yaml --input data       write a job file for a dataset
  pipeline validate my.yaml                check the job file and show its first prompt
  pipeline plan my.yaml                    estimate hours and cost
  pipeline run my.yaml                     run the job, or resume it
  pipeline report out/my                   show what it did and cost
  pipeline generate --input prompts.txt    complete a few prompts without a job file
  pipeline doctor my.yaml                  check whether this machine can run it

\b
Exit codes:
  0   finished; error rows within run.max_error_rate
  1   stopped by run.max_error_rate; can be resumed
  2   the job file, the input or the output must be changed
  3   the environment failed (disk, store, actors); can be resumed
  70  a bug in pipeline
  75  interrupted; the same command resumes
"""


@click.group(
    cls=Commands,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="pipeline")
def cli() -> None:
    """Run LLM batch inference over Parquet, JSONL or CSV, resumably, and report what it cost.

    A job is one YAML file. To resume a run that stopped, repeat the command. Every input row ends up in the output
    exactly once, as a completion or as an error row.
    """


COMMANDS = (
    *(
        demo.demo,
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
        publish.publish,
    ),
    manifests.manifests,
    *(prompts.generate, doctor.doctor, schema.schema, checkpoints.eval_command, checkpoints.quantize_command),
    completion.completion,
)
for command in COMMANDS:
    cli.add_command(command)


def main() -> None:
    """Run the console script and exit with one of the codes in EPILOG."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a narrow locale must not end a run
    with exit_on_error():
        cli.main(standalone_mode=False)
