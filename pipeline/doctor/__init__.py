"""Whether this machine can run a job: versions, devices, memory, disks, kernels, stores, the model.

Owns `pipeline doctor`. Each check says what it found and, where that is not well, what to do. Looking at an output
includes the probe that a run makes there: files are created and removed. Loads no weights and downloads nothing.
No value of a storage option or of an environment variable is shown.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipeline.doctor import job_checks, machine_checks
from pipeline.doctor.check import Check, Setup
from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pipeline.doctor.fit import MemoryTable

__all__ = ["Check", "Setup", "diagnose", "exit_code", "memory_of"]


def diagnose(setup: Setup) -> Iterator[Check]:
    """Every check, as it is made."""
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
        except Exception as error:  # a broken library can raise anything, and the other checks are still worth making
            todo = "This may be a broken installation: install the package into a fresh virtual environment."
            yield Check(group, group, "failed", f"{type(error).__name__} while looking", todo)


def memory_of(setup: Setup) -> "MemoryTable | None":
    """What its model takes and how many sequences fit, here and on known cards; None where no model is at hand."""
    config = job_checks.model_config(setup)
    if config is None:
        return None
    from pipeline.doctor.fit import memory_table

    return memory_table(config, setup)


def exit_code(checks: list[Check]) -> int:
    """0; 3 where the environment failed in something, 2 where only what the user gave is wrong."""
    return max((check.exit_code for check in checks if check.state == "failed"), default=0)
