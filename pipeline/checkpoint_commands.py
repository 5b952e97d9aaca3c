"""The commands that make and measure checkpoints: their options, and where they go."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from pipeline.console import answers, json_flag, print_json, print_result, say
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config import JobConfig


def _texts_of(data_flag: str, used_for: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that say where texts come from: a dataset, or a job's input and prompt."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(
            [
                click.option("data", data_flag, metavar="PATH", help=f"Parquet whose rows are {used_for}."),
                click.option("--column", metavar="NAME", help="The column of texts; text when left out."),
                click.option("--template", help='Texts over columns: "Summarize: {report}".'),
                click.option("--job", metavar="JOB.yaml", help="Take a job's input and prompt, as it would send them."),
                click.option("sets", "--set", metavar="KEY=VALUE", multiple=True,
                             help="Any other key of a job file: input.storage.profile=lab. May be repeated."),
            ]
        ):  # fmt: skip
            command = option(command)
        return command

    return decorate


def _job_of(
    model: str | None,
    data_flag: str,
    data: str | None,
    column: str | None,
    template: str | None,
    job: str | None,
    sets: tuple[str, ...],
    limit: int | None = None,
    engine: dict[str, str | None] | None = None,
) -> "JobConfig":
    """The job whose prompts are the texts."""
    from pipeline.config import job_from_flags, load_job

    if (job is None) == (data is None):
        raise ConfigError(f"give either {data_flag} PATH, with --column or --template, or --job JOB.yaml")
    if job is not None:
        if column is not None or template is not None:
            raise ConfigError("--column, --template: a job says what its prompts are; leave them out, or --job")
        given = [f"engine.{name}={value}" for name, value in (engine or {}).items() if value is not None]
        return load_job(job, (*sets, *given), (), limit)
    if column is not None and template is not None:
        raise ConfigError("--column and --template: give one of them")
    flags: dict[str, tuple[Any, str]] = {
        "model.path": (model, "MODEL"),
        "input.path": (data, data_flag),
        "output.path": ("-", "the command line"),
    }
    if template is not None:
        flags["prompt.template"] = (template, "--template")
    else:
        flags["prompt.column"] = (column or "text", "--column")
    if limit is not None:
        flags["input.limit"] = (limit, "--limit")
    flags |= {f"engine.{name}": (value, f"--{name}") for name, value in (engine or {}).items() if value is not None}
    return job_from_flags(flags, sets)


@click.command("eval")
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("--against", metavar="MODEL", help="The reference: what all others are compared with.")
@_texts_of("--data", "read")
@click.option("--expected", metavar="COLUMN", help="A column with the right answers, to count the outputs equal to it.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N rows.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N",
              help="Most tokens of an output; 64, or the job's, when left out.")  # fmt: skip
@click.option("--device", help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", help="auto, bfloat16, float16 or float32.")
@json_flag
@answers
def eval_command(
    models: tuple[str, ...],
    against: str | None,
    data: str | None,
    column: str | None,
    template: str | None,
    job: str | None,
    sets: tuple[str, ...],
    expected: str | None,
    limit: int | None,
    max_tokens: int | None,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Measure what models are worth on texts, and what a quantized one lost against its original.

    \b
    Examples:
      pipeline eval out/qwen-awq --against Qwen/Qwen3-4B --data heldout.parquet --column text
      pipeline eval out/awq out/gptq --against models/base --job my.yaml --limit 200
      pipeline eval demo:target-awq --against demo:target --job jobs/summarize.yaml --limit 100

    On the texts: perplexity over all their tokens, the KL divergence from the reference over the whole vocabulary at
    each token, and how often both find the same token likeliest. On greedy outputs to the same texts: how many are the
    reference's token for token, and how many are those of --expected. Beside them tokens a second and memory.

    Compare with --dtype float32 to see the weights' loss alone: in bfloat16 sums round too.
    """
    from pipeline.engine.params import SamplingParams
    from pipeline.evaluate import Subject, evaluate

    first = models[0] if models else against
    if first is None and job is None:
        raise ConfigError("no MODEL: name a checkpoint, or a job with --job")
    config = _job_of(first, "--data", data, column, template, job, sets, limit, {"device": device, "dtype": dtype})
    measured = [Subject(path) for path in models] or ([] if against is not None else [Subject(config.model.path)])
    wanted = config.sampling_params()
    most = max_tokens or (wanted.max_tokens if job is not None else 64)
    params = SamplingParams(max_tokens=most, stop=wanted.stop, stop_token_ids=wanted.stop_token_ids)
    reference = None if against is None else Subject(against)
    found = evaluate(config, measured, reference, params, expected, say)
    if as_json:
        print_json(found.to_json())
    else:
        print_result(found.to_text())
