"""The steps of every publication: look at the destination, and replace its rows in one commit unless it holds them.

A destination commits only if it has not changed since it was looked at, and its commit records which output it holds.
So a repeated, concurrent or killed call never publishes rows twice.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from pipeline.errors import EnvironmentFailed
from pipeline.formatting import counted
from pipeline.job.publish.finished import FinishedOutput

_TRIES = 4


class Unsettled(Exception):
    """The commit was refused because the destination has changed, or its answer was lost."""


class Destination(Protocol):
    """Dataset or table. Both methods raise OutputError or EnvironmentFailed."""

    target: str

    def held(self, output: FinishedOutput) -> str | None:
        """Look at the destination. Return its version if it holds `output`, else None."""
        ...

    def write(self, output: FinishedOutput, log: Callable[[str], None]) -> str:
        """Replace the rows that `held` found, in one commit, and return the new version. Raises Unsettled."""
        ...


@dataclass(frozen=True)
class Published:
    """Contents of the destination. version: its commit. is_new: this call made it."""

    output: str
    target: str
    version: str
    is_new: bool
    rows: int
    error_rows: int
    parts: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        rows = f"{counted(self.rows, 'row')} ({counted(self.error_rows, 'error row')})"
        done = f"published {rows}" if self.is_new else f"already holds these {rows}, nothing to do"
        return f"{self.target}: {done}; {self.version}"


def publish(output: FinishedOutput, destination: Destination, log: Callable[[str], None]) -> Published:
    """Publish a finished output unless the destination holds it. Raises OutputError or EnvironmentFailed."""

    def result(version: str, is_new: bool) -> Published:
        errors = output.report.rows.errors
        return Published(
            output.store.path, destination.target, version, is_new, output.num_rows, errors, len(output.parts)
        )

    for attempt in range(_TRIES):
        time.sleep(2.0**attempt - 1)
        if (version := destination.held(output)) is not None:
            return result(version, is_new=False)
        try:
            return result(destination.write(output, log), is_new=True)
        except Unsettled as error:
            log(f"{error}; looking at {destination.target} again")
    raise EnvironmentFailed(f"{destination.target}: {_TRIES} commits failed, or other writers were faster")
