"""What every command has in common: standard output kept for results, errors with their exit codes, `--json`.

Standard output holds results, standard error everything on the way. With `--json` standard output is one JSON object
and nothing else, also for errors. Exit codes are those of `errors.py`. What is printed here commands no terminal,
whatever names and messages are in it (`formatting.py`).
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, NoReturn, TextIO

import click

from pipeline.errors import ConfigError, EnvironmentFailed, Interrupted, PipelineError, TooManyRowErrors
from pipeline.formatting import printable_json, printable_lines

json_flag = click.option("as_json", "--json", is_flag=True, help="Print one JSON object, and nothing else.")


def answers(command: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps standard output for the results, and turns a command's errors into a message and an exit code, and
    with --json into the answer."""

    @wraps(command)
    def answer(*args: Any, as_json: bool, **options: Any) -> None:
        click.get_current_context().obj = _claim_stdout()
        answer_of(lambda: command(*args, as_json=as_json, **options), as_json)

    return answer


def answer_of(command: Callable[[], None], as_json: bool) -> None:
    try:
        command()
    except PipelineError as error:
        if as_json:
            print_json({"error": _error_json(error)})
        _print_error(error)
        sys.exit(error.exit_code)


def with_exit_codes(call: Callable[[], None]) -> None:
    try:
        call()
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ConfigError.exit_code)
    except (KeyboardInterrupt, click.Abort):
        say("Interrupted.")
        sys.exit(Interrupted.exit_code)
    except BrokenPipeError:
        _leave_unread(sys.stdout)
    except Exception:
        import traceback

        say(traceback.format_exc())
        say("\nThis is a defect of this program, please report it with the lines above.")
        sys.exit(PipelineError.exit_code)


def _claim_stdout() -> TextIO | None:
    """A stream to standard output for results alone. From here on, until the process ends, whatever libraries,
    their C code and child processes print there goes to standard error.

    None where standard output is not a real file: a test's.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(sys.stdout.fileno())
    except OSError:
        return None
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return open(kept, "w", encoding=sys.stdout.encoding, errors="replace")


def print_result(text: str) -> None:
    """Print a result for people."""
    _print_result(printable_lines(text))


def _print_result(text: str) -> None:
    results: TextIO | None = click.get_current_context().obj
    try:
        click.echo(text, file=results)
    except BrokenPipeError:
        _leave_unread(results or sys.stdout)
    except OSError:  # the terminal is gone; the exit code still says how it ended
        return


def _leave_unread(stream: TextIO) -> NoReturn:
    """Whoever reads has enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or Python complains at exit
    sys.exit(1)


def say(text: str) -> None:
    """Say something on the way. Nobody need be there: a terminal may be gone."""
    with suppress(OSError):
        click.echo(printable_lines(text), err=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Print a result as one line of JSON."""
    _print_result(printable_json(json.dumps(value, ensure_ascii=False, allow_nan=False)))


def _error_json(error: PipelineError) -> dict[str, Any]:
    mistakes = [vars(mistake) for mistake in getattr(error, "mistakes", ())]
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "exit_code": error.exit_code,
        "mistakes": mistakes,
    }


def _print_error(error: PipelineError) -> None:
    count = len(getattr(error, "mistakes", ()))
    say(f"{count} mistakes:\n\n{error}" if count > 1 else f"Error: {error}")
    if isinstance(error, TooManyRowErrors | EnvironmentFailed | Interrupted):
        say("Nothing that was written is lost: the same command goes on from there.")
