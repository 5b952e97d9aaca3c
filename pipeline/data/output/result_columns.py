"""The columns of the output: their names, their types, and how they sit beside the input's.

A row of the output is the kept input columns and then the result columns, the same for completed and for
error rows. Each result field carries its own name in its metadata, so that sums can be taken after
`output.rename` too.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

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

REASONING_FIELDS = (pa.field("reasoning", pa.string()), pa.field("num_reasoning_tokens", pa.int32()))

SAMPLED = ("generated_text", "finish_reason", "logprobs", "reasoning")  # of each sample one, in lists; of errors null

RESULT_NAMES: tuple[str, ...] = tuple(f.name for f in (*RESULT_FIELDS, LOGPROBS_FIELD, *REASONING_FIELDS))

OF_COMPLETIONS = ("generated_text", "finish_reason")  # a job with another task has its own columns in their place

_RESULT_KEY = b"pipeline.result"  # field metadata: which result field this is, whatever it was renamed to


def output_schema(
    kept: pa.Schema,
    rename: Mapping[str, str],
    logprobs: bool,
    samples: bool = False,
    task_fields: Sequence[pa.Field] | None = None,
    reasoning: bool = False,
) -> pa.Schema:
    """The kept columns, then the result columns under the names `rename` (result name -> output name) gives
    them. samples: the columns of SAMPLED are lists, as rows may have several completions (`sampling.n`). task_fields:
    of a job that does not generate, in the place of OF_COMPLETIONS. reasoning: whether completions are divided.

    Raises ConfigError when a key of `rename` is no result column or when two columns would have one name.
    """
    fields, known = [*RESULT_FIELDS, *([LOGPROBS_FIELD] if logprobs else [])], RESULT_NAMES
    fields += REASONING_FIELDS if reasoning else ()
    if task_fields is not None:
        fields = [*task_fields, *(f for f in RESULT_FIELDS if f.name not in OF_COMPLETIONS)]
        known = tuple(f.name for f in fields)
    for name in rename:
        if name not in known:
            raise ConfigError(f"output.rename: {name!r} is not a result column{did_you_mean(name, known)}")
    if samples:
        fields = [f.with_type(pa.list_(f.type)) if f.name in SAMPLED else f for f in fields]
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
