"""Command that completes prompts without a job file: generate."""

import sys
from collections.abc import Callable
from typing import Any

import click

from pipeline.cli.console import handle_errors, logging_options, print_json, print_message, print_result, set_option
from pipeline.cli.options import Grouped
from pipeline.errors import ConfigError, TooManyRowErrors

# flag, key of a job file, type, help
_GENERATE_FLAGS: tuple[tuple[str, str, Any, str], ...] = (
    ("--max-tokens", "sampling.max_tokens", int, "Maximum tokens of a completion; default: 256."),
    ("--n", "sampling.n", int, "Completions per prompt; more than one need a --temperature above 0."),
    ("--temperature", "sampling.temperature", float, "Sampling temperature; 0, the default, is greedy."),
    ("--top-p", "sampling.top_p", float, "Sample from the most likely tokens whose probabilities add up to this."),
    ("--top-k", "sampling.top_k", int, "Sample from the K most likely tokens; 0 and -1 are off."),
    ("--min-p", "sampling.min_p", float, "Minimum probability, relative to the most likely token."),
    ("--repetition-penalty", "sampling.repetition_penalty", float, "Above 1: penalize tokens that occurred before."),
    ("--seed", "sampling.seed", int, "Random seed."),
    (
        "--quantization",
        "model.quantization",
        click.Choice(["none", "fp8", "int8", "int4-rtn", "nf4"]),
        "Quantize a 16-bit model while loading it.",
    ),
    ("--device", "engine.device", str, "Device: auto, cpu, cuda or cuda:N."),
    ("--dtype", "engine.dtype", click.Choice(["auto", "bfloat16", "float16", "float32"]), "Compute dtype."),
)


_GROUPS = {
    "Prompts": ("target", "prompt", "chat", "system", "limit"),
    "Output": ("output", "overwrite"),
    "Model": ("model", "adapter", "url", "quantization", "device", "dtype"),
    "Sampling": ("max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed"),
    "Form": ("json_schema", "choice"),
}


def _generate_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    for flag, _, kind, text in reversed(_GENERATE_FLAGS):
        command = click.option(flag, type=kind, help=text)(command)
    return command


@click.command(cls=Grouped, groups=_GROUPS)
@click.option("--model", metavar="NAME",
              help="A folder, a Hugging Face id, or demo:target-awq (default). With --url: the server's.")  # fmt: skip
@click.option("--adapter", metavar="NAME", help="LoRA adapter: a folder, a Hugging Face id, or demo:short.")
@click.option("--url", metavar="URL", help="Use a running server with OpenAI's API, such as http://localhost:8000/v1.")
@click.option("target", "--input", type=click.Path(allow_dash=True), metavar="PATH",
              help="Text file (one prompt a line) or .jsonl file, also .gz or .zst; - for standard input.")  # fmt: skip
@click.option("--prompt", "-p", help='Prompt, or a template over the input: "Summarize: {text}".')
@click.option("--chat", is_flag=True, help="Apply the model's chat template.")
@click.option("--system", help="System message; implies --chat.")
@click.option("--output", type=click.Path(), metavar="PATH",
              help="New .jsonl or .parquet file.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the file of --output if it exists.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Process only the first N prompts.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop a completion before this text. May be repeated.")
@click.option(
    "--json-schema", metavar="FILE|TEXT", help="Constrain completions to JSON of this schema, without whitespace."
)
@click.option(
    "--choice",
    multiple=True,
    metavar="TEXT",
    help="Constrain completions to one of these texts; repeat the option for each.",
)
@_generate_flags
@set_option("engine.max_num_seqs=8")
@logging_options
@click.option("as_json", "--json", is_flag=True, help="Print one JSON object per prompt, each on its own line.")
@handle_errors
def generate(
    model: str | None,
    adapter: str | None,
    url: str | None,
    target: str | None,
    prompt: str | None,
    chat: bool,
    system: str | None,
    output: str | None,
    overwrite: bool,
    limit: int | None,
    stop: tuple[str, ...],
    json_schema: str | None,
    choice: tuple[str, ...],
    sets: tuple[str, ...],
    verbose: bool,
    log_level: Any,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Complete a few prompts without a job file.

    \b
    Examples:
      pipeline generate --input prompts.txt
      pipeline generate --prompt "Why is the sky blue?" --model Qwen/Qwen3-4B --chat
      pipeline generate --prompt "Is it raining?" --choice yes --choice no
      pipeline generate --prompt "Why is the sky blue?" --url http://localhost:8000/v1 --chat
      pipeline generate --input rows.jsonl --prompt "Summarize: {text}" --output out.jsonl
      cat prompts.txt | pipeline generate --json --max-tokens 32

    Without --prompt a .jsonl file must have the key prompt, text or messages (a chat). Results are printed in the
    order of the input, or written to --output when all are done. A prompt that fails does not stop the others: its
    error is its result, and the exit code is 1.

    Parquet, CSV, a folder, a glob or a url is a job: `pipeline run DATA --prompt TEXT --model NAME`.
    """
    from pipeline.config import job_from_flags
    from pipeline.generate import Saved, complete, is_dataset, read_prompts

    flags: dict[str, Any] = {"model.path": (model or "demo:target-awq", "--model")}
    if url is not None:
        flags = {"server": ({"base_url": url, "model": model}, "--url")}
    if adapter is not None:
        flags |= {"model.adapters": ({"adapter": adapter}, "--adapter"), "model.adapter": ("adapter", "--adapter")}
    flags |= {**_sampling_flags(sampling, stop), **_form_flags(json_schema, choice)}
    if chat or system is not None:
        flags["prompt.chat"] = ({} if system is None else {"system": system}, "--chat")
    if target is not None and is_dataset(target):
        raise ConfigError(
            f"--input {target}: expected a text or .jsonl file; for a dataset: pipeline run {target} --prompt TEXT"
        )
    saved = None if output is None else Saved(output, overwrite)
    prompts = read_prompts(target, prompt, limit)
    flags |= {"input.path": (target or "-", "--input"), "output.path": (output or "-", "--output"), **prompts.key}
    done = complete(
        job_from_flags(flags, sets),
        prompts,
        saved,
        show=lambda answer: print_json(answer.to_json()) if as_json else print_result(answer.to_text()),
        log=print_message,
    )
    if as_json and saved is not None:
        print_json({**vars(done), "output": output})
    if done.failed:
        sys.exit(TooManyRowErrors.exit_code)


def _form_flags(json_schema: str | None, choice: tuple[str, ...]) -> dict[str, tuple[Any, str]]:
    if json_schema is not None and choice:
        raise ConfigError("--json-schema, --choice: give one of the two")
    if choice:
        return {"sampling.structured_outputs.choice": (list(choice), "--choice")}
    if json_schema is None:
        return {}
    form = "json" if json_schema.lstrip().startswith("{") else "json_file"
    return {f"sampling.structured_outputs.{form}": (json_schema, "--json-schema")}


def _sampling_flags(given: dict[str, Any], stop: tuple[str, ...]) -> dict[str, tuple[Any, str]]:
    """Return keys of a job file, each with its value and flag."""
    flags: dict[str, tuple[Any, str]] = {}
    for flag, key, _, _ in _GENERATE_FLAGS:
        value = given[flag.removeprefix("--").replace("-", "_")]
        if value is not None:
            flags[key] = (value, flag)
    return flags | {"sampling.stop": (list(stop), "--stop")} if stop else flags
