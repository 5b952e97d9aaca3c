"""Check whether this machine can run a job: versions, devices, memory, disks, kernels, stores, the model.

Owns `pipeline doctor`. Each check reports what it found and how to fix a problem. Checking an output includes the probe
that a run makes, which creates and removes files. Checks load no weights, download no models, and never show values of
storage options or environment variables.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipeline.doctor import job_checks, machine_checks
from pipeline.doctor.check import Check, Setup
from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pipeline.doctor.memory_table import MemoryTable

__all__ = ["Check", "Setup", "diagnose", "exit_code", "memory_of"]


def diagnose(setup: Setup) -> Iterator[Check]:
    """Yield the result of each check as soon as it is made."""
    checks: list[tuple[str, Callable[[Setup], Iterator[Check]]]] = [
        ("versions", machine_checks.versions),
        ("devices", machine_checks.devices),
        ("memory and disks", machine_checks.memory),
        ("kernels", machine_checks.kernels),
        ("job", job_checks.job),
        ("model", job_checks.model),
        ("input", job_checks.input),
        ("output", job_checks.output),
    ]
    for group, check in checks:
        try:
            yield from check(setup)
        except PipelineError as error:
            yield Check(group, group, "failed", str(error), exit_code=error.exit_code)
        except Exception as error:  # a broken library can raise anything; the other checks still run
            todo = "The installation may be broken: install the package into a new virtual environment."
            yield Check(group, group, "failed", f"the check raised {type(error).__name__}", todo)


def memory_of(setup: Setup) -> "MemoryTable | None":
    """Return the memory of the model and of its sequences, here and on known cards. None without a model."""
    model = job_checks.served_model(setup)
    if model is None:
        return None
    from pipeline.doctor.memory_table import memory_table

    return memory_table(model, setup.torch_device)


def exit_code(checks: list[Check]) -> int:
    """Return 3 if a check of the environment failed, 2 if only the user's job or options failed, else 0."""
    return max((check.exit_code for check in checks if check.state == "failed"), default=0)
