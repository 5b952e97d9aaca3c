"""Columns of the output: one schema, no collisions with the input's names, and sums that survive renaming."""

from dataclasses import replace

import pyarrow as pa
import pytest

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.result_columns import (
    LOGPROBS_FIELD,
    RESULT_FIELDS,
    RESULT_NAMES,
    ResultShape,
    output_schema,
    result_column,
)
from pipeline.errors import ConfigError, PipelineError

KEPT = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata={"x": "y"})], metadata={"pandas": "{}"})


def test_kept_columns_then_results():
    schema = output_schema(KEPT, {})
    assert schema.names == ["id", *(f.name for f in RESULT_FIELDS)]
    assert schema.field("id").metadata is None
    assert schema.metadata is None
    assert schema.field("source_row").type == pa.int64()
    assert output_schema(KEPT, {}, ResultShape(logprobs=True)).names[-1] == "logprobs"
    rows = ResultShape("rows", logprobs=True)
    assert output_schema(KEPT, {"sample_index": "k"}, rows).names[-3:] == ["source_row", "k", "logprobs"]
    assert output_schema(KEPT, {}, ResultShape("rows", True, True, True, True, dropped_by=True)).names == [
        "id",
        *RESULT_NAMES,
    ]
    one = [[{"token_id": 1, "logprob": -0.5, "top": [{"token_id": 2, "logprob": -1.0}]}], None]
    assert pa.array(one, LOGPROBS_FIELD.type).to_pylist() == one


def test_a_collision_names_the_rename_to_write():
    chained = pa.schema([("generated_text", pa.string()), ("error", pa.string()), ("error_2", pa.string())])
    with pytest.raises(ConfigError, match=r"output\.rename: \{generated_text: generated_text_2, error: error_3\}"):
        output_schema(chained, {})
    names = output_schema(chained, {"generated_text": "generated_text_2", "error": "error_3"}).names
    assert len(set(names)) == len(names) == 3 + len(RESULT_FIELDS)
    # the advised rename works, and earlier renames stay in the advice
    with pytest.raises(ConfigError, match=r"output\.rename: \{generated_text: a, error: error_3\}"):
        output_schema(chained, {"generated_text": "a"})
    with pytest.raises(ConfigError, match="input columns have the same names"):
        output_schema(KEPT, {"generated_text": "id"})
    with pytest.raises(ConfigError, match="logprobs"):
        output_schema(pa.schema([("logprobs", pa.string())]), {}, ResultShape(logprobs=True))
    output_schema(pa.schema([("logprobs", pa.string())]), {})


def test_rename_accepts_result_columns_only():
    with pytest.raises(ConfigError, match="did you mean 'generated_text'"):
        output_schema(KEPT, {"generated_txt": "answer"})
    with pytest.raises(ConfigError, match="same names"):
        output_schema(KEPT, {"generated_text": "answer", "error": "answer"})
    with pytest.raises(ConfigError, match="more than once: id"):
        output_schema(pa.schema([("id", pa.int64()), ("id", pa.int64())]), {})


def test_totals_are_found_under_any_name():
    values = {
        "error": ["null_prompt", None, None, "prompt_too_long", "engine_failure"],
        "num_input_tokens": [None, 3, 4, 200_032, 2],
        "num_cached_tokens": [None, 1, 0, None, 1],
        "num_generated_tokens": [None, 7, 8, None, None],
    }
    kept = pa.schema([("num_input_tokens", pa.int64())])
    rename = {"num_input_tokens": "n_in", "error": "code"}
    schema = output_schema(kept, rename)
    columns = {rename.get(k, k): v for k, v in values.items()} | {"num_input_tokens": [1000] * 5}
    table = pa.table([pa.array(columns.get(f.name, [None] * 5), f.type) for f in schema], schema=schema)
    expected = PartTotals(5, 1, {"engine_failure": 1, "null_prompt": 1, "prompt_too_long": 1}, 7, 1, 15, 200_034)
    of_table = PartTotals.of_table(table)
    assert replace(of_table, rows_checksum=0) == expected
    assert PartTotals.from_json(of_table.to_json()) == of_table
    assert PartTotals.from_json(expected.to_json()) == expected
    assert expected.num_error_rows == 3
    double = expected + expected
    assert double == PartTotals(
        10, 2, {"engine_failure": 2, "null_prompt": 2, "prompt_too_long": 2}, 14, 2, 30, 400_068
    )
    assert expected.num_computed_tokens == 7 - 1 + 15
    assert PartTotals.of_table(schema.empty_table()) == PartTotals(units=1)
    with pytest.raises(PipelineError, match="output_schema"):
        result_column(pa.table({"x": [1]}), "error")


def test_totals_are_subtracted_again():
    a = PartTotals(3, 1, {"null_prompt": 2}, 10, 4, 5, 8)
    b = PartTotals(4, 2, {"null_prompt": 1, "engine_failure": 3}, 20, 6, 7, 9)
    assert a + b - b == a
    assert a - b == PartTotals(error_rows={"null_prompt": 1})
