"""Command line and output of the scripts in this folder."""

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

import pipeline
from pipeline.errors import PipelineError
from pipeline.machine.host import wall_time

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


def help_text(doc: str | None) -> str:
    """Return a module's docstring as a command's help text. Indented paragraphs keep their line breaks."""
    return re.sub(r"\n\n(?= {4})", "\n\n\b\n", doc or "")


def script(doc: str | None) -> Callable[[Callable[..., None]], click.Command]:
    """Turn a function into a command, with its module's docstring as the help text."""
    return lambda function: click.command(help=help_text(doc), context_settings=SETTINGS)(clean_errors(function))


def clean_errors(function: Callable[..., None]) -> Callable[..., None]:
    """Show PipelineErrors as messages, without a traceback."""

    @wraps(function)
    def run(**options: Any) -> None:
        try:
            function(**options)
        except PipelineError as error:
            raise click.ClickException(str(error)) from error

    return run


def parse_sizes(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    sizes = () if text == "none" else text.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise click.BadParameter(f"{text!r}: expected positive numbers, such as 4,8,16, or none")
    return tuple(map(int, sizes))


def _parse_range(context: click.Context, option: click.Parameter, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected two numbers, such as 16-128") from None


_SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("--model", {"metavar": "SHAPE|PATH", "help": "A shape of `benchmarks.shapes`, such as tiny, qwen3-0.6b "
              "or qwen3-0.6b-awq (random weights, written at first use); demo, demo:target-awq; a folder or a Hugging "
              "Face id."}),
    "requests": ("--requests", {"type": click.IntRange(min=1), "help": "Requests of a round."}),
    "rows": ("--rows", {"type": click.IntRange(min=1), "help": "Rows of a round."}),
    "rounds": ("--rounds", {"type": click.IntRange(min=1), "help": "Measured rounds, alternating."}),
    "output_tokens": ("--output-tokens", {"metavar": "N-M", "callback": _parse_range,
                      "help": "Tokens that each request generates."}),
    "threads": ("--threads", {"type": click.IntRange(min=1), "help": "Threads of each engine; else torch's choice."}),
    "dtype": ("--dtype", {"type": click.Choice(["auto", "float32", "bfloat16", "float16"])}),
    "folder": ("--folder", {"metavar": "DIR", "help": "Folder for generated checkpoints; default: the cache."}),
}  # fmt: skip


def shared_options(**defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add shared options with the defaults of one benchmark."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, default in reversed(defaults.items()):
            flag, settings = _SHARED[name]
            command = click.option(name, flag, default=default, **{"show_default": True, **settings})(command)
        return command

    return decorate


json_flag = click.option("as_json", "--json", is_flag=True, help="Print only the line of JSON.")


def report(bench: str, figures: Mapping[str, Any], lines: Sequence[str], as_json: bool) -> None:
    """Print text, and the figures as one line of JSON to save in `benchmarks/results/`. as_json: print only JSON.

    The line names the folder of the measured package, by which `benchmarks.compare` recognizes a side.
    """
    if not as_json:
        print("\n".join(lines) + "\n")
    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    run = {"command": command, "date": f"{wall_time():%Y-%m-%d %H:%M}", "package": str(Path(pipeline.__file__).parent)}
    print(json.dumps({**run, "bench": bench, **figures}))


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
