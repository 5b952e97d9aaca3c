"""The command that looks at a machine: doctor."""

import sys

import click

from pipeline.cli.console import answers, json_flag, print_json, print_result, result_width


@click.command()
@click.argument("job", metavar="[JOB.yaml]", type=click.Path(), required=False)
@click.option(
    "--model", type=click.Path(), metavar="PATH", help="A checkpoint's folder, an fsspec url or a Hugging Face id."
)
@click.option("--input", "source", type=click.Path(), metavar="PATH", help="Parquet to read.")
@click.option(
    "--output", type=click.Path(), metavar="PATH", help="Where results are to go; files are created there and removed."
)
@json_flag
@answers
def doctor(job: str | None, model: str | None, source: str | None, output: str | None, as_json: bool) -> None:
    """Say whether this machine can run a job, and what to do where it cannot.

    \b
    Examples:
      pipeline doctor my.yaml
      pipeline doctor                            this machine alone
      pipeline doctor --model models/Qwen3-4B --output s3://bucket/results

    Of a model it also says what it takes, how many sequences fit beside it and how fast it could be at the most, here
    and on the cards of pipeline/roofline/hardware.yaml, with what the job makes of it: model.quantization,
    engine.kv_cache_dtype and engine.activation_dtype, which not every card has.

    Looks at versions, devices, memory, disks and kernels; at a model's files; at whether a store is reached and
    creates files only where none stands. Loads no weights and downloads nothing. --model, --input and --output
    replace those of the job file. Leaves with 3 when something failed, with 2 when only what was given is wrong.
    """
    from pipeline.config import load_job
    from pipeline.doctor import Setup, diagnose, exit_code, memory_of

    subject = Setup.of_job(load_job(job)) if job is not None else Setup()
    subject = subject.replacing(model, source, output)
    checks, group = [], ""
    for check in diagnose(subject):
        checks.append(check)
        if not as_json:
            print_result((f"\n{check.group}\n" if check.group != group else "") + check.to_text())
            group = check.group
    count = {state: sum(check.state == state for check in checks) for state in ("ok", "warning", "failed")}
    memory = memory_of(subject)
    if as_json:
        told = {"checks": [check.to_json() for check in checks], "memory": None if memory is None else memory.to_json()}
        print_json({**count, **told})
    else:
        if memory is not None:
            print_result(f"\n{memory.to_text(result_width())}")
        print_result(f"\n{count['failed']} failed, {count['warning']} warnings")
    sys.exit(exit_code(checks))
