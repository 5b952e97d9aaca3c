"""`--sample N`: compute some rows of a job before the rest, for inspection.

They are saved like the finished rows of a stopped run (`actor/partial.py`), so the run that computes their units reuses
them; no part is written. In addition, each unit's rows are written to `_pipeline/samples/<run id>/` for readers.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.output.parts import SUCCESS, PartStore
from pipeline.data.output.result_columns import (
    REASONING_FIELDS,
    RESULT_NAMES,
    TOOL_CALLS_FIELD,
    result_column,
    result_names,
)
from pipeline.job.actor.partial import FOLDER as PARTIAL
from pipeline.job.actor.resolved_numerics import RESOLVED
from pipeline.job.actor.write import SAMPLES
from pipeline.job.dataflow.reading import evenly, shares
from pipeline.job.dataflow.spec import WindowTask
from pipeline.job.planning.fingerprint import JOB, Fingerprint, differs
from pipeline.job.telemetry.run_log import RUNS, load_runs

MAX_WINDOWS = 4  # each one is read completely


@dataclass(frozen=True)
class SampleRow:
    """A row as in the output: with lists if it may have several samples, or as one of them. prompt: as the model
    receives it; None for a row without one."""

    source_file: str
    source_row: int
    prompt: str | None
    text: str | list[str] | None
    finish_reason: str | list[str] | None
    num_input_tokens: int
    num_generated_tokens: int
    error: str | None
    error_message: str | None
    sample_index: int = 0  # if samples are rows
    results: dict[str, Any] = field(default_factory=dict)  # values of a task and of reasoning, by column


def sample_tasks(tasks: tuple[WindowTask, ...], rows: int) -> tuple[WindowTask, ...]:
    """Choose a few of the remaining windows, evenly spread, with `rows` rows in total."""
    chosen = evenly(tasks, min(MAX_WINDOWS, rows))
    counts = shares([task.window.num_rows for task in chosen], rows)
    return tuple(replace(task, sample=count) for task, count in zip(chosen, counts) if count)


def read_sample(store: PartStore, run_id: str) -> Iterator[SampleRow]:
    """Yield the rows of a run with --sample, in the order of windows and units."""
    for name in sorted(store.folder.names(f"{SAMPLES}/{run_id}")):
        raw = store.folder.read(f"{SAMPLES}/{run_id}/{name}")
        if raw is not None:
            yield from _rows_of(pq.read_table(io.BytesIO(raw)))


def _rows_of(table: pa.Table) -> Iterator[SampleRow]:
    prompts = table.column(table.num_columns - 1).to_pylist()
    part = table.select(list(range(table.num_columns - 1)))
    columns: dict[str, list[Any]] = {name: result_column(part, name).to_pylist() for name in result_names(part.schema)}
    columns["text"] = columns.pop("generated_text", [None] * part.num_rows)
    columns.setdefault("finish_reason", [None] * part.num_rows)
    names = [name for name in columns if name in SampleRow.__dataclass_fields__]
    own = {*RESULT_NAMES} - {f.name for f in (*REASONING_FIELDS, TOOL_CALLS_FIELD)}
    result_columns = [name for name in columns if name not in own and name not in names]
    for i, prompt in enumerate(prompts):
        results = {name: columns[name][i] for name in result_columns}
        yield SampleRow(prompt=prompt, results=results, **{name: columns[name][i] for name in names})


def forget_samples_of_another_job(store: PartStore, ours: Fingerprint) -> None:
    """Remove another job's samples from an output that contains nothing else, so that a prompt can be tried and changed
    without a new folder. Does nothing if anything else was computed."""
    if not differs(store, ours):
        return
    if SUCCESS in store.folder.names("") or any(name[0] not in "_." for name in store.folder.names("")):
        return
    runs = load_runs(store)
    if not runs or any(run.sample_rows == 0 or run.outcome == "running" for run in runs):
        return
    for folder in (PARTIAL, RUNS, *(f"{SAMPLES}/{run.run_id}" for run in runs)):
        for name in store.folder.names(folder):
            store.folder.remove(f"{folder}/{name}")
    store.folder.remove(RESOLVED)
    store.folder.remove(JOB)
