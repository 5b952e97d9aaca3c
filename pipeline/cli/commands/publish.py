"""Command that copies a finished output to a dataset on the Hugging Face Hub or to a Delta table: publish."""

import click

from pipeline.cli.console import handle_errors, json_flag, print_answer, print_message
from pipeline.cli.options import var_option
from pipeline.errors import ConfigError


@click.command()
@click.argument("source", metavar="OUTPUT|JOB.yaml", type=click.Path())
@click.argument("target", metavar="TARGET")
@var_option
@click.option("--public", is_flag=True, help="Make a new dataset public; default: private.")
@click.option("--replace", is_flag=True, help="Overwrite a dataset or table that this job has not published.")
@json_flag
@handle_errors
def publish(source: str, target: str, vars: tuple[str, ...], public: bool, replace: bool, as_json: bool) -> None:
    """Publish the output of a finished job as a dataset on the Hugging Face Hub, or as a Delta table.

    \b
    Examples:
      pipeline publish out/summarize hf://datasets/me/summaries
      pipeline publish my.yaml hf://datasets/me/summaries@2026-11 --public
      pipeline publish out/summarize delta:/data/tables/summaries
      pipeline publish out/summarize delta:s3://bucket/tables/summaries

    Rows appear in one commit, with a dataset card or with figures of the job. The same command after an interruption
    completes it, and does nothing if the target holds this output. After `pipeline run` with --retry-failed, --redo or
    --append it replaces the earlier publication in one commit.

    The Hub needs a token with write access: HF_TOKEN or `hf auth login`. A new dataset or table is created. Credentials
    of a table in a store come from the environment, such as AWS_ACCESS_KEY_ID. Delta tables need the package deltalake.
    """
    from pipeline.job.output.read_output import open_output
    from pipeline.job.publish.delta import DELTA, DeltaDestination
    from pipeline.job.publish.finished import FinishedOutput
    from pipeline.job.publish.hub import HUB, HubDestination
    from pipeline.job.publish.publication import publish as copy

    if target.startswith(HUB):
        destination = HubDestination(target, public=public, replace=replace)
    elif target.startswith(DELTA):
        destination = DeltaDestination(target, replace=replace)
    else:
        raise ConfigError(f"TARGET {target}: expected hf://datasets/OWNER/NAME or delta:PATH")
    store = open_output(source, vars)
    if isinstance(destination, DeltaDestination):
        store.refuse_inside(destination.path, "TARGET")
    print_answer(copy(FinishedOutput.open(store), destination, print_message), as_json)
