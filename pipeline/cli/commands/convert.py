"""The command that writes a job's output as OpenAI's Batch API would deliver it: convert."""

import click

from pipeline.cli.console import answers, json_flag, print_answer
from pipeline.cli.options import var_option


@click.command()
@click.argument("place", metavar="OUTPUT|JOB.yaml", type=click.Path())
@var_option
@click.option("--output", required=True, type=click.Path(), metavar="FILE.jsonl",
              help="A new file for completed rows, local or an fsspec url.")  # fmt: skip
@click.option("--errors", type=click.Path(), metavar="FILE.jsonl",
              help="A new file for error rows, made where there are some; next to --output when left out.")  # fmt: skip
@json_flag
@answers
def convert(place: str, vars: tuple[str, ...], output: str, errors: str | None, as_json: bool) -> None:
    """Write the output of a finished job as OpenAI's Batch API delivers it.

    \b
    Examples:
      pipeline convert out/batch --output answers.jsonl
      pipeline convert my.yaml --output answers.jsonl --errors failed.jsonl

    Each row becomes a line: {id, custom_id, response, error}, with the object that /v1/chat/completions,
    /v1/completions or /v1/embeddings returns. Error rows have status 400 where the row is at fault and 500 where the
    engine is. The output needs the column custom_id, which a job over lines of a batch API keeps.

    The job's output is read and left as it is. Both files appear whole, and no file is replaced. A file in a store
    lies in memory once before it is sent, and takes its options from the job file, or from the environment.
    """
    from pipeline.job.output.convert import convert as write
    from pipeline.job.output.read_output import open_output, output_of
    from pipeline.stores.filesystem import storage_for

    storage = storage_for(output, output_of(place, vars)[1])
    print_answer(write(open_output(place, vars), output, errors, storage), as_json)
