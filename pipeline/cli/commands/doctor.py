"""Command that checks a machine: doctor."""

import sys

import click

from pipeline.cli.console import handle_errors, json_flag, print_json, print_result, result_width


@click.command()
@click.argument("job", metavar="[JOB.yaml]", type=click.Path(), required=False)
@click.option(
    "--model", type=click.Path(), metavar="PATH", help="Checkpoint: a folder, an fsspec url or a Hugging Face id."
)
@click.option("--input", "source", type=click.Path(), metavar="PATH", help="Input to read.")
@click.option(
    "--output", type=click.Path(), metavar="PATH", help="Folder for results; test files are created there and removed."
)
@json_flag
@handle_errors
def doctor(job: str | None, model: str | None, source: str | None, output: str | None, as_json: bool) -> None:
    """Check whether this machine can run a job, and explain how to fix what is missing.

    \b
    Examples:
      pipeline doctor my.yaml
      pipeline doctor                            check only the machine
      pipeline doctor --model models/Qwen3-4B --output s3://bucket/results

    For a model it also shows the memory it needs, how many sequences fit next to it and the highest possible speed,
    here and on the cards of pipeline/roofline/hardware.yaml, under the job's model.quantization, engine.kv_cache_dtype,
    engine.activation_dtype and engine.cpu_offload_gb.

    Checks versions, devices, memory, disks and kernels, the model's files, and that stores are reachable and never
    replace a file. Loads no weights and downloads nothing. --model, --input and --output override the job file. Exits
    with 3 if a check of the environment failed, with 2 if only the arguments are wrong.
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
        result = {
            "checks": [check.to_json() for check in checks],
            "memory": None if memory is None else memory.to_json(),
        }
        print_json({**count, **result})
    else:
        if memory is not None:
            print_result(f"\n{memory.to_text(result_width())}")
        print_result(f"\n{count['failed']} failed, {count['warning']} warnings")
    sys.exit(exit_code(checks))
