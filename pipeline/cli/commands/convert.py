"""The command that writes a job's output in the form of a hosted batch API: convert."""

from typing import TYPE_CHECKING

import click

from pipeline.cli.console import answers, json_flag, print_answer
from pipeline.cli.options import var_option

if TYPE_CHECKING:
    from pipeline.data.requests.request_row import RequestFormat


@click.command()
@click.argument("place", metavar="OUTPUT|JOB.yaml", type=click.Path())
@var_option
@click.option("--to", "form", type=click.Choice(["openai-batch", "anthropic-batch", "bedrock-batch"]), required=True,
              help="The form of the lines; it need not be that of the job's input.")  # fmt: skip
@click.option("--output", required=True, type=click.Path(), metavar="FILE.jsonl",
              help="A new file for completed rows, local or an fsspec url.")  # fmt: skip
@click.option("--errors", type=click.Path(), metavar="FILE.jsonl",
              help="Of openai-batch: a new file for error rows, made where there are some; beside --output when left "
                   "out.")  # fmt: skip
@json_flag
@answers
def convert(
    place: str, vars: tuple[str, ...], form: "RequestFormat", output: str, errors: str | None, as_json: bool
) -> None:
    """Write the output of a finished job as a hosted batch API delivers it.

    \b
    Examples:
      pipeline convert out/batch --to openai-batch --output answers.jsonl
      pipeline convert my.yaml --to openai-batch --output answers.jsonl --errors failed.jsonl
      pipeline convert out/batch --to anthropic-batch --output results.jsonl
      pipeline convert out/batch --to bedrock-batch --output records.jsonl.out

    openai-batch: a line for each row: {id, custom_id, response, error}, with the object that /v1/chat/completions,
    /v1/completions or /v1/embeddings returns. Error rows have status 400 where the row is at fault and 500 where the
    engine is. The output needs the column custom_id, which a job over lines of a batch API keeps.

    anthropic-batch: {custom_id, result}, with a message or an error. bedrock-batch: {recordId, modelOutput} or
    {recordId, error}, as Converse returns it, or InvokeModel of Llama models where prompts are no chats; a
    manifest.json.out lies beside.

    The job's output is read and left as it is. Both files appear whole, and no file is replaced. A file in a store
    lies in memory once before it is sent, and takes its options from the job file, or from the environment.
    """
    from pipeline.job.output.convert import convert as write
    from pipeline.job.output.read_output import open_output, output_of
    from pipeline.stores.filesystem import storage_for

    storage = storage_for(output, output_of(place, vars)[1])
    print_answer(write(open_output(place, vars), output, errors, storage, form), as_json)
