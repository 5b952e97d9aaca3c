"""Command that estimates a job before it runs: plan."""

import re
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.console import handle_errors, json_flag, print_json, print_message, print_result, result_width
from pipeline.cli.data_flags import NAMES, data_flags, is_job_file, job_of
from pipeline.cli.options import Grouped, job_overlays
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config import JobConfig

PROBE_ROWS = 200  # of --models
_MODEL = re.compile(r"(?P<model>[^@]+)(@(?P<url>https?://[^=]+)(=(?P<token_price>.+))?)?")
_GROUPS = {
    "Job of a file": ("sets", "presets", "overlays", "vars", "limit"),
    "Job without a file": (*NAMES, "models"),
}


@click.command(cls=Grouped, groups=_GROUPS)
@click.argument("target", metavar="JOB.yaml|DATA", type=click.Path())
@data_flags
@click.option("--models", metavar="A,B,...",
              help="Compare models: compute the first rows with each (--probe, 200 by default) and show tokens, hours, "
              "dollars and how often they agree. NAME, or NAME@URL=IN/OUT on a server, with its dollars per million "
              "tokens.")  # fmt: skip
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
    target: str,
    flags: dict[str, Any],
    models: str | None,
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
      pipeline plan data/ --prompt "Summarize: {text}" --model Qwen/Qwen3-4B
      pipeline plan data/ --prompt "Summarize: {text}" --models Qwen/Qwen3-4B,gpt-x@https://api.example.com/v1=0.15/0.6

    Prompt tokens are counted in a sample. Lengths of completions and the speed of this machine come from earlier runs,
    recorded in $PIPELINE_CACHE; figures for other cards come from a cost model. Each figure names its source.

    If a server computes the rows (server), tokens and speed come from earlier runs. Only --probe contacts or
    starts the server.

    Writes the estimate to output.path/_pipeline/plan.json, so that `pipeline report` can compare it with the actual
    run. Writes nothing else, and reads no weights without --probe.
    """
    from pipeline.estimate import compare_models
    from pipeline.estimate.job_estimate import estimate_job, save_estimate
    from pipeline.estimate.render import text

    options: dict[str, Any] = {"sample": sample, "hardware": hardware, "actors": _counts(actors), "log": print_message}
    if models is not None:
        jobs = {
            name: _jobs_of(target, flags | of_model, probe or PROBE_ROWS, overlays)
            for name, of_model in _models(target, models, flags).items()
        }
        compared = compare_models.compare_models(jobs, **options)
        if as_json:
            return print_json({"models": [each.to_json() for each in compared]})
        return print_result(compare_models.text(compared, result_width()))
    config = job_of(target, flags, **overlays)
    found = estimate_job(config, probe=probe, **options)
    if found.estimate is not None:
        save_estimate(config, found.estimate)
    if as_json:
        return print_json(found.to_json())
    print_result(text(found, result_width()))


def _models(target: str, models: str, flags: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the flags of each model of --models, by its name."""
    if is_job_file(target):
        raise ConfigError(f"--models: expected DATA and --prompt, not the job file {target}")
    given = next((name for name in ("model", "url", "token_price", "output") if flags[name] is not None), None)
    if given is not None:
        raise ConfigError(f"--{given.replace('_', '-')}: not with --models, which gives each model a job of its own")
    found = {}
    for text in filter(None, models.split(",")):
        match = _MODEL.fullmatch(text)
        if match is None:
            raise ConfigError(f"--models {text}: expected NAME, NAME@URL or NAME@URL=IN/OUT")
        own = {"hourly_price": None} if match["url"] else {}  # a server is paid by tokens
        found[match["model"]] = match.groupdict() | own
    if len(found) < 2:
        raise ConfigError(f"--models {models}: expected at least two models, with commas")
    return found


def _jobs_of(
    target: str, flags: dict[str, Any], rows: int, overlays: dict[str, Any]
) -> tuple["JobConfig", "JobConfig"]:
    """Return the job of the compared rows, which are the first ones, and that of all rows."""
    few = {"limit": min(rows, overlays["limit"] or rows), "sets": (*overlays["sets"], "run.max_error_rate=1")}
    return job_of(target, flags, **overlays | few), job_of(target, flags, **overlays)


def _counts(text: str | None) -> tuple[int, ...]:
    try:
        counts = tuple(int(each) for each in text.split(",")) if text else ()
    except ValueError:
        counts = (0,)
    if any(count < 1 for count in counts):
        raise ConfigError(f"--actors {text}: expected whole numbers from 1 on, with commas: 1,8,64")
    return counts
