"""Settings that an actor needs, and the seam to what computes its rows. Picklable, without Ray."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from pipeline.data.output.result_columns import ResultShape
from pipeline.data.units import Unit
from pipeline.endpoint.spec import EndpointConfig, EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.engine.config import EngineConfig
from pipeline.engine.quality.reference_config import ReferenceConfig
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.job.actor.control_tokens import AuthorTexts
from pipeline.job.actor.tasks import JobTask
from pipeline.job.actor.tokenize import Chat
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

    def open(self, spec: "WorkSpec", retries: RetryCounts) -> tuple[ChildSpec, Callable[[], RowReader]]:
        """Return the engine process to start, and a function that makes the reader of rows meanwhile. retries: counts
        retried requests to stores."""
        ...

    def resuming(self, resolved: Mapping[str, Any]) -> "Backend":
        """Return the backend for a run that continues one with these resolved values."""
        ...


@dataclass(frozen=True)
class WorkSpec:
    """Settings that an actor needs. Picklable; storage options may hold secrets and are never shown.

    An `EngineConfig` names the folders in which the driver found the models. `model`, `draft` and `adapters` are the
    job file's values, for machines on which these folders do not exist.
    """

    backend: Backend
    model: str
    engine: EngineConfig | EndpointConfig
    params: SamplingParams
    output: str
    fingerprint: str
    run_id: str  # the run whose logs the actor writes
    log_level: Level = "info"
    seed: int = 0
    results: ResultShape = field(default_factory=ResultShape)  # the output's columns, without the kept ones
    chat: Chat | None = None
    author: AuthorTexts = AuthorTexts()  # noqa: RUF009  # frozen
    chat_template: str | None = None  # instead of the checkpoint's own
    revision: str | None = None  # model.revision of the job file
    draft: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)  # the job file's values of those that rows may use
    reference: ReferenceConfig | None = None  # for quality.sample, with the driver's folder of the model
    reference_model: str | None = None  # quality.model of the job file
    quality_sample: float = 0.0
    storage: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)  # fsspec options, by url prefix
    rename: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    kept_types: Mapping[str, pa.DataType] = field(default_factory=dict)  # of kept columns in a part, if not plain
    step_timeout_s: float = 300.0
    load_timeout_s: float = 3600.0
    sample: bool = False  # save rows for a later run and write no part
    retry_failed: bool = False  # recompute the error rows of existing parts
    retried_limits: Mapping[str, Any] = field(default_factory=dict)  # limits of those rows, if not the job's
    task: JobTask | None = None  # None: to generate
