"""Common parts of all commands: output streams, errors with their exit codes, `--json`.

Results go to standard output, progress and messages to standard error. With `--json` standard output is one JSON
object, also for errors. Exit codes are those of `errors.py`. Control characters in names and messages are escaped
(`formatting.py`).
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

from pipeline.errors import ConfigError, EnvironmentFailed, Interrupted, PipelineError, TooManyRowErrors
from pipeline.formatting import printable_json, printable_lines
from pipeline.machine.caches import check_temporary_folder
from pipeline.machine.signals import was_raised

json_flag = click.option("as_json", "--json", is_flag=True, help="Print one JSON object, and nothing else.")


def logging_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--verbose` and `--log-level`, for commands that run a job."""
    level = click.option("--log-level", type=click.Choice(["debug", "info", "warning"]), default="info",
                         show_default=True, help="Lowest level to keep in the job's logs.")  # fmt: skip
    verbose = click.option("-v", "--verbose", is_flag=True, help="Also show the driver's log while it is written.")
    return verbose(level(command))


def set_option(example: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--set` to a command whose flags replace a job file."""
    text = f"Set any other key of a job file: {example}. May be repeated."
    return click.option("sets", "--set", metavar="KEY=VALUE", multiple=True, help=text)


def handle_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Reserve standard output for the results of `command`, and turn its errors into a message and an exit code; with
    --json also into a result."""

    @wraps(command)
    def wrapper(*args: Any, as_json: bool, **options: Any) -> None:
        click.get_current_context().obj = _claim_stdout()
        try:
            check_temporary_folder()
            command(*args, as_json=as_json, **options)
        except PipelineError as error:
            if as_json:
                print_json({"error": _error_json(error)})
            _print_error(error)
            sys.exit(error.exit_code)

    return wrapper


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print any other error (wrong usage, Ctrl-C, a bug) and exit with its code."""
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        _print_error(error)
        sys.exit(exit_code(error))


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ended with `error`."""
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


def _print_error(error: BaseException) -> None:
    match error:
        case PipelineError():
            count = len(getattr(error, "mistakes", ()))
            print_message(f"{count} mistakes:\n\n{error}" if count > 1 else f"Error: {error}")
            if isinstance(error, TooManyRowErrors | EnvironmentFailed | Interrupted):
                print_message("Written results are kept: the same command resumes from there.")
        case click.exceptions.Exit():
            return
        case click.ClickException():
            error.show()
        case KeyboardInterrupt() | click.Abort():
            print_message("Interrupted.")
        case BrokenPipeError():
            _leave_unread(sys.stdout)
        case _ if was_raised():
            print_message("Interrupted.")
        case _:
            import traceback

            print_message("".join(traceback.format_exception(error)))
            print_message("\nThis is a bug. Please report it with the traceback above.")


def _claim_stdout() -> TextIO | None:
    """Return a stream to standard output for results. From now on, output of libraries, their C code and child
    processes goes to standard error instead. Returns None if standard output is not a real file, as in tests.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(sys.stdout.fileno())
    except OSError:
        return None
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return open(kept, "w", encoding=sys.stdout.encoding, errors="replace")


def stdout_is_claimed() -> bool:
    """Return whether results go to a real file, which a fork of this process can also write to."""
    return click.get_current_context().obj is not None


def results_stream() -> TextIO:
    """Return the stream of results, for code that draws by itself."""
    return click.get_current_context().obj or sys.stdout


def result_width() -> int | None:
    """Return the terminal's width in characters; None if results do not go to a terminal."""
    return shutil.get_terminal_size().columns if results_stream().isatty() else None


def print_result(text: str) -> None:
    """Print a result for people."""
    _print_result(printable_lines(text))


def print_lines(text: str) -> None:
    """Print text that another program reads, unchanged."""
    _print_result(text)


def print_json(value: Mapping[str, Any]) -> None:
    """Print a result as one line of JSON."""
    _print_result(printable_json(json.dumps(value, ensure_ascii=False, allow_nan=False)))


def print_answer(found: Any, as_json: bool) -> None:
    """Print an object with `to_json` and `to_text`."""
    if as_json:
        print_json(found.to_json())
    else:
        print_result(found.to_text())


def print_tables(found: Any, as_json: bool) -> None:
    """Print an object with `to_json` and `to_text(width)`."""
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
    except OSError:  # the terminal was closed; the exit code still reports the result
        return


def _leave_unread(stream: TextIO) -> NoReturn:
    """Exit with 1 after the reader closed its end of the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # else Python prints an error at exit
    sys.exit(1)


def print_message(text: str) -> None:
    """Print a message to standard error, if the terminal still exists."""
    with suppress(OSError):
        click.echo(printable_lines(text), err=True)


def _error_json(error: PipelineError) -> dict[str, Any]:
    mistakes = [vars(mistake) for mistake in getattr(error, "mistakes", ())]
    return {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code, "mistakes": mistakes}
