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


def report(bench: str, figures: Mapping[str, Any], lines: Sequence[str], as_json: bool) -> None:
    """Print text, and the figures as one line of JSON to save in `benchmarks/results/`. as_json: print only JSON."""
    if not as_json:
        print("\n".join(lines) + "\n")
    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    print(json.dumps({"command": command, "date": f"{wall_time():%Y-%m-%d %H:%M}", "bench": bench, **figures}))


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
