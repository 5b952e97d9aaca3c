"""Options that benchmarks share, and how they tell what they found."""

import shlex
import sys
from collections.abc import Callable
from typing import Any

import click

from pipeline.cli.console import print_json, print_result
from pipeline.machine.host import wall_time


def _parse_range(context: click.Context, option: click.Parameter, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected two numbers, such as 16-128") from None


def parse_sizes(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(int(size) for size in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected numbers, such as 4,8,16, or none") from None


_SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("--model", {"metavar": "SHAPE|PATH", "help": "tiny, qwen3-0.6b or llama-8b (random weights, written when "
              "first asked for), each also as qwen3-0.6b-awq; demo, demo:target-awq; a folder or a Hugging Face id."}),
    "requests": ("--requests", {"type": click.IntRange(min=1), "help": "Requests of the workload."}),
    "rows": ("--rows", {"type": click.IntRange(min=1), "help": "Rows of the workload."}),
    "rounds": ("--rounds", {"type": click.IntRange(min=1), "help": "Counted rounds, in turn."}),
    "output_tokens": ("--output-tokens", {"metavar": "N-M", "callback": _parse_range,
                      "help": "Tokens that each request asks for."}),
    "threads": ("--threads", {"type": click.IntRange(min=1), "help": "Of each contender; else torch's own choice."}),
    "dtype": ("--dtype", {"type": click.Choice(["auto", "float32", "bfloat16", "float16"])}),
    "peers": ("--peer", {"metavar": "NAME=PATH", "multiple": True, "show_default": False,
              "help": "Another engine in an environment of its own. May be repeated."}),
    "folder": ("--folder", {"metavar": "DIR", "help": "Where checkpoints of shapes are written; else the cache."}),
}  # fmt: skip


def shared_options(**defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options that benchmarks share, each with this one's default."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, default in reversed(defaults.items()):
            flag, about = _SHARED[name]
            command = click.option(name, flag, default=default, **{"show_default": True, **about})(command)
        return command

    return decorate


def print_told(told: Any, as_json: bool) -> None:
    """A table for people and JSON as the last line; with --json that line alone. The line says what was typed and when,
    so that it can be kept as a results file (tools/performance)."""
    if not as_json:
        print_result(told.to_text() + "\n")
    print_json({"command": typed(), "date": f"{wall_time():%Y-%m-%d %H:%M}"} | told.to_json())


def typed() -> str:
    return shlex.join(["pipeline", *sys.argv[1:]])
