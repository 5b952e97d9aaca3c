"""Options that several commands share, and what click's lack: an older name that is taken and not shown, finite ranges,
and help texts with headings and whole sentences."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from pipeline.presets import NAMES


class Renamed(click.Option):
    """An option that is also taken by the name it had before, `old`, which no help text and no shell shows."""

    def __init__(self, *args: Any, old: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._old = old

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        parser.add_option(self, [self._old], dest=self.name, action="store", nargs=1)


class FiniteRange(click.FloatRange):
    """Numbers of a range, without infinity where it has no upper end, and without NaN, which is in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number.", param, ctx)


class Grouped(click.Command):
    """A command whose options stand under headings, in this order; `groups`: heading -> names of parameters. What is in
    none of them stands under Other."""

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        for heading, names in self._groups.items():
            with formatter.section(heading):
                formatter.write_dl([shown.pop(name) for name in names])
        with formatter.section("Other"):
            formatter.write_dl(list(shown.values()))


FORMER_COMMANDS = {"render": "It is named `manifests` here.", "submissions": "Use Ray's own `ray job list`."}


class Commands(click.Group):
    """A group whose help text has the whole first sentence of each command (click's own cuts it short), and which says
    where a former command went."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] in FORMER_COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. {FORMER_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = {name: self.commands[name].get_short_help_str(limit=200) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(list(shown.items()))


var_option = click.option(
    "vars", "--var", metavar="NAME=VALUE", multiple=True,
    help="Set a variable that the job declares in vars: date=2026-11-20. May be repeated.",
)  # fmt: skip


def job_overlays(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that change a job file on the way in, as `load_job` takes them."""
    for option in reversed(
        [
            click.option("sets", "--set", metavar="KEY=VALUE", multiple=True,
                         help="Change one key of the job file: sampling.max_tokens=32. May be repeated."),
            click.option("presets", "--preset", type=click.Choice(NAMES), multiple=True,
                         help="Lay the preset of a kind of machine over the job file."),
            click.option("overlays", "--config", metavar="FILE", type=click.Path(), multiple=True,
                         help="Lay a file of the same form over the job file. May be repeated."),
            var_option,
            click.option("--limit", type=click.IntRange(min=1), metavar="N",
                         help="Only the first N rows. Another N is another job, with an output of its own."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command
