"""Command that writes a job's output in the format of OpenAI's Batch API: convert."""

import click

from pipeline.cli.console import handle_errors, json_flag, print_answer
from pipeline.cli.options import var_option


@click.command()
@click.argument("target", metavar="OUTPUT|JOB.yaml", type=click.Path())
@var_option
@click.option("--output", required=True, type=click.Path(), metavar="FILE.jsonl",
              help="New file for completed rows, local or an fsspec url.")  # fmt: skip
@click.option("--errors", type=click.Path(), metavar="FILE.jsonl",
              help="New file for error rows, written if there are any; default: next to --output.")  # fmt: skip
@json_flag
@handle_errors
def convert(target: str, vars: tuple[str, ...], output: str, errors: str | None, as_json: bool) -> None:
    """Convert the output of a finished job to the format of OpenAI's Batch API.

    \b
    Examples:
      pipeline convert out/batch --output answers.jsonl
      pipeline convert my.yaml --output answers.jsonl.zst --errors failed.jsonl.zst

    Each row becomes a line: {id, custom_id, response, error}, with the object that /v1/chat/completions,
    /v1/completions or /v1/embeddings returns. Error rows have status 400 if the row is at fault and 500 if the
    engine is. The output needs the column custom_id, which jobs with input.format: openai keep.

    The job's output stays unchanged. Both files appear complete, and no file is replaced. Files named .gz or .zst are
    compressed. A file in a store is held in memory before it is sent; options of the store come from the job file or
    from the environment.
    """
    from pipeline.job.output.convert import convert as write
    from pipeline.job.output.read_output import open_output, output_of
    from pipeline.stores.filesystem import storage_for

    storage = storage_for(output, output_of(target, vars)[1])
    print_answer(write(open_output(target, vars), output, errors, storage), as_json)
