"""Commands that make and measure checkpoints: quantize, eval."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.console import (
    handle_errors,
    json_flag,
    print_json,
    print_message,
    print_result,
    print_tables,
    set_option,
)
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config import JobConfig


@dataclass(frozen=True)
class _Texts:
    """Source of texts: a dataset, or a job's input and prompt. flag: the option that names the dataset."""

    flag: str
    data: str | None
    column: str | None
    template: str | None
    job: str | None
    sets: tuple[str, ...]

    def config(self, model: str | None, limit: int | None = None, **engine: str | None) -> "JobConfig":
        """Return the job whose prompts are the texts, with these engine keys. Raises ConfigError."""
        from pipeline.config import job_from_flags, load_job

        given = {name: value for name, value in engine.items() if value is not None}
        if (self.job is None) == (self.data is None):
            raise ConfigError(f"give either {self.flag} PATH, with --column or --template, or --job JOB.yaml")
        if self.job is not None:
            if self.column is not None or self.template is not None:
                raise ConfigError("--column, --template: --job defines the prompts already; leave one or the other out")
            sets = (*self.sets, *(f"engine.{name}={value}" for name, value in given.items()))
            return load_job(self.job, sets, (), limit)
        if self.column is not None and self.template is not None:
            raise ConfigError("--column and --template: give one of them")
        flags: dict[str, tuple[Any, str]] = {"model.path": (model, "MODEL"), "input.path": (self.data, self.flag)}
        flags["output.path"] = ("-", "the command line")
        if self.template is not None:
            flags["prompt.template"] = (self.template, "--template")
        else:
            flags["prompt.column"] = (self.column or "text", "--column")
        if limit is not None:
            flags["input.limit"] = (limit, "--limit")
        flags |= {f"engine.{name}": (value, f"--{name}") for name, value in given.items()}
        return job_from_flags(flags, self.sets)


def _texts_of(flag: str, used_for: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options that name the source of texts; the command receives them as `texts`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_texts(*args: Any, data: Any, column: Any, template: Any, job: Any, sets: Any, **options: Any) -> None:
            command(*args, texts=_Texts(flag, data, column, template, job, sets), **options)

        decorated: Callable[..., Any] = with_texts
        for option in reversed(
            [
                click.option("data", flag, metavar="PATH", help=f"Parquet whose rows are {used_for}."),
                click.option("--column", metavar="NAME", help="Column of texts; default: text."),
                click.option("--template", help='Texts over columns: "Summarize: {report}".'),
                click.option("--job", metavar="JOB.yaml", help="Use a job's input and prompt."),
                set_option("storage_options.s3.profile=lab"),
            ]
        ):
            decorated = option(decorated)
        return decorated

    return decorate


@click.command("eval")
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("--against", metavar="MODEL", help="Reference model for all comparisons.")
@_texts_of("--data", "read")
@click.option("--quantization", "kinds", multiple=True, type=click.Choice(["fp8", "int8", "int4-rtn", "nf4"]),
              help="Also measure the reference quantized on load. May be repeated.")  # fmt: skip
@click.option("--activation-dtype", type=click.Choice(["auto", "none", "fp8", "int8"]),
              help="Activation type of the models, not of the reference; default: the job's, or auto.")  # fmt: skip
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "none", "fp8"]),
              help="The reference with this KV cache, too.")  # fmt: skip
@click.option("--expected", metavar="COLUMN", help="A column with the right answers, to count the outputs equal to it.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N rows.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N",
              help="Most tokens of an output; 64, or the job's, when left out.")  # fmt: skip
@click.option("--device", help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
              help="Of what is computed with.")  # fmt: skip
@json_flag
@handle_errors
def eval_command(
    models: tuple[str, ...],
    against: str | None,
    texts: _Texts,
    kinds: tuple[str, ...],
    activation_dtype: str | None,
    kv_cache_dtype: str | None,
    expected: str | None,
    limit: int | None,
    max_tokens: int | None,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Measure models on texts, and the loss of a quantized model against its original.

    \b
    Examples:
      pipeline eval out/qwen-awq --against Qwen/Qwen3-4B --data heldout.parquet --column text
      pipeline eval out/awq out/gptq --against models/base --job my.yaml --limit 200
      pipeline eval demo:target-awq --against demo:target --job my.yaml --limit 100
      pipeline eval --against models/base --quantization int8 --quantization nf4 --job my.yaml
      pipeline eval out/awq --against out/awq --activation-dtype fp8 --job my.yaml

    Measures on the texts: perplexity, KL divergence from the reference over the whole vocabulary, and how often both
    models rank the same token first. Measures on greedy outputs: how many equal the reference's token for token, and
    how many equal --expected. Also shows tokens per second and memory.

    --dtype float32 isolates the loss of the weights; in bfloat16 sums round too. --activation-dtype fp8 works on any
    machine, slowly without hardware support, so you can measure its loss before you rent a GPU.
    """
    from pipeline.engine.sampling_params import SamplingParams
    from pipeline.evaluate import ModelVariant, evaluate
    from pipeline.job.actor.resolved_job import sampling_params

    first = models[0] if models else against
    if first is None and texts.job is None:
        raise ConfigError("no MODEL: name a checkpoint, or a job with --job")
    config = texts.config(first, limit, device=device, dtype=dtype)
    reference = None if against is None else ModelVariant(against)
    activations = activation_dtype or config.engine.activation_dtype
    measured = [ModelVariant(path, activation_dtype=activations) for path in models]
    if against is not None:
        measured += [ModelVariant(against, kind, activations) for kind in kinds]
        measured += [] if kv_cache_dtype is None else [ModelVariant(against, kv_cache_dtype=kv_cache_dtype)]
    elif kinds:
        raise ConfigError("--quantization: quantizes the reference on load; name it with --against")
    elif kv_cache_dtype is not None:
        raise ConfigError("--kv-cache-dtype: is compared with the reference's own; name that with --against")
    elif not measured:
        measured = [ModelVariant(config.model.path, config.model.quantization, activations)]
    sampling = sampling_params(config.sampling)
    max_tokens = max_tokens or (sampling.max_tokens if texts.job is not None else 64)
    params = SamplingParams(max_tokens=max_tokens, stop=sampling.stop, stop_token_ids=sampling.stop_token_ids)
    found = evaluate(config, measured, reference, params, expected, print_message)
    print_tables(found, as_json)


@click.command("quantize")
@click.argument("model", metavar="MODEL")
@click.option("--output", required=True, type=click.Path(), metavar="DIR",
              help="New folder for the checkpoint.")  # fmt: skip
@click.option("--method", type=click.Choice(["awq", "gptq", "rtn", "int8", "fp8"]), default="awq", show_default=True,
              help="awq, gptq: int4, calibrated on texts; rtn, int8, fp8: round to nearest.")  # fmt: skip
@click.option("--group-size", type=click.Choice(["32", "64", "128"]), default="128", show_default=True,
              help="Inputs that share a scale; int8 and fp8 have one scale per output.")  # fmt: skip
@_texts_of("--calibration", "calibrated with")
@click.option("--samples", type=click.IntRange(min=1), default=128, show_default=True, metavar="N",
              help="Number of calibration rows, chosen by --seed.")  # fmt: skip
@click.option("--max-length", type=click.IntRange(min=1), default=512, show_default=True, metavar="N",
              help="Maximum tokens of a text; longer texts are cut.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for the choice of rows.")
@click.option("--device", default="cpu", show_default=True, help="Device for gptq: cpu, cuda or cuda:N.")
@json_flag
@handle_errors
def quantize_command(
    model: str,
    output: str,
    method: Any,
    group_size: str,
    texts: _Texts,
    samples: int,
    max_length: int,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Quantize a checkpoint.

    \b
    Examples:
      pipeline quantize Qwen/Qwen3-4B --output models/qwen-awq --job my.yaml
      pipeline quantize models/base --output models/base-gptq --method gptq --calibration texts.parquet --column text
      pipeline quantize models/base --output models/base-int8 --method int8

    Calibrate on texts like those of the job: --job uses its input, rendered as the job sends it. The result is in a
    format that other engines read too: AutoAWQ (gemm) for int4, compressed-tensors for int8 and fp8.

    Writes to DIR.partial and renames it when it is complete; replaces nothing. After an interruption the same command
    resumes after the last written layer (awq, done by autoawq, starts again).
    """
    from pathlib import Path

    from pipeline.quantize import Recipe, quantize
    from pipeline.quantize.awq import check_installed
    from pipeline.quantize.recipe import CALIBRATED, check_plain

    recipe = Recipe(method, int(group_size))
    if method == "awq":
        check_installed()
    config = None
    if method in CALIBRATED:
        config = texts.config(model)
    elif texts.data is not None or texts.job is not None:
        raise ConfigError(f"--method {method} needs no texts; leave --calibration and --job out")
    import torch

    from pipeline.checkpoints.locate import resolve_model
    from pipeline.job.planning.resolution import resolve_prompts
    from pipeline.job.preview.dataset_tokens import read_samples
    from pipeline.tokenization.tokenizer import Tokenizer

    source = resolve_model(model, None if config is None else config.storage_options, print_message)
    fields, token_ids = check_plain(source), []
    if config is not None:
        length = min(max_length, fields.max_position)
        prompts = resolve_prompts(config, source)
        tokenizer = Tokenizer.from_folder(str(source), prompts.chat_template)
        read = read_samples(prompts, tokenizer, length, chosen=(samples, seed), cut=True)
        tokenizer.close()
        token_ids = read.token_ids
        left_out = "".join(f", {code} {count:,}" for code, count in read.left_out.items())
        print_message(f"calibrating with {len(token_ids):,} rows, {read.num_tokens:,} tokens{left_out}")
    target = Path(os.path.expanduser(output))
    quantize(source, target, recipe, token_ids, torch.device(device), print_message)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    before = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    rows = f"--job {texts.job}" if texts.job is not None else "--data heldout.parquet --column text"
    measure = f"pipeline eval {output} --against {model} {rows}"
    if as_json:
        print_json({"output": output, "method": method, "bytes": size, "bytes_before": before, "measure_with": measure})
    else:
        print_result(f"{output}: {size / 1e6:,.1f} MB of weights, {size / before:.0%} of {before / 1e6:,.1f} MB")
        print_result(f"To measure the loss:  {measure}")
