"""From a unit's completions to its part: the rows in the input's order, their counts, and a summary for the driver."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import PartName, PartStore, StoredPart
from pipeline.data.output.result_columns import output_schema
from pipeline.data.output.retried import RetriedRows
from pipeline.data.units import Unit
from pipeline.engine.params import Completion, RowQuality
from pipeline.errors import PipelineError
from pipeline.job.actor.error_rows import patched
from pipeline.job.actor.tasks.job_task import JobTask
from pipeline.job.actor.tasks.task_results import plain_logprobs
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.report.quality import QualityStats
from pipeline.report.record.computed import Computed
from pipeline.report.record.row_stats import (
    MAX_EXAMPLES,
    MAX_MESSAGE,
    ErrorExample,
    Histogram,
    LengthBucket,
    LoopedRows,
    ReasonedRows,
    RowStats,
    Timing,
    latency_of,
    length_bucket,
)

SAMPLES = "_pipeline/samples"

T = TypeVar("T")


class Write:
    """Turns a unit's completions into its part. Thread-safe."""

    def __init__(
        self,
        store: PartStore,
        fingerprint: str,
        rename: Mapping[str, str],
        logprobs: bool,
        metadata: Mapping[str, str],
        kept_types: Mapping[str, pa.DataType] | None = None,
        limits: Mapping[str, Any] | None = None,
        samples: bool = False,
        task: JobTask | None = None,
        reasoning: bool = False,
    ) -> None:
        """kept_types: of kept columns in a part; those that are not named stay as they are in a unit. limits: of rows
        that are computed again, where they are not the job's. samples: whether texts stand in lists. task: whose
        columns are in the place of texts. reasoning: whether texts are divided."""
        self._store = store
        self._fingerprint = fingerprint
        self._rename = dict(rename)
        self._logprobs = logprobs
        self._metadata = dict(metadata)
        self._kept_types = dict(kept_types or {})
        self._limits = dict(limits or {})
        self._samples = samples
        self._task = task
        self._reasoning = reasoning

    def __call__(self, unit: Unit, completions: list[Completion]) -> UnitSummary:
        """Commit the unit. `completions` holds each of its rows once, in any order."""
        started = time.monotonic_ns()
        table = self.table(unit, completions)
        written = self._store.write(self.name(unit), table, self._metadata)
        return UnitSummary(
            unit.window,
            unit.index,
            PartTotals.of_table(table),
            written,
            row_stats(unit, completions),
            (time.monotonic_ns() - started) // 1000,
        )

    def name(self, unit: Unit) -> PartName:
        """Of the unit's part."""
        return PartName(self._fingerprint, unit.window, unit.index, unit.of, unit.num_rows)

    def again(self, unit: Unit, completions: list[Completion], name: PartName, part: StoredPart) -> UnitSummary:
        """Put new results of some of its rows, which are `unit`, into a part that stands."""
        started = time.monotonic_ns()
        renewed = self.table(unit, completions)
        table = patched(part.table, renewed)
        retried = RetriedRows(part.metadata)
        retried.add(unit.places(), self._limits)
        self._store.rewrite(name, table, retried.in_notes(part.metadata), part.tag)
        return UnitSummary(
            unit.window,
            unit.index,
            PartTotals.of_table(table),
            True,
            row_stats(unit, completions),
            (time.monotonic_ns() - started) // 1000,
            PartTotals.of_table(renewed),
        )

    def sample(self, unit: Unit, completions: list[Completion], run_id: str, prompts: list[str | None]) -> None:
        """Rows of a unit as its part will have them, and their prompts as the model gets them, for people to read."""
        order = sorted(range(unit.num_rows), key=unit.places().__getitem__)
        column = pa.array([prompts[i] for i in order], pa.string())
        table = self.table(unit, completions).append_column("_prompt", column)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        name = f"{SAMPLES}/{run_id}/w{unit.window:05d}-u{unit.index:04d}.parquet"
        self._store.folder.replace(name, sink.getvalue().to_pybytes())

    def table(self, unit: Unit, completions: list[Completion]) -> pa.Table:
        """The part's rows, in the order of the input."""
        by_row = {c.row_id: c for c in completions}
        if len(completions) != unit.num_rows or by_row.keys() != set(range(unit.num_rows)):
            raise PipelineError(
                f"window {unit.window}, unit {unit.index}: {len(completions)} completions of {len(by_row)} different "
                f"rows came back for {unit.num_rows} rows; nothing of it is written"
            )
        done = [by_row[i] for i in range(unit.num_rows)]
        kept = unit.kept()
        kept = kept.cast(pa.schema([f.with_type(self._kept_types.get(f.name, f.type)) for f in kept.schema]))
        columns: list[Any] = [
            *self._answers(unit, done),
            [c.error for c in done],
            [c.error_message for c in done],
            [c.num_prompt_tokens for c in done],
            [c.num_cached_tokens for c in done],
            [c.num_generated_tokens for c in done],
            unit.own("source_file"),
            unit.own("source_row"),
        ]
        if self._logprobs:
            columns.append([self._own(c, _logprobs) for c in done])
        if self._reasoning:
            columns.append([self._own(c, lambda one: one.reasoning) for c in done])
            columns.append([c.num_thought_tokens for c in done])
        fields = None if self._task is None else self._task.fields
        shape = self._logprobs, self._samples, fields, self._reasoning
        schema = output_schema(kept.schema, self._rename, *shape)
        results = [
            c if isinstance(c, pa.ChunkedArray | pa.Array) else pa.array(c, schema.field(kept.num_columns + i).type)
            for i, c in enumerate(columns)
        ]
        table = pa.Table.from_arrays([*kept.columns, *results], schema=schema)
        return table.take(pa.array(sorted(range(unit.num_rows), key=unit.places().__getitem__)))

    def _finish_reason(self, completion: Completion) -> str | list[str] | None:
        if self._samples:
            return self._own(completion, lambda one: one.finish_reason)
        return completion.finish_reason  # of an error row too

    def _own(self, completion: Completion, value: Callable[[Completion], T]) -> T | list[T] | None:
        """The value of a row, or those of its samples where they stand in lists; null for an error row."""
        if completion.error is not None:
            return None
        return [value(one) for one in completion.each] if self._samples else value(completion)

    def _answers(self, unit: Unit, done: list[Completion]) -> list[Any]:
        """The columns of completions, or of the task in their place."""
        if self._task is not None:
            return self._task.columns(done, unit.own("_texts").to_pylist())
        return [[self._own(c, lambda one: one.text) for c in done], [self._finish_reason(c) for c in done]]


def _logprobs(completion: Completion) -> list[dict[str, Any]] | None:
    return plain_logprobs(completion.logprobs)


def row_stats(unit: Unit, completions: list[Completion]) -> RowStats:
    """What the unit's rows were like; of each error code the first rows by their place in the input. Lengths and times
    of completions are those of each sample."""
    completed = [c for c in completions if c.error is None]
    lengths: dict[int, LengthBucket] = {}
    generated: dict[int, list[int]] = {}
    for c in completed:
        bucket = length_bucket(c.num_prompt_tokens)
        row = LengthBucket(1, c.num_prompt_tokens, c.num_cached_tokens, c.num_generated_tokens)
        lengths[bucket] = lengths.get(bucket, LengthBucket()) + row
        generated.setdefault(bucket, []).extend(len(one.token_ids) for one in c.each)
    samples = [one for c in completed for one in c.each]
    timings = [Timing(one.queued_us, one.first_token_us, one.last_token_us, len(one.token_ids)) for one in samples]
    outputs = {bucket: Histogram.of(counts) for bucket, counts in sorted(generated.items())}
    lost: dict[str, Computed] = {}
    for c in completions:
        if c.num_lost_prompt_tokens or c.num_lost_generated_tokens:
            code, tokens = c.error or "", Computed(c.num_lost_prompt_tokens, c.num_lost_generated_tokens)
            lost[code] = lost.get(code, Computed()) + tokens
    loops = [len(one.token_ids) for one in samples if one.finish_reason == "length_loop"]
    looped = LoopedRows(len(loops), sum(loops))
    thoughts = [one.num_reasoning_tokens for one in samples if one.num_reasoning_tokens]
    reasoned = ReasonedRows(len(thoughts), sum(thoughts))
    quality = sum((_quality(c.quality) for c in completed if c.quality is not None), QualityStats())
    examples, by_length = _examples(unit, completions), dict(sorted(lengths.items()))
    return RowStats(latency_of(timings), by_length, examples, outputs, lost, looped, quality, reasoned)


def _quality(row: RowQuality) -> QualityStats:
    if row.why_not:
        return QualityStats(unmeasured={row.why_not: 1})
    right = row.served_right, row.reference_right
    return QualityStats.of_row(row.tokens, row.agreed, row.kl_nanonats, row.same_text, *right)


def _examples(unit: Unit, completions: list[Completion]) -> dict[str, tuple[ErrorExample, ...]]:
    places = unit.places()
    found: dict[str, list[ErrorExample]] = {}
    for c in completions:
        if c.error is not None:
            example = ErrorExample(*places[c.row_id], (c.error_message or "")[:MAX_MESSAGE])  # type: ignore[index]
            found.setdefault(c.error, []).append(example)
    by_place = {code: sorted(some, key=lambda e: (e.source_file, e.row)) for code, some in sorted(found.items())}
    return {code: tuple(some[:MAX_EXAMPLES]) for code, some in by_place.items()}
