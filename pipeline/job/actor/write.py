"""Write a unit's completions to its part: rows in input order, their counts, and a summary for the driver."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.conditions import Condition
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import PartName, PartStore, StoredPart
from pipeline.data.output.result_columns import (
    ACCEPT,
    WHEN,
    ResultShape,
    output_schema,
    result_column,
    row_ids_of,
    without_dropped_by,
)
from pipeline.data.output.retried import RetriedRows, RowId
from pipeline.data.units import Unit
from pipeline.engine.completion import Completion, RowQuality
from pipeline.errors import PipelineError
from pipeline.job.actor.rows_again import patched
from pipeline.job.actor.steps import RowOfSteps
from pipeline.job.actor.tasks import JobTask, plain_logprobs
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.report.record.quality_stats import QualityStats
from pipeline.report.record.row_stats import (
    MAX_EXAMPLES,
    MAX_MESSAGE,
    Computed,
    CopiedRows,
    ErrorExample,
    Histogram,
    LengthBucket,
    LoopedRows,
    ReasonedRows,
    RowStats,
    StepStats,
    Timing,
    latency_of,
    length_bucket,
)

SAMPLES = "_pipeline/samples"
_UNCOMPUTED = Completion(None, [], "", "stop", 0)  # of each row that does not meet input.when

T = TypeVar("T")
C = TypeVar("C", LengthBucket, CopiedRows, StepStats)


class PartWriter:
    """Writer of parts. Thread-safe."""

    def __init__(
        self,
        store: PartStore,
        *,
        fingerprint: str,
        rename: Mapping[str, str],
        results: ResultShape,
        metadata: Mapping[str, str],
        kept_types: Mapping[str, pa.DataType] | None = None,
        limits: Mapping[str, Any] | None = None,
        task: JobTask | None = None,
        accept: Condition | None = None,
    ) -> None:
        """kept_types: types of kept columns in a part; other columns keep the unit's types. limits: of recomputed rows,
        if they differ from the job's. task: its columns replace text and finish reason. accept: condition of completed
        rows, over all other columns."""
        self._store = store
        self._fingerprint = fingerprint
        self._rename = dict(rename)
        self._results = results
        self._metadata = dict(metadata)
        self._kept_types = dict(kept_types or {})
        self._limits = dict(limits or {})
        self._task = task
        self._accept = accept

    def __call__(self, unit: Unit, completions: list[Completion]) -> UnitSummary:
        """Write the unit's part. `completions` contains each of its rows once, without dropped rows, in any order."""
        started = time.monotonic_ns()
        table = self.table(unit, completions)
        written = self._store.write(self.name(unit), table, self._metadata)
        return UnitSummary(
            unit.window,
            unit.index,
            totals=PartTotals.of_table(table),
            written=written,
            row_stats=row_stats(unit, completions),
            write_us=(time.monotonic_ns() - started) // 1000,
        )

    def name(self, unit: Unit) -> PartName:
        """Return the name of the unit's part."""
        return PartName(self._fingerprint, unit.window, unit.index, unit.num_units, unit.num_rows)

    def again(self, unit: Unit, completions: list[Completion], name: PartName, part: StoredPart) -> UnitSummary:
        """Replace rows of an existing part with new results. `unit` holds the recomputed rows."""
        started = time.monotonic_ns()
        renewed = self.table(unit, completions)
        table = patched(part.table, renewed)
        row_ids = set(unit.row_ids())
        old = part.table.filter(pa.array([row_id in row_ids for row_id in row_ids_of(part.table)]))
        steps = [field.name for field in self._results.steps]
        retried = RetriedRows(part.metadata)
        retried.add(unit.row_ids(), self._limits)
        self._store.rewrite(name, table, retried.in_notes(part.metadata), part.tag)
        return UnitSummary(
            unit.window,
            unit.index,
            totals=PartTotals.of_table(table),
            written=True,
            row_stats=row_stats(unit, completions) + replaced_stats(unit, old, steps),
            write_us=(time.monotonic_ns() - started) // 1000,
            renewed=PartTotals.of_table(renewed),
        )

    def sample(self, unit: Unit, completions: list[Completion], run_id: str, prompts: list[str | None]) -> None:
        """Save a unit's rows as they will be in its part, with the prompts that the model received, for people to
        read."""
        table, prompt_of = self.table(unit, completions), dict(zip(unit.row_ids(), prompts))
        table = table.append_column(
            "_prompt", pa.array([prompt_of[row_id] for row_id in row_ids_of(table)], pa.string())
        )
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        name = f"{SAMPLES}/{run_id}/w{unit.window:05d}-u{unit.index:04d}.parquet"
        self._store.folder.replace(name, sink.getvalue().to_pybytes())

    def table(self, unit: Unit, completions: list[Completion]) -> pa.Table:
        """Return the part's rows in input order; samples that are rows keep their own order."""
        by_row = {c.row_id: c for c in completions}
        dropped = unit.dropped()
        num_rows = unit.num_rows - len(dropped)
        if len(completions) != num_rows or by_row.keys() != set(range(unit.num_rows)).difference(dropped):
            raise PipelineError(
                f"window {unit.window}, unit {unit.index}: {len(completions)} completions of {len(by_row)} different "
                f"rows came back for {num_rows} rows; the part is not written"
            )
        by_row |= dict.fromkeys(dropped, _UNCOMPUTED)
        order = sorted(range(unit.num_rows), key=unit.row_ids().__getitem__)
        rows = [(i, index, one) for i in order for index, one in enumerate(self._rows_of(by_row[i]))]
        unit, done, each = (
            unit.of_rows([i for i, _, _ in rows]),
            [by_row[i] for i, _, _ in rows],
            [o for _, _, o in rows],
        )
        kept = unit.kept()
        fields = [f.with_type(self._kept_types.get(f.name, f.type)) for f in kept.schema]
        arrays = [c if c.type.equals(f.type) else c.cast(f.type) for c, f in zip(kept.columns, fields, strict=True)]
        kept = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
        columns: list[Any] = [
            *self._result_columns(unit, each),
            [c.error for c in done],
            [c.error_message for c in done],
            [c.num_prompt_tokens for c in done],
            [c.num_cached_tokens for c in done],
            [one.num_generated_tokens for one in each],
            unit.own("source_file"),
            unit.own("source_row"),
        ]
        if self._results.samples == "rows":
            columns.append([index for _, index, _ in rows])
        if self._results.logprobs:
            columns.append([self._own(one, lambda sample: plain_logprobs(sample.logprobs)) for one in each])
        if self._results.prompt_logprobs:
            columns.append([_of_prompt(by_row[i]) if index == 0 else None for i, index, _ in rows])
        if self._results.reasoning:
            columns.append([self._own(one, lambda sample: sample.reasoning) for one in each])
            columns.append([one.num_thought_tokens for one in each])
        if self._results.tool_calls:
            columns.append([self._own(one, lambda sample: sample.tool_calls) for one in each])
        for step in self._results.steps:
            columns.append([c.columns.get(step.name) if isinstance(c, RowOfSteps) else None for c in done])
        for field in self._results.returned:
            columns.append([c.returned.get(field.name) if isinstance(c, RowOfSteps) else None for c in done])
        schema = output_schema(kept.schema, self._rename, self._results)
        results = [
            c if isinstance(c, pa.ChunkedArray | pa.Array) else pa.array(c, schema.field(kept.num_columns + i).type)
            for i, c in enumerate(columns)
        ]
        if not self._results.dropped_by:
            return pa.Table.from_arrays([*kept.columns, *results], schema=schema)
        table = pa.Table.from_arrays([*kept.columns, *results], schema=without_dropped_by(schema))
        met = [True] * table.num_rows if self._accept is None else self._accept.met(table)
        dropped_by = [
            WHEN if one is _UNCOMPUTED else ACCEPT if one.error is None and not is_met else None
            for one, is_met in zip(each, met, strict=True)
        ]
        return table.append_column(schema.field(table.num_columns), pa.array(dropped_by, pa.string()))

    def _rows_of(self, completion: Completion) -> tuple[Completion, ...]:
        """Return the completions that become rows of the part."""
        return completion.each if self._results.samples == "rows" else (completion,)

    def _finish_reason(self, completion: Completion) -> str | list[str] | None:
        if self._results.samples == "lists":
            return self._own(completion, lambda one: one.finish_reason)
        return None if completion is _UNCOMPUTED else completion.finish_reason  # error rows have one too

    def _own(self, completion: Completion, value: Callable[[Completion], T]) -> T | list[T] | None:
        """Return the value of a row, or the list of values of its samples if they are stored in lists; null for error
        rows and dropped ones."""
        if completion.error is not None or completion is _UNCOMPUTED:
            return None
        return [value(one) for one in completion.each] if self._results.samples == "lists" else value(completion)

    def _result_columns(self, unit: Unit, done: list[Completion]) -> list[Any]:
        """Return the columns of completions, or those of the task instead."""
        if self._task is not None:
            return self._task.columns(done, unit.own("_texts").to_pylist())
        return [[self._text(c) for c in done], [self._finish_reason(c) for c in done]]

    def _text(self, completion: Completion) -> str | list[str] | None:
        if isinstance(completion, RowOfSteps):
            return completion.draft  # also if a later step failed
        return self._own(completion, lambda one: one.text)


def _of_prompt(completion: Completion) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of the prompt's tokens; null for the first, which has no predecessor."""
    found = plain_logprobs(completion.prompt_logprobs)
    return None if found is None else [None, *found]


def row_stats(unit: Unit, completions: list[Completion]) -> RowStats:
    """Return statistics of the unit's rows, with the first rows of each error code in input order. Lengths and times of
    completions count each sample."""
    completed = [c for c in completions if c.error is None]
    lengths: dict[int, LengthBucket] = {}
    generated: dict[int, list[int]] = {}
    for c in completed:
        bucket = length_bucket(c.num_prompt_tokens)
        row = LengthBucket(1, c.num_prompt_tokens, c.num_cached_tokens, c.num_generated_tokens)
        lengths[bucket] = lengths.get(bucket, LengthBucket()) + row
        generated.setdefault(bucket, []).extend(one.num_tokens for one in c.each)
    samples = [one for c in completed for one in c.each]
    timings = [Timing(one.queued_us, one.first_token_us, one.last_token_us, one.num_tokens) for one in samples]
    outputs = {bucket: Histogram.from_values(counts) for bucket, counts in sorted(generated.items())}
    lost: dict[str, Computed] = {}
    for c in completions:
        if c.num_lost_prompt_tokens or c.num_lost_generated_tokens:
            code, tokens = c.error or "", Computed(c.num_lost_prompt_tokens, c.num_lost_generated_tokens)
            lost[code] = lost.get(code, Computed()) + tokens
    loops = [one.num_tokens for one in samples if one.finish_reason == "length_loop"]
    looped = LoopedRows(len(loops), sum(loops))
    thoughts = [one.num_reasoning_tokens for one in samples if one.num_reasoning_tokens]
    reasoned = ReasonedRows(len(thoughts), sum(thoughts))
    quality = sum((_quality(c.quality) for c in completed if c.quality is not None), QualityStats())
    copies, images = [c.num_generated_tokens for c in completed if c.is_copy], unit.num_images()
    return RowStats(
        latency=latency_of(timings),
        lengths=dict(sorted(lengths.items())),
        errors=_examples(unit, completions),
        outputs=outputs,
        lost=lost,
        looped=looped,
        quality=quality,
        reasoned=reasoned,
        copied=CopiedRows(len(copies), sum(copies)),
        images=sum(images[c.row_id] for c in completed),  # type: ignore[index]
        steps=_steps([c for c in completed if isinstance(c, RowOfSteps) and c.columns]),
    )


def _steps(rows: list[RowOfSteps]) -> dict[str, StepStats]:
    """Return the statistics of the first prompt and of each step."""
    found: dict[str, StepStats] = {}
    for row in rows:
        each = {"": StepStats(1, 1, row.num_prompt_tokens, row.num_cached_tokens, row.num_generated_tokens)}
        for name, values in row.columns.items():
            tokens = [values[f"num_{kind}_tokens"] if values else 0 for kind in ("input", "cached", "generated")]
            each[name] = StepStats(values is not None, values["attempts"] if values else 0, *tokens)
            each[""] += StepStats(0, 0, *(-count for count in tokens))
        found = {name: found.get(name, StepStats()) + stats for name, stats in each.items()}
    return found


def replaced_stats(unit: Unit, rows: pa.Table, steps: Sequence[str]) -> RowStats:
    """Return the statistics that subtract the unit's rows in its part, which are replaced. Of times and of the lengths
    of single samples the part has none. steps: names of the job's steps."""
    names = ["error", "num_input_tokens", "num_cached_tokens", "num_generated_tokens", *steps]
    columns = zip(row_ids_of(rows), *(result_column(rows, name).to_pylist() for name in names), strict=True)
    index, old = {row_id: i for i, row_id in enumerate(unit.row_ids())}, dict[RowId, Completion]()
    for row_id, error, prompt, cached, generated, *of_steps in columns:
        done = Completion(index[row_id], [], "", "stop", prompt, cached, error=error)
        if steps:
            done = RowOfSteps(**vars(done), columns=dict(zip(steps, of_steps)))
        earlier = old[row_id].num_tokens if row_id in old else 0  # of other samples, if they are rows
        # a computed row computes its last prompt token at least
        old[row_id] = replace(done, token_count=earlier + generated, is_copy=cached == prompt)
    found = row_stats(unit, list(old.values()))
    return RowStats(
        lengths={longest: _negative(bucket) for longest, bucket in found.lengths.items()},
        copied=_negative(found.copied),
        images=-found.images,
        steps={name: _negative(stats) for name, stats in found.steps.items()},
    )


def _negative(counts: C) -> C:
    return type(counts)(*(-count for count in astuple(counts)))


def _quality(row: RowQuality) -> QualityStats:
    if row.reason:
        return QualityStats(unmeasured={row.reason: 1})
    right = row.served_right, row.reference_right
    return QualityStats.of_row(row.tokens, row.agreed, row.kl_nanonats, row.same_text, *right)


def _examples(unit: Unit, completions: list[Completion]) -> dict[str, tuple[ErrorExample, ...]]:
    row_ids = unit.row_ids()
    found: dict[str, list[ErrorExample]] = {}
    for c in completions:
        if c.error is not None:
            example = ErrorExample(*row_ids[c.row_id], (c.error_message or "")[:MAX_MESSAGE])  # type: ignore[index]
            found.setdefault(c.error, []).append(example)
    by_position = {code: sorted(some, key=lambda e: (e.source_file, e.row)) for code, some in sorted(found.items())}
    return {code: tuple(some[:MAX_EXAMPLES]) for code, some in by_position.items()}
