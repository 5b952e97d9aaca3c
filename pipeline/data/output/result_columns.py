"""The columns of the output: their names, their types, and how they sit beside the input's.

A row of the output is the kept input columns and then the result columns, the same for completed and for
error rows. Each result field carries its own name in its metadata, so that sums can be taken after
`output.rename` too.

One row of the input is one row here, but with samples as rows: then it is one for each of its samples, which stand one
after the other in one part, and an error row is its sample 0. So sample 0 is there once for every row of the input.
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
    pa.field("error", pa.string()),  # a RowError code, null when fine
    pa.field("error_message", pa.string()),
    pa.field("num_input_tokens", pa.int32()),
    pa.field("num_cached_tokens", pa.int32()),
    pa.field("num_generated_tokens", pa.int32()),
    pa.field("source_file", pa.string()),  # relative to the input's root, "/"-separated
    pa.field("source_row", pa.int64()),  # from 0, within the file
)

_TOKEN = [pa.field("token_id", pa.int32()), pa.field("logprob", pa.float32())]
LOGPROBS_FIELD = pa.field("logprobs", pa.list_(pa.struct([*_TOKEN, pa.field("top", pa.list_(pa.struct(_TOKEN)))])))

PROMPT_LOGPROBS_FIELD = pa.field("prompt_logprobs", LOGPROBS_FIELD.type)  # null for the first token, as in vLLM
REASONING_FIELDS = (pa.field("reasoning", pa.string()), pa.field("num_reasoning_tokens", pa.int32()))

SAMPLED = ("generated_text", "finish_reason", "logprobs", "reasoning")  # of each sample one, in lists; of errors null

# How completions stand: one in each row; in lists, as rows may have several; or each in a row of its own.
SampleForm = Literal["one", "lists", "rows"]
SAMPLE_FIELD = pa.field("sample_index", pa.int32())  # from 0, with samples as rows

RESULT_NAMES: tuple[str, ...] = tuple(
    f.name for f in (*RESULT_FIELDS, SAMPLE_FIELD, LOGPROBS_FIELD, PROMPT_LOGPROBS_FIELD, *REASONING_FIELDS)
)

OF_COMPLETIONS = ("generated_text", "finish_reason")  # a job with another task has its own columns in their place

_RESULT_KEY = b"pipeline.result"  # field metadata: which result field this is, whatever it was renamed to


@dataclass(frozen=True)
class ResultShape:
    """Which result columns an output has. samples: with "lists" the columns of SAMPLED are lists, with "rows"
    SAMPLE_FIELD is there. reasoning: whether completions are divided. task_fields: of a job that does not generate, in
    the place of OF_COMPLETIONS; then nothing of the others."""

    samples: SampleForm = "one"
    logprobs: bool = False
    prompt_logprobs: bool = False
    reasoning: bool = False
    task_fields: tuple[pa.Field, ...] | None = None

    def fields(self) -> list[pa.Field]:
        """The result columns by their own names, in their order."""
        if self.task_fields is not None:
            return [*self.task_fields, *(f for f in RESULT_FIELDS if f.name not in OF_COMPLETIONS)]
        more = {
            SAMPLE_FIELD: self.samples == "rows",
            LOGPROBS_FIELD: self.logprobs,
            PROMPT_LOGPROBS_FIELD: self.prompt_logprobs,
            **dict.fromkeys(REASONING_FIELDS, self.reasoning),
        }
        fields = [*RESULT_FIELDS, *(f for f, is_there in more.items() if is_there)]
        if self.samples == "lists":
            return [f.with_type(pa.list_(f.type)) if f.name in SAMPLED else f for f in fields]
        return fields


def output_schema(kept: pa.Schema, rename: Mapping[str, str], shape: ResultShape = ResultShape()) -> pa.Schema:
    """The kept columns, then the result columns under the names `rename` (result name -> output name) gives
    them.

    Raises ConfigError when a key of `rename` is no result column or when two columns would have one name.
    """
    fields = shape.fields()
    known = RESULT_NAMES if shape.task_fields is None else tuple(f.name for f in fields)
    for name in rename:
        if name not in known:
            raise ConfigError(f"output.rename: {name!r} is not a result column{did_you_mean(name, known)}")
    results = [pa.field(rename.get(f.name, f.name), f.type, metadata={_RESULT_KEY: f.name.encode()}) for f in fields]
    taken = [*kept.names, *(f.name for f in results)]
    repeated = {name for name, n in Counter(taken).items() if n > 1}
    clashes = [f.name for f, r in zip(fields, results, strict=True) if r.name in repeated]
    if clashes:
        free = {name: _free_name(name, {*taken, *RESULT_NAMES}) for name in clashes}
        write = ", ".join(f"{a}: {b}" for a, b in {**rename, **free}.items())
        raise ConfigError(
            f"the input has columns of the same names as result columns: {', '.join(clashes)}; "
            f"write output.rename: {{{write}}} in the job file, "
            "or leave those columns out of input.columns"
        )
    if repeated:
        raise ConfigError(f"input.columns: named more than once: {', '.join(sorted(repeated))}")
    return pa.schema([*(pa.field(f.name, f.type) for f in kept), *results])


def _free_name(name: str, taken: set[str]) -> str:
    n = 2
    while f"{name}_{n}" in taken:
        n += 1
    return f"{name}_{n}"


def result_column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """The result column `name` of a table of `output_schema`, by what it is and not by what it is called."""
    return table.column(table.schema.get_field_index(result_field(table.schema, name).name))


def result_field(schema: pa.Schema, name: str) -> pa.Field:
    """The field of the result column `name`, as `result_column`."""
    for f in schema:
        if f.metadata and f.metadata.get(_RESULT_KEY) == name.encode():
            return f
    if schema.names.count(name) == 1:
        return schema.field(name)
    raise PipelineError(f"the table has no result column {name!r}: build it with output_schema")


def result_names(schema: pa.Schema) -> dict[str, str]:
    """Of each result column that a table of `output_schema` has, by what it is: what it is called."""
    kinds = {f.name: (f.metadata or {}).get(_RESULT_KEY, b"").decode() for f in schema}
    return {kind: name for name, kind in kinds.items() if kind}


def sample_indices(table: pa.Table) -> pa.ChunkedArray | None:
    """Which of its row's samples each row of a table is; None where no samples stand as rows."""
    name = result_names(table.schema).get(SAMPLE_FIELD.name)
    return None if name is None else table.column(table.schema.get_field_index(name))


def is_first_sample(table: pa.Table) -> pa.ChunkedArray:
    """Of each row of a table whether it stands for its row of the input: one of them does."""
    index = sample_indices(table)
    if index is None:
        return pa.chunked_array([pa.repeat(True, table.num_rows)])
    return pc.call_function("equal", [index, pa.scalar(0, index.type)])


def places_of(table: pa.Table) -> list[tuple[str, int]]:
    """Where each row of a table comes from: `source_file` and `source_row`."""
    files, rows = result_column(table, "source_file"), result_column(table, "source_row")
    return list(zip(files.to_pylist(), rows.to_pylist()))
