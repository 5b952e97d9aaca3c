"""The command that tells what a job will take before it runs: plan."""

from pathlib import Path
from typing import Any

import click

from pipeline.cli.console import answers, json_flag, print_json, print_result, result_width, say
from pipeline.cli.options import job_overlays
from pipeline.errors import ConfigError


@click.command()
@click.argument("job", metavar="JOB.yaml", type=click.Path())
@job_overlays
@click.option("--sample", type=click.IntRange(min=1), metavar="N", default=2000, show_default=True,
              help="Rows whose prompts are read and tokenized.")  # fmt: skip
@click.option("--probe", type=click.IntRange(min=1), metavar="N",
              help="Compute N rows first and measure; the job's run takes them over.")  # fmt: skip
@click.option("--hardware", metavar="CARD", multiple=True,
              help="A card of pipeline/roofline/hardware.yaml, such as h100; all of them when left out. With one, what "
              "to set there is told too. May be repeated.")  # fmt: skip
@click.option("--actors", metavar="N,N", help="Numbers of engines to compare: 1,8,64. The job's when left out.")
@click.option("--prices", metavar="FILE", type=click.Path(),
              help="Instead of pipeline/estimate/prices.yaml, in its form.")  # fmt: skip
@json_flag
@answers
def plan(
    job: str,
    sample: int,
    probe: int | None,
    hardware: tuple[str, ...],
    actors: str | None,
    prices: str | None,
    as_json: bool,
    **overlays: Any,
) -> None:
    """Say what a job will take, in tokens, hours and money, here and on other hardware.

    \b
    Examples:
      pipeline plan my.yaml
      pipeline plan my.yaml --probe 64           a new model: compute 64 rows and measure
      pipeline plan my.yaml --hardware h100 --actors 1,8,64
      pipeline plan my.yaml --prices ours.yaml --json

    Prompts are counted in a sample. How long completions are, and how fast this machine is, comes from runs before,
    which every run remembers in $PIPELINE_CACHE; the figures of cards are a cost model's. Each figure says which.

    The estimate is kept in output.path/_pipeline/plan.json, and `pipeline report` sets it beside what the run took.
    Nothing else is written, and no weights are read unless --probe asks for it.
    """
    from pipeline.config import load_job
    from pipeline.estimate.job_estimate import estimate_job, save_estimate
    from pipeline.estimate.prices import FILE, load_prices
    from pipeline.estimate.render import text

    config = load_job(job, **overlays)
    found = estimate_job(
        config,
        sample=sample,
        probe=probe,
        hardware=hardware,
        actors=_counts(actors),
        prices=load_prices(Path(prices) if prices else FILE),
        say=say,
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
