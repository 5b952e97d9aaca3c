"""Settings that an actor needs, and the seam to what computes its rows. Picklable, without Ray."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

import pyarrow as pa

from pipeline.data.units import Unit
from pipeline.endpoint.spec import EndpointConfig, EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.engine.config import EngineConfig
from pipeline.engine.quality.reference_config import ReferenceConfig
from pipeline.engine.request import Request
from pipeline.job.actor.resolved_job import ResolvedJob
from pipeline.job.actor.rows_again import NO_ROWS, RowsAgain
from pipeline.job.process.child import ChildSpec
from pipeline.job.telemetry.logs import Level
from pipeline.report.record.data_warnings import ControlTokenRows
from pipeline.stores.retries import RetryCounts


class RowReader(Protocol):
    """Turn a unit's rows, which are texts or messages, into requests. Thread-safe."""

    def __call__(self, unit: Unit) -> tuple[Sequence[Request | EndpointRequest], list[Completion]]:
        """Return the requests, and the completions of rows that already failed."""
        ...

    def control_tokens(self, unit: Unit) -> ControlTokenRows:
        """Count the rows whose text holds control tokens."""
        ...

    def shown(self, prompt: str) -> str:
        """Return a prompt of a unit as the model receives it, as text."""
        ...


class Backend(Protocol):
    """Source of completions: this project's engine, or a server. Picklable."""

    def open(self, spec: "WorkSpec", retries: RetryCounts) -> tuple[ChildSpec, Callable[[], list[RowReader]]]:
        """Return the engine process to start, and a function that meanwhile makes the readers of rows, one for each of
        the job's prompts. retries: counts retried requests to stores."""
        ...

    def resuming(self, resolved: Mapping[str, Any]) -> "Backend":
        """Return the backend for a run that continues one with these resolved values."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkSpec:
    """A resolved job and the part of a run that its actors need. Picklable; storage options may hold secrets and are
    never shown.

    `engine` and `reference` name the folders in which the driver found the models; on a machine without these folders
    the actor finds them by the job file's values.
    """

    job: ResolvedJob = field(repr=False)
    backend: Backend
    engine: EngineConfig | EndpointConfig
    reference: ReferenceConfig | None = None  # for quality.sample
    output: str  # url or absolute path
    fingerprint: str  # first 8 digits, as in the names of parts
    date: datetime | None = None  # date that chat templates print
    run_id: str  # the run whose logs the actor writes
    log_level: Level = "info"
    metadata: Mapping[str, str] = field(default_factory=dict)  # for the footers of parts
    kept_types: Mapping[str, pa.DataType] = field(default_factory=dict)  # of kept columns in a part, if not plain
    sample: bool = False  # save rows for a later run and write no part
    again: RowsAgain = NO_ROWS  # rows of existing parts to compute again
