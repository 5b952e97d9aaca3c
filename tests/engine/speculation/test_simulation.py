"""Simulated jobs, a few of the grid (the whole one: simulation.py): what is lost where drafts cannot pay, and won."""

import pytest

from tests.engine.speculation import machines
from tests.engine.speculation.simulation import Simulation, compare, job

SOME = 0.025  # lost at most in these; those of tiny steps lose the most


@pytest.mark.parametrize(
    ("machine", "text", "batch"),
    [
        ("COMPUTE", "HIGH", 16),
        ("COMPUTE", "LOW", 4),
        ("CPU", "LOW", 16),
        ("TINY", "LOW", 64),
        ("TINY", "ADVERSARY", 4),
        ("DRAFT_MODEL", "LOW", 4),
        ("BOTH", "LOW", 16),
    ],
)
def test_little_is_lost_where_drafts_do_not_pay(machine: str, text: str, batch: int) -> None:
    assert compare(getattr(machines, machine), getattr(machines, text), batch, 1500).loss < SOME


@pytest.mark.parametrize(
    ("machine", "text", "batch", "gain"),
    [
        ("MEMORY", "HIGH", 16, 3.0),
        ("DISPATCH", "HIGH", 1, 3.5),
        ("KINKED", "HIGH", 16, 2.3),
        ("DRAFT_MODEL", "HIGH", 1, 2.0),
        ("CPU", "DECAYING", 1, 1.6),
        ("BOTH", "HIGH", 64, 2.3),
    ],
)
def test_drafts_that_pay_are_made(machine: str, text: str, batch: int, gain: float) -> None:
    compared = compare(getattr(machines, machine), getattr(machines, text), batch, 1500)
    assert compared.plain_s / compared.auto_s[0] > gain


def test_the_account_bounds_what_measuring_loses() -> None:
    """A draft model of which nothing is accepted, and whose passes take as long as steps."""
    length_R = job(4, 6000, has_tail=False)
    times = [
        Simulation(machines.DRAFT_MODEL, machines.LOW, length_R, policy, 3).run(4).seconds for policy in ("auto", 0)
    ]
    assert times[0] / times[1] - 1.0 < 0.01
