"""The commands of `pipeline bench`: options, and which benchmark they go to."""

import click

from pipeline.cli.commands.bench import measured, simulated
from pipeline.cli.options import Commands

_COMMANDS = (
    measured.plan_of_a_large_job,
    measured.engine_against_others,
    measured.host_time_of_a_step,
    measured.job_against_the_engine,
    measured.ladder_of_batching,
    measured.labels_told_or_generated,
    measured.plain_against_drafted,
    measured.grammars_against_free_text,
    simulated.rules_of_admission,
    simulated.choices_of_the_schedule,
    simulated.pools_of_machines,
    simulated.bounds_of_cards,
)


@click.group(cls=Commands)
def bench() -> None:
    """Measure this program on this machine."""


for _command in _COMMANDS:
    bench.add_command(_command)
