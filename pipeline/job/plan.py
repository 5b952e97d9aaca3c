"""What a job is and what is left of it, found out before any model is loaded.

job file -> source -> windows -> fingerprint -> the output is ours -> one listing -> the windows that are left
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from pipeline.checkpoints.digest import asks_for_date, model_digest
from pipeline.checkpoints.locate import resolve_draft, resolve_model
from pipeline.config import JobConfig
from pipeline.data.output.parts import DoneUnits, PartStore
from pipeline.data.output.result_columns import output_schema
from pipeline.data.prompts import PromptSpec
from pipeline.data.source import Source, Window, cut_windows, open_source
from pipeline.data.units import Unit, UnitSpec
from pipeline.errors import OutputError
from pipeline.job.fingerprint import Fingerprint, fingerprint
from pipeline.stores.retries import RetryCounts


@dataclass(frozen=True)
class Plan:
    """All that follows from the job file, the input and the model; nothing of the output, but for the date that a chat
    template is told."""

    config: JobConfig
    source: Source
    windows: tuple[Window, ...]
    units: UnitSpec
    schema: pa.Schema  # of the output
    model: Path
    fingerprint: Fingerprint
    device: str  # "cpu" or "cuda", or with an index
    draft: Path | None = None

    @property
    def num_rows(self) -> int:
        return sum(window.num_rows for window in self.windows)

    @property
    def kept_types(self) -> dict[str, pa.DataType]:
        """Of each kept column, in the output."""
        return {name: self.schema.field(i).type for i, name in enumerate(self.units.kept)}

    def with_types_of(self, part: pa.Schema) -> "Plan":
        """This plan with the columns' types of a part that is there: one output has one schema, and versions before
        this one kept plain types."""
        if part.names != self.schema.names:
            return self
        fields = [f.with_type(there.type) for f, there in zip(self.schema, part, strict=True)]
        return replace(self, schema=pa.schema(fields))


@dataclass(frozen=True)
class WindowTask:
    """One window that is not complete, and the units of it that are done. Picklable: a read task."""

    window: Window
    done: frozenset[int]
    units_of: int | None  # as the parts that are there say


def make_plan(
    config: JobConfig,
    device: str,
    say: Callable[[str], None] | None = None,
    retries: RetryCounts | None = None,
) -> Plan:
    """Read footers and model files. `device`: what `engine.device` became. `say`: told of a model's download.
    `retries`: counts requests to stores that are tried again. Raises UserError's kinds."""
    source = open_source(config.input.path, config.input.storage, config.input.on_corrupt, retries)
    everything = (*source.schema.names, *source.conflicts)  # a column that cannot be kept is refused, not left out
    kept = everything if config.input.columns is None else tuple(config.input.columns)
    prompt = PromptSpec(config.prompt.column, config.prompt.template, config.prompt.messages, config.prompt.max_bytes)
    params = config.sampling_params()
    units = UnitSpec(
        prompt, kept, config.sampling_columns(), params.max_tokens, config.run.unit_tokens, config.run.unit_rows
    )
    source.check_columns(units.columns)
    prompt.check(source.schema)
    schema = output_schema(
        pa.schema([source.kept.field(name) for name in kept]), config.output.rename, params.logprobs is not None
    )
    windows = cut_windows(source, config.run.window_rows, config.run.window_bytes, config.input.limit)
    model = resolve_model(config.model.path, config.model.storage, say, retries)
    draft = resolve_draft(config.draft_model, config.model.storage, say, retries)
    kind = device.partition(":")[0]
    return Plan(
        config,
        source,
        windows,
        units,
        schema,
        model,
        fingerprint(config, source, model_digest(model), kind, asks_for_date(model)),
        device,
        draft,
    )


def what_is_left(plan: Plan, progress: DoneUnits) -> list[WindowTask]:
    """The windows that are not complete, in order."""
    tasks = []
    for window in plan.windows:
        of = progress.units_of(window.index)
        if not progress.complete(window.index):
            done = frozenset(unit for unit in range(of or 0) if progress.is_done(window.index, unit))
            tasks.append(WindowTask(window, done, of))
    return tasks


def check_units(task: WindowTask, units: Sequence[Unit], store: PartStore | str) -> Iterator[Unit]:
    """Of a window's units those to do, each made as it is asked for. Raises OutputError at once when the parts
    that are there were cut differently."""
    if task.units_of is not None and task.units_of != len(units):
        raise OutputError(
            f"output.path {store}: window {task.window.index} was cut into {task.units_of} units before "
            f"and into {len(units)} now; was the output written by another version of this program?"
        )
    return (units[i] for i in range(len(units)) if i not in task.done)
