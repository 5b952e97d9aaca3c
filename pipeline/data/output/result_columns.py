"""Result columns of the output: names, types, and their order after the kept input columns.

An output row has the kept input columns, then the result columns, for completed and error rows alike. The metadata of
each result field holds its original name, so that it is found after `output.rename` too.

An input row is one output row, unless samples are rows. Then each of its samples is an output row; they are adjacent in
one part, and an error row is sample 0. Every input row thus has exactly one sample 0.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.columns import did_you_mean
from pipeline.errors import ConfigError, PipelineError

RESULT_FIELDS: tuple[pa.Field, ...] = (
    pa.field("generated_text", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("error", pa.string()),  # a RowError code, or null
    pa.field("error_message", pa.string()),
    pa.field("num_input_tokens", pa.int32()),
    pa.field("num_cached_tokens", pa.int32()),
    pa.field("num_generated_tokens", pa.int32()),
    pa.field("source_file", pa.string()),  # relative to the input's root, "/"-separated
    pa.field("source_row", pa.int64()),  # from 0, in the file
)

_TOKEN = [pa.field("token_id", pa.int32()), pa.field("logprob", pa.float32())]
LOGPROBS_FIELD = pa.field("logprobs", pa.list_(pa.struct([*_TOKEN, pa.field("top", pa.list_(pa.struct(_TOKEN)))])))

PROMPT_LOGPROBS_FIELD = pa.field("prompt_logprobs", LOGPROBS_FIELD.type)  # null for the first token, as in vLLM
REASONING_FIELDS = (pa.field("reasoning", pa.string()), pa.field("num_reasoning_tokens", pa.int32()))
TOOL_CALLS_FIELD = pa.field("tool_calls", pa.string())  # JSON: the server's list of calls; null without calls

# Key of the condition that the row does not meet, or null; only in jobs with a condition
DROPPED_FIELD = pa.field("dropped_by", pa.string())
WHEN, ACCEPT = "input.when", "output.accept"  # its values: rows that were not computed, and completed ones

SAMPLED = (
    "generated_text",
    "finish_reason",
    "logprobs",
    "reasoning",
    "tool_calls",
)  # lists with one entry per sample; null for errors

# Form of the completions: one per row; lists, if rows may have several; or each in its own row.
SampleForm = Literal["one", "lists", "rows"]
SAMPLE_FIELD = pa.field("sample_index", pa.int32())  # from 0, with samples as rows

RESULT_NAMES: tuple[str, ...] = tuple(
    f.name
    for f in (
        *RESULT_FIELDS,
        SAMPLE_FIELD,
        LOGPROBS_FIELD,
        PROMPT_LOGPROBS_FIELD,
        *REASONING_FIELDS,
        TOOL_CALLS_FIELD,
        DROPPED_FIELD,
    )
)

OF_COMPLETIONS = ("generated_text", "finish_reason")  # replaced by the task's own columns in other tasks

_RESULT_KEY = b"pipeline.result"  # field metadata: original name of the result field


@dataclass(frozen=True)
class ResultShape:
    """Options that determine the result columns.

    samples: "lists" makes the columns of SAMPLED lists, "rows" adds SAMPLE_FIELD. reasoning: completions are split into
    reasoning and answer. tool_calls: the model may call tools. task_fields: columns of a job that does not generate;
    they replace OF_COMPLETIONS and exclude the other options. steps: columns of the job's steps. returned: those of its
    row function. dropped_by: the job has a condition; that column is the last one.
    """

    samples: SampleForm = "one"
    logprobs: bool = False
    prompt_logprobs: bool = False
    reasoning: bool = False
    tool_calls: bool = False
    task_fields: tuple[pa.Field, ...] | None = None
    steps: tuple[pa.Field, ...] = ()
    returned: tuple[pa.Field, ...] = ()
    dropped_by: bool = False

    def fields(self) -> list[pa.Field]:
        """Return the result columns in order, under their original names."""
        dropped = [DROPPED_FIELD] if self.dropped_by else []
        if self.task_fields is not None:
            return [*self.task_fields, *(f for f in RESULT_FIELDS if f.name not in OF_COMPLETIONS), *dropped]
        more = {
            SAMPLE_FIELD: self.samples == "rows",
            LOGPROBS_FIELD: self.logprobs,
            PROMPT_LOGPROBS_FIELD: self.prompt_logprobs,
            **dict.fromkeys(REASONING_FIELDS, self.reasoning),
            TOOL_CALLS_FIELD: self.tool_calls,
        }
        included = (f for f, is_included in more.items() if is_included)
        fields = [*RESULT_FIELDS, *included, *self.steps, *self.returned, *dropped]
        if self.samples == "lists":
            return [f.with_type(pa.list_(f.type)) if f.name in SAMPLED else f for f in fields]
        return fields


def step_field(name: str, shape: ResultShape, has_votes: bool = False) -> pa.Field:
    """Return the column of a step: a struct of its result columns and the number of its requests, null for rows that
    skipped it. Tokens are those of all its requests, the other values those of the last one. has_votes: add the number
    of samples with the same text."""
    fields = [f for f in shape.fields() if f.name not in ("source_file", "source_row")]
    counts = ["attempts", "votes"] if has_votes else ["attempts"]
    return pa.field(name, pa.struct([*fields, *(pa.field(count, pa.int32()) for count in counts)]))


def output_schema(kept: pa.Schema, rename: Mapping[str, str], shape: ResultShape = ResultShape()) -> pa.Schema:
    """Return the kept columns followed by the result columns, renamed by `rename` (result name -> output name).

    Raises ConfigError if a key of `rename` is not a result column, or if two columns would have the same name.
    """
    fields = shape.fields()
    known = RESULT_NAMES if shape.task_fields is None else tuple(f.name for f in fields)
    for name in rename:
        if name not in known:
            raise ConfigError(f"output.rename: {name!r} is not a result column{did_you_mean(name, known)}")
    results = [pa.field(rename.get(f.name, f.name), f.type, metadata={_RESULT_KEY: f.name.encode()}) for f in fields]
    used_names = [*kept.names, *(f.name for f in results)]
    repeated = {name for name, n in Counter(used_names).items() if n > 1}
    clashes = [f.name for f, r in zip(fields, results, strict=True) if r.name in repeated]
    if clashes:
        free = {name: _free_name(name, {*used_names, *RESULT_NAMES}) for name in clashes}
        write = ", ".join(f"{a}: {b}" for a, b in {**rename, **free}.items())
        raise ConfigError(
            f"input columns have the same names as result columns: {', '.join(clashes)}; set "
            f"output.rename: {{{write}}} in the job file, or leave those columns out of input.columns"
        )
    if repeated:
        raise ConfigError(f"input.columns: listed more than once: {', '.join(sorted(repeated))}")
    return pa.schema([*(pa.field(f.name, f.type) for f in kept), *results])


def _free_name(name: str, used_names: set[str]) -> str:
    n = 2
    while f"{name}_{n}" in used_names:
        n += 1
    return f"{name}_{n}"


def result_column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """Return a result column of a table of `output_schema` by its original name."""
    return table.column(table.schema.get_field_index(result_field(table.schema, name).name))


def result_field(schema: pa.Schema, name: str) -> pa.Field:
    """Return the field of a result column by its original name."""
    for f in schema:
        if f.metadata and f.metadata.get(_RESULT_KEY) == name.encode():
            return f
    if schema.names.count(name) == 1:
        return schema.field(name)
    raise PipelineError(f"the table has no result column {name!r}: build it with output_schema")


def without_dropped_by(schema: pa.Schema) -> pa.Schema:
    """Return the columns over which `output.accept` is evaluated."""
    return pa.schema([f for f in schema if (f.metadata or {}).get(_RESULT_KEY) != DROPPED_FIELD.name.encode()])


def result_names(schema: pa.Schema) -> dict[str, str]:
    """Return original name -> output name of the result columns in a schema from `output_schema`."""
    kinds = {f.name: (f.metadata or {}).get(_RESULT_KEY, b"").decode() for f in schema}
    return {kind: name for name, kind in kinds.items() if kind}


def sample_indices(table: pa.Table) -> pa.ChunkedArray | None:
    """Return each row's sample index; None unless samples are rows."""
    name = result_names(table.schema).get(SAMPLE_FIELD.name)
    return None if name is None else table.column(table.schema.get_field_index(name))


def is_first_sample(table: pa.Table) -> pa.ChunkedArray:
    """Return a mask of the rows that are the first sample of their input row; there is one per input row."""
    index = sample_indices(table)
    if index is None:
        return pa.chunked_array([pa.repeat(True, table.num_rows)])
    return pc.call_function("equal", [index, pa.scalar(0, index.type)])


def row_ids_of(table: pa.Table) -> list[tuple[str, int]]:
    """Return the `source_file` and `source_row` of each row of a table."""
    files, rows = result_column(table, "source_file"), result_column(table, "source_row")
    return list(zip(files.to_pylist(), rows.to_pylist()))
