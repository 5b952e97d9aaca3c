"""Command that estimates a job before it runs: plan."""

from typing import Any

import click

from pipeline.cli.console import handle_errors, json_flag, print_json, print_message, print_result, result_width
from pipeline.cli.options import job_overlays
from pipeline.errors import ConfigError


@click.command()
@click.argument("job", metavar="JOB.yaml", type=click.Path())
@job_overlays
@click.option("--sample", type=click.IntRange(min=1), metavar="N", default=2000, show_default=True,
              help="Number of rows to read and tokenize.")  # fmt: skip
@click.option("--probe", type=click.IntRange(min=1), metavar="N",
              help="Compute N rows first and measure them; the job's run reuses them.")  # fmt: skip
@click.option("--hardware", metavar="CARD[=USD]", multiple=True,
              help="Card of pipeline/roofline/hardware.yaml, such as h100, or with your price of an hour, h100=2.10. "
              "Default: all, at listed prices. With one card, also compare settings for it. May be "
              "repeated.")  # fmt: skip
@click.option("--actors", metavar="N,N", help="Numbers of engines to compare: 1,8,64. Default: the job's.")
@json_flag
@handle_errors
def plan(
    job: str,
    sample: int,
    probe: int | None,
    hardware: tuple[str, ...],
    actors: str | None,
    as_json: bool,
    **overlays: Any,
) -> None:
    """Estimate the tokens, hours and cost of a job, here and on other hardware.

    \b
    Examples:
      pipeline plan my.yaml
      pipeline plan my.yaml --probe 64           a new model: measure 64 rows first
      pipeline plan my.yaml --hardware h100 --actors 1,8,64
      pipeline plan my.yaml --hardware h100=2.10 --hardware l4=0.35 --json

    Prompt tokens are counted in a sample. Lengths of completions and the speed of this machine come from earlier runs,
    recorded in $PIPELINE_CACHE; figures for other cards come from a cost model. Each figure names its source.

    If a server computes the rows (server), tokens and speed come from earlier runs. Only --probe contacts or
    starts the server.

    Writes the estimate to output.path/_pipeline/plan.json, so that `pipeline report` can compare it with the actual
    run. Writes nothing else, and reads no weights without --probe.
    """
    from pipeline.config import load_job
    from pipeline.estimate.job_estimate import estimate_job, save_estimate
    from pipeline.estimate.render import text

    config = load_job(job, **overlays)
    found = estimate_job(
        config,
        sample=sample,
        probe=probe,
        hardware=hardware,
        actors=_counts(actors),
        log=print_message,
    )
    if found.estimate is not None:
        save_estimate(config, found.estimate)
    if as_json:
        return print_json(found.to_json())
    print_result(text(found, result_width()))


def _counts(text: str | None) -> tuple[int, ...]:
    try:
        counts = tuple(int(each) for each in text.split(",")) if text else ()
    except ValueError:
        counts = (0,)
    if any(count < 1 for count in counts):
        raise ConfigError(f"--actors {text}: expected whole numbers from 1 on, with commas: 1,8,64")
    return counts
