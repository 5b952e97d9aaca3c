"""What every command has in common: standard output kept for results, errors with their exit codes, `--json`.

Standard output holds results, standard error everything on the way. With `--json` standard output is one JSON object
and nothing else, also for errors. Exit codes are those of `errors.py`. What is printed here commands no terminal,
whatever names and messages are in it (`formatting.py`).
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NoReturn, TextIO

import click

from pipeline.cli.interrupt import was_raised
from pipeline.errors import ConfigError, EnvironmentFailed, Interrupted, PipelineError, TooManyRowErrors
from pipeline.formatting import printable_json, printable_lines
from pipeline.machine.caches import check_temporary_folder

json_flag = click.option("as_json", "--json", is_flag=True, help="Print one JSON object, and nothing else.")


def logging_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--verbose` and `--log-level` of commands that run a job."""
    level = click.option("--log-level", type=click.Choice(["debug", "info", "warning"]), default="info",
                         show_default=True, help="The least that is kept in the job's logs.")  # fmt: skip
    verbose = click.option("-v", "--verbose", is_flag=True, help="Show the driver's log as it is written, too.")
    return verbose(level(command))


def set_option(example: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--set`, where a command's other flags stand for a job file."""
    text = f"Any other key of a job file: {example}. May be repeated."
    return click.option("sets", "--set", metavar="KEY=VALUE", multiple=True, help=text)


def answers(command: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps standard output for the results of `command`, and turns its errors into a message and an exit code; with
    --json into a result, too."""

    @wraps(command)
    def answer(*args: Any, as_json: bool, **options: Any) -> None:
        click.get_current_context().obj = _claim_stdout()
        try:
            check_temporary_folder()
            command(*args, as_json=as_json, **options)
        except PipelineError as error:
            if as_json:
                print_json({"error": _error_json(error)})
            _say_error(error)
            sys.exit(error.exit_code)

    return answer


@contextmanager
def leave_with_exit_code() -> Iterator[None]:
    """Says what else ended a command: wrong usage, Ctrl-C, a defect. Leaves the process with the code that means it."""
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        _say_error(error)
        sys.exit(exit_code(error))


def exit_code(error: BaseException) -> int:
    """With which code a command leaves that ended with `error`."""
    match error:
        case SystemExit(code=code):
            return code if isinstance(code, int) else int(code is not None)
        case PipelineError() | click.exceptions.Exit():
            return error.exit_code
        case click.ClickException():
            return ConfigError.exit_code
        case KeyboardInterrupt() | click.Abort():
            return Interrupted.exit_code
        case BrokenPipeError():
            return 1
    return Interrupted.exit_code if was_raised() else PipelineError.exit_code


def _say_error(error: BaseException) -> None:
    match error:
        case PipelineError():
            count = len(getattr(error, "mistakes", ()))
            say(f"{count} mistakes:\n\n{error}" if count > 1 else f"Error: {error}")
            if isinstance(error, TooManyRowErrors | EnvironmentFailed | Interrupted):
                say("Nothing that was written is lost: the same command goes on from there.")
        case click.exceptions.Exit():
            return
        case click.ClickException():
            error.show()
        case KeyboardInterrupt() | click.Abort():
            say("Interrupted.")
        case BrokenPipeError():
            _leave_unread(sys.stdout)
        case _ if was_raised():
            say("Interrupted.")
        case _:
            import traceback

            say("".join(traceback.format_exception(error)))
            say("\nThis is a defect of this program, please report it with the lines above.")


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


def stdout_is_claimed() -> bool:
    """Whether results go to a real file, which a fork of this process can write to as well."""
    return click.get_current_context().obj is not None


def results_stream() -> TextIO:
    """Where results go, for what draws them by itself."""
    return click.get_current_context().obj or sys.stdout


def result_width() -> int | None:
    """The characters that a line of results may have; None where they do not go to a terminal."""
    return shutil.get_terminal_size().columns if results_stream().isatty() else None


def print_result(text: str) -> None:
    """Print a result for people."""
    _print_result(printable_lines(text))


def print_lines(text: str) -> None:
    """Print a text of this program's own, which another program reads, as it is."""
    _print_result(text)


def print_json(value: Mapping[str, Any]) -> None:
    """Print a result as one line of JSON."""
    _print_result(printable_json(json.dumps(value, ensure_ascii=False, allow_nan=False)))


def print_answer(found: Any, as_json: bool) -> None:
    """Print what has `to_json` and `to_text`."""
    if as_json:
        print_json(found.to_json())
    else:
        print_result(found.to_text())


def print_tables(found: Any, as_json: bool) -> None:
    """Print what has `to_json` and `to_text(width)`."""
    if as_json:
        print_json(found.to_json())
    else:
        print_result(found.to_text(result_width()))


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


def _error_json(error: PipelineError) -> dict[str, Any]:
    mistakes = [vars(mistake) for mistake in getattr(error, "mistakes", ())]
    return {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code, "mistakes": mistakes}
