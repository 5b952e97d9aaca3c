"""Plan a job before any model is loaded.

job file -> resolved job -> windows -> fingerprint -> one listing of the output -> remaining windows
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from pipeline.checkpoints.adapters import adapter_digest
from pipeline.checkpoints.chat_template import folder_reads_date, reads_date
from pipeline.checkpoints.digest import model_digest
from pipeline.config import JobConfig
from pipeline.config.identity import window_bytes
from pipeline.data.output.parts import DoneUnits, PartName
from pipeline.data.source import InputWindow, Source, cut_windows
from pipeline.job.actor.resolved_job import ResolvedJob
from pipeline.job.actor.row_function import RowFunction
from pipeline.job.actor.rows_again import NO_ROWS, RowsAgain
from pipeline.job.dataflow.spec import WindowTask
from pipeline.job.planning.appended import Batches
from pipeline.job.planning.fingerprint import Fingerprint, fingerprint
from pipeline.job.planning.locate import Log
from pipeline.job.planning.resolution import Resolution, resolve_job, silent
from pipeline.stores.retries import RetryCounts


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A resolved job and its input. It depends on the output only for the date that a chat template prints."""

    job: ResolvedJob
    source: Source
    batches: Batches  # batches of appended input files
    windows: tuple[InputWindow, ...]
    schema: pa.Schema  # schema of the output
    fingerprint: Fingerprint
    device: str  # "cpu" or "cuda", or with an index
    again: RowsAgain = NO_ROWS  # rows that the run computes again

    @property
    def num_rows(self) -> int:
        return sum(window.num_rows for window in self.windows)

    @property
    def kept_types(self) -> dict[str, pa.DataType]:
        """Type of each kept column in the output."""
        return {name: self.schema.field(i).type for i, name in enumerate(self.job.units.kept)}


def make_plan(
    config: JobConfig,
    device: str,
    *,
    log: Log = silent,
    retries: RetryCounts | None = None,
    append: bool = False,
    row_fn: RowFunction | None = None,
) -> JobPlan:
    """Plan a job from its input's footers and the model's files. device: the resolved `engine.device`. The others: see
    `resolve_job`. Raises subclasses of UserError."""
    return plan_of(resolve_job(config, log=log, retries=retries, append=append, row_fn=row_fn), device)


def plan_of(found: Resolution, device: str) -> JobPlan:
    """Return the plan of a completed resolution."""
    job, source, batches, run = found.resolved(), found.source, found.batches, found.config.run
    template = job.chat_template
    if template is not None:
        dated = reads_date(template)
    else:
        dated = job.model is not None and folder_reads_date(job.model)
    return JobPlan(
        job=job,
        source=source,
        batches=batches,
        windows=cut_windows(source, run.window_rows, window_bytes(job.keys), found.config.input.limit),
        schema=found.schema,
        fingerprint=fingerprint(
            job.keys,
            source,
            {} if job.model is None else model_digest(job.model),
            device.partition(":")[0],
            reads_date=dated,
            chat_template=template,
            later_files=batches.later_files,
            adapters={name: adapter_digest(folder) for name, folder in job.adapters.items()},
            row_fn=None if job.row_fn is None else job.row_fn.to_identity(),
        ),
        device=device,
    )


def remaining_windows(plan: JobPlan, existing: DoneUnits, again: Iterable[PartName] = ()) -> list[WindowTask]:
    """Return the incomplete windows in order. existing: the units that have parts. again: parts to compute again."""
    remade: dict[int, set[int]] = {}
    for name in again:
        remade.setdefault(name.window, set()).add(name.unit)
    tasks = []
    for window in plan.windows:
        index = window.index
        if index in remade or not existing.complete(index):
            units = frozenset(remade.get(index, ()))
            tasks.append(WindowTask(window, existing.rows_of(index), existing.units_of(index), units))
    return tasks
