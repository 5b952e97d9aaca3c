"""Command that writes a first job file: init."""

from pathlib import Path

import click

from pipeline.cli.console import handle_errors, json_flag, print_json, print_message, print_result


@click.command()
@click.argument("job", metavar="JOB.yaml", type=click.Path())
@click.option(
    "source",
    "--input",
    required=True,
    type=click.Path(),
    metavar="PATH",
    help="Parquet, JSON Lines, CSV or Arrow to read: a file, a folder or a glob.",
)
@click.option("--model", default="demo:target-awq", show_default=True,
              help="A folder, an fsspec url, a Hugging Face id, or demo:target-awq.")  # fmt: skip
@click.option("--output", type=click.Path(), metavar="PATH", help="Folder for the job's results; default: out/NAME.")
@json_flag
@handle_errors
def init(job: str, source: str, model: str, output: str | None, as_json: bool) -> None:
    """Write a commented job file for a dataset and a model.

    \b
    Examples:
      pipeline init my.yaml --input data/tickets --model Qwen/Qwen3-4B
      pipeline init my.yaml --input requests.jsonl       a file for OpenAI's Batch API
      pipeline init my.yaml --input 's3://bucket/tickets/*.parquet' --output s3://bucket/labels

    Reads the first rows to find the prompt column and the length of prompts, and the model's small files to find its
    chat template and its size. Loads no weights and replaces no file.
    """
    from pipeline.config import load_job
    from pipeline.config.schema import FILE_NAME
    from pipeline.errors import ConfigError
    from pipeline.starter import job_text, look, write_job

    if Path(job).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{job}: expected a file name that ends in .yaml")
    if Path(job).exists():
        raise ConfigError(f"{job}: exists already and is not replaced; choose another name")
    name = Path(job).stem
    seen = look(source, model, print_message)
    wrote_schema = write_job(job, job_text(name, source, model, output or f"out/{name}", seen))
    load_job(job)
    if as_json:
        return print_json({"job": job, "prompt": seen.prompt, "kind": seen.kind, "wrote_schema": wrote_schema})
    schema = f", with {FILE_NAME} next to it for editors" if wrote_schema else ""
    print_result(f"Wrote {job}{schema}. Check its prompt, then:")
    print_result(f"  pipeline validate {job}")
    print_result(f"  pipeline run {job} --sample 5")
