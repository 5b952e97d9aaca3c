"""Options that several commands share, and extensions of click: help texts with headings and whole sentences."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from pipeline.presets import NAMES


class Grouped(click.Command):
    """A command whose help text groups options under headings. groups: heading -> names of parameters; the rest is
    listed under Other."""

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        shown = {option.name: record for option in options if (record := option.get_help_record(ctx))}
        for heading, names in self._groups.items():
            with formatter.section(heading):
                formatter.write_dl([shown.pop(name) for name in names])
        with formatter.section("Other"):
            formatter.write_dl(list(shown.values()))


class Commands(click.Group):
    """A group that lists the whole first sentence of each command; click cuts it short."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = {name: self.commands[name].get_short_help_str(limit=200) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(list(shown.items()))


var_option = click.option(
    "vars", "--var", metavar="NAME=VALUE", multiple=True,
    help="Set a variable declared in the job's vars: date=2026-11-20. May be repeated.",
)  # fmt: skip


def job_overlays(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that override a job file, in the form that `load_job` expects."""
    for option in reversed(
        [
            click.option("sets", "--set", metavar="KEY=VALUE", multiple=True,
                         help="Override one key of the job file: sampling.max_tokens=32. May be repeated."),
            click.option("presets", "--preset", type=click.Choice(NAMES), multiple=True,
                         help="Merge the preset for a kind of machine into the job file."),
            click.option("overlays", "--config", metavar="FILE", type=click.Path(), multiple=True,
                         help="Merge another YAML file of the same form into the job file. May be repeated."),
            var_option,
            click.option("--limit", type=click.IntRange(min=1), metavar="N",
                         help="Process only the first N rows. Another N is another job and needs its own output."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command
