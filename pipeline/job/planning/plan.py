"""What a job is and what is left of it, found out before any model is loaded.

job file -> source -> windows -> fingerprint -> one listing of the output -> the windows that are left
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.checkpoints.chat_template import asks_for_date, folder_asks_for_date
from pipeline.checkpoints.digest import model_digest
from pipeline.checkpoints.locate import resolve_draft, resolve_model
from pipeline.config import JobConfig
from pipeline.data.output.parts import DoneUnits, PartName
from pipeline.data.output.result_columns import output_schema
from pipeline.data.source import WINDOW_BYTES, Source, Window, cut_windows, open_source
from pipeline.data.units import UnitSpec
from pipeline.errors import ConfigError
from pipeline.job.actor.task_of_job import task_of, with_stored_pooling
from pipeline.job.actor.tasks import JobTask
from pipeline.job.actor.tokenize import chat_template
from pipeline.job.dataflow.spec import WindowTask
from pipeline.job.planning.appended import Batches
from pipeline.job.planning.checkpoint_limits import against_limits
from pipeline.job.planning.fingerprint import Fingerprint, fingerprint
from pipeline.job.planning.output_place import check_output_place
from pipeline.job.planning.reasoning_markers import with_reasoning_markers
from pipeline.job.planning.reference_model import resolve_reference
from pipeline.job.planning.sampling_defaults import with_model_defaults
from pipeline.stores.filesystem import storage_for
from pipeline.stores.retries import RetryCounts


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """All that follows from the job file, the input and the model; of the output only the date that a chat template is
    told."""

    config: JobConfig
    source: Source
    windows: tuple[Window, ...]
    units: UnitSpec
    schema: pa.Schema  # of the output
    model: Path
    draft: Path | None
    fingerprint: Fingerprint
    batches: Batches  # of input files that were appended
    device: str  # "cpu" or "cuda", or with an index
    chat_template: str | None = None  # that of prompt.chat.template
    retried_limits: Mapping[str, Any] = field(default_factory=dict)  # of error rows, where not the output's own
    reference: Path | None = None  # of the quality watch
    task: JobTask | None = None  # None: to generate

    @property
    def num_rows(self) -> int:
        return sum(window.num_rows for window in self.windows)

    @property
    def kept_types(self) -> dict[str, pa.DataType]:
        """Of each kept column, in the output."""
        return {name: self.schema.field(i).type for i, name in enumerate(self.units.kept)}


def make_plan(
    config: JobConfig,
    device: str,
    say: Callable[[str], None] | None = None,
    retries: RetryCounts | None = None,
    batches: Batches | None = None,
) -> JobPlan:
    """Read footers and model files. `device`: what `engine.device` became. `say`: told of a model's download.
    `retries`: counts requests to stores that are tried again. `batches`: the output's, which follow the files of its
    first run. Raises UserError's kinds."""
    check_output_place(config)
    model = resolve_model(config.model.path, config.storage, say, retries, revision=config.model.revision)
    for _, refused in against_limits(config, model):
        raise refused
    config = with_stored_pooling(with_model_defaults(config, model, say), model)
    config = with_reasoning_markers(config, model)
    given, batches = config.input, batches or Batches()
    source = open_source(
        given.path,
        storage_for(given.path, config.storage),
        given.on_corrupt,
        retries,
        batches.is_later,
        given.has_requests,
    )
    config = config.of_lines(source.requests)
    task = task_of(config, model)
    if say is not None and source.requests is not None and source.requests.ignored:
        say(f"fields of the requests that change nothing here: {', '.join(source.requests.ignored)}")
    source, batches = batches.arranged(source)
    if config.input.limit is not None and (batches.more or batches.later_files):
        raise ConfigError("input.limit: files cannot be appended to an output of the first rows alone; leave one out")
    kept = source.every_column if config.input.columns is None else tuple(config.input.columns)
    units = config.unit_spec(kept).of_input(source.every_column)
    source.check_columns(units.columns)
    units.prompt.check(source.schema)
    if units.texts is not None:
        units.texts.check(source.schema)
    kept_schema = pa.schema([source.kept.field(name) for name in kept])
    shape = config.result_shape(None if task is None else task.fields)
    schema = output_schema(kept_schema, config.output.rename, shape)
    windows = cut_windows(source, config.run.window_rows, WINDOW_BYTES, config.input.limit)
    draft = resolve_draft(config.speculation.model, config.storage, say, retries)
    reference = resolve_reference(config, model, say, retries)
    template = chat_template(config, model)
    dated = folder_asks_for_date(model) if template is None else asks_for_date(template)
    ours = fingerprint(
        config, source, model_digest(model), device.partition(":")[0], dated, template, batches.later_files
    )
    return JobPlan(
        config=config,
        source=source,
        windows=windows,
        units=units,
        schema=schema,
        model=model,
        draft=draft,
        fingerprint=ours,
        batches=batches,
        device=device,
        chat_template=template,
        reference=reference,
        task=task,
    )


def what_is_left(plan: JobPlan, stood: DoneUnits, again: Iterable[PartName] = ()) -> list[WindowTask]:
    """The windows that are not complete, in order. `again`: parts that stand, and are to be made once more."""
    remade: dict[int, set[int]] = {}
    for name in again:
        remade.setdefault(name.window, set()).add(name.unit)
    tasks = []
    for window in plan.windows:
        index, of = window.index, stood.units_of(window.index)
        if index in remade or not stood.complete(index):
            done = {unit for unit in range(of or 0) if stood.is_done(index, unit)} - remade.get(index, set())
            tasks.append(WindowTask(window, frozenset(done), of))
    return tasks
