"""Flags that describe a job without a job file, for the commands that take JOB.yaml or DATA."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.console import print_message
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config import JobConfig

_JOB_ENDINGS = (".yaml", ".yml")
_OPTIONS = (
    click.option("--prompt", "-p", help='Prompt, a template over the columns: "Summarize: {text}". Default: the column '
                 "messages or prompt, or the requests of a file for OpenAI's Batch API."),
    click.option("--model", metavar="NAME", help="A folder, a GGUF file, a Hugging Face id, or demo:target-awq. With "
                 "--url: the server's."),
    click.option("--url", help="Use a server with OpenAI's API, such as http://localhost:8000/v1."),
    click.option("--chat/--no-chat", default=None,
                 help="Send the prompt as the user's turn of a chat, or as plain text. Default: as a turn if the model "
                 "has a chat template."),
    click.option("--system", metavar="TEXT", help="System message; implies --chat."),
    click.option("--labels", metavar="A,B,...", help="Choose one of these labels for each row; "
                 "without --url also their probabilities."),
    click.option("--schema", metavar="FILE", help="Constrain completions to JSON of this schema."),
    click.option("--max-tokens", type=int, help="Maximum tokens of a completion."),
    click.option("--temperature", type=float, help="Sampling temperature; 0, the default, is greedy."),
    click.option("--budget", type=float, metavar="USD",
                 help="Stop, resumably, before the job costs more; needs a price."),
    click.option("--hourly-price", type=float, metavar="USD", help="Price of this machine per hour."),
    click.option("--token-price", metavar="IN/OUT",
                 help="With --url: dollars per million tokens in and out, such as 0.15/0.60."),
    click.option("--output", metavar="DIR",
                 help="Folder for the results; default: out/DATA-DIGEST, the same for the same flags."),
)  # fmt: skip
NAMES = ("prompt", "model", "url", "chat", "system", "labels", "schema", "max_tokens", "temperature", "budget",
         "hourly_price", "token_price", "output")  # fmt: skip


def data_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags to a command. They reach it together, as `flags`."""

    @wraps(command)
    def with_flags(**options: Any) -> None:
        command(flags={name: options.pop(name) for name in NAMES}, **options)

    for option in reversed(_OPTIONS):
        with_flags = option(with_flags)
    return with_flags


def is_job_file(target: str) -> bool:
    return target.endswith(_JOB_ENDINGS)


def job_of(target: str, flags: dict[str, Any], **overlays: Any) -> "JobConfig":
    """Return the job of a job file, or of data and flags. Raises ConfigError."""
    if not is_job_file(target):
        from pipeline.starter.job_of_data import job_of_data

        return job_of_data(target, flags, print_message, **overlays)
    from pipeline.config import load_job

    if given := next((name for name, value in flags.items() if value is not None), None):
        raise ConfigError(
            f"--{given.replace('_', '-')}: describes a job without a job file; change {target}, or override its key "
            "with --set"
        )
    return load_job(target, **overlays)
