"""The command for prompts without a job file: generate."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeline.cli.commands.jobs import run_and_report
from pipeline.cli.console import answers, logging_options, print_json, print_result, say, set_option
from pipeline.cli.options import Grouped
from pipeline.errors import ConfigError, TooManyRowErrors

# flag, key of a job file, type, help
_GENERATE_FLAGS: tuple[tuple[str, str, Any, str], ...] = (
    ("--max-tokens", "sampling.max_tokens", int, "Most tokens of a completion; 256 when left out."),
    ("--n", "sampling.n", int, "Completions of each prompt; more than one need a --temperature above 0."),
    ("--temperature", "sampling.temperature", float, "0, the default, takes the likeliest token each time."),
    ("--top-p", "sampling.top_p", float, "Only the likeliest tokens that together have this probability."),
    ("--top-k", "sampling.top_k", int, "Only the K likeliest tokens; 0 and -1 are off."),
    ("--min-p", "sampling.min_p", float, "Only tokens at least this likely, relative to the likeliest."),
    ("--repetition-penalty", "sampling.repetition_penalty", float, "Above 1: what was said becomes less likely."),
    ("--seed", "sampling.seed", int, "Of the random numbers; the same seed gives the same ones."),
    (
        "--quantization",
        "model.quantization",
        click.Choice(["none", "int8", "int4-rtn", "nf4"]),
        "Quantize a 16-bit model on loading it.",
    ),
    ("--device", "engine.device", str, "auto, cpu, cuda or cuda:N."),
    ("--dtype", "engine.dtype", click.Choice(["auto", "bfloat16", "float16", "float32"]), "Of what is computed with."),
)


_GROUPS = {
    "Prompts": ("place", "prompt", "chat", "system", "limit"),
    "Output": ("output", "overwrite"),
    "Model": ("model", "quantization", "device", "dtype"),
    "Sampling": ("max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed"),
    "Form": ("json_schema", "choice"),
}


def _generate_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    for flag, _, kind, text in reversed(_GENERATE_FLAGS):
        command = click.option(flag, type=kind, help=text)(command)
    return command


@click.command(cls=Grouped, groups=_GROUPS)
@click.option("--model", default="demo:target-awq", show_default=True,
              help="A folder, a Hugging Face id, or demo:target-awq.")  # fmt: skip
@click.option("place", "--input", type=click.Path(allow_dash=True), metavar="PATH",
              help="A text file (a prompt a line), a .jsonl file, either also .gz or .zst; - for standard input; "
              "or a job's: Parquet, a folder, a glob, a url.")  # fmt: skip
@click.option("--prompt", "-p", help='The prompt, or a template over the input: "Summarize: {text}".')
@click.option("--chat", is_flag=True, help="Send prompts through the model's chat template.")
@click.option("--system", help="A system message; implies --chat.")
@click.option("--output", type=click.Path(), metavar="PATH",
              help="A new .jsonl or .parquet file; of a job, a folder.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the file of --output if it is there.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N prompts.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End a completion before this text. May be repeated.")
@click.option("--json-schema", metavar="FILE|TEXT", help="Completions are JSON of this schema, without blanks.")
@click.option("--choice", multiple=True, metavar="TEXT", help="Completions are one of these texts; repeat it for each.")
@_generate_flags
@set_option("engine.max_num_seqs=8")
@logging_options
@click.option("as_json", "--json", is_flag=True, help="Print one JSON object a line, one for each prompt.")
@answers
def generate(
    model: str,
    place: str | None,
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
    """Complete a handful of prompts, without a job file.

    \b
    Examples:
      pipeline generate --input prompts.txt
      pipeline generate --prompt "Why is the sky blue?" --model Qwen/Qwen3-4B --chat
      pipeline generate --prompt "Is it raining?" --choice yes --choice no
      pipeline generate --input rows.jsonl --prompt "Summarize: {text}" --output out.jsonl
      cat prompts.txt | pipeline generate --json --max-tokens 32
      pipeline generate --input 'data/*.parquet' --prompt "Summarize: {text}" --output out/new

    Of a .jsonl file without --prompt the key prompt, text or messages (a chat) is sent. Results come in the
    order of the input, to standard output or, whole at the end, to --output. A prompt that fails does not stop
    the others: its error is its result, and the exit code is 1.

    Parquet input is a job as with `pipeline run`, and so is a folder, glob or url of JSON Lines: --output is its
    folder, the same command goes on after an interruption, and with --json the report is printed.
    """
    from pipeline.config import job_from_flags
    from pipeline.generate import Saved, complete, is_dataset, prompt_of_dataset, read_prompts

    flags = {"model.path": (model, "--model"), **_sampling_flags(sampling, stop), **_form_flags(json_schema, choice)}
    if chat or system is not None:
        flags["prompt.chat"] = ({} if system is None else {"system": system}, "--chat")
    if place is not None and is_dataset(place):
        if output is None:
            raise ConfigError("--output: such an input is a job, whose results need a folder: --output out/my-job")
        if overwrite:
            raise ConfigError("--overwrite: a job's output is never overwritten; choose a new folder for --output")
        flags |= {"input.path": (place, "--input"), "output.path": (output, "--output")}
        flags |= {"name": (Path(output).name, "--output"), **prompt_of_dataset(place, prompt)}
        if limit is not None:
            flags["input.limit"] = (limit, "--limit")
        return run_and_report(job_from_flags(flags, sets), as_json=as_json, verbose=verbose, log_level=log_level)
    saved = None if output is None else Saved(output, overwrite)
    prompts = read_prompts(place, prompt, limit)
    flags |= {"input.path": (place or "-", "--input"), "output.path": (output or "-", "--output"), **prompts.key}
    done = complete(
        job_from_flags(flags, sets),
        prompts,
        saved,
        show=lambda answer: print_json(answer.to_json()) if as_json else print_result(answer.to_text()),
        say=say,
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
    """Keys of a job file, each with its value and flag."""
    flags: dict[str, tuple[Any, str]] = {}
    for flag, key, _, _ in _GENERATE_FLAGS:
        value = given[flag.removeprefix("--").replace("-", "_")]
        if value is not None:
            flags[key] = (value, flag)
    return flags | {"sampling.stop": (list(stop), "--stop")} if stop else flags
