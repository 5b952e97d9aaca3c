"""Structured outputs in a job: each row's schema from a column, its errors, the report's line."""

import json

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import TooManyRowErrors
from pipeline.job.actor.backends import OwnEngine
from pipeline.job.running.run import run_job
from pipeline.report.render import text

TWICE = {"type": "object", "patternProperties": {"^[ab]$": {"const": 1}}, "additionalProperties": False,
         "minProperties": 2, "maxProperties": 2}  # fmt: skip
SMALL = "tests.engine.grammar.small_vocabulary"
SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3},
    {"enum": ["x", "y", 5]},
]


def test_every_row_keeps_to_its_own_schema(job, without_ray, engines_in_threads):
    rows = [json.dumps(SCHEMAS[row % 3]) for row in range(12)]
    rows += ['{"uniqueItems":true,"type":"array"}', "{", '{"const":"\\u00e9~"}', None]
    table = pa.table({"id": range(len(rows)), "text": [f"row {i}" for i in range(len(rows))], "schema": rows})
    pq.write_table(table, job.folder / "in" / "f.parquet")
    config = job.config(
        sampling={"max_tokens": 60, "structured_outputs": {"json": {"column": "schema"}}}, output={"rows_per_file": 99}
    )
    report = run_job(config, backend=OwnEngine(f"{SMALL}:job_engine", f"{SMALL}:job_tokenizer"))
    found = {row["id"]: row for row in job.table().to_pylist()}
    for row in range(12):
        assert (found[row]["error"], found[row]["finish_reason"]) == (None, "stop")
        jsonschema.validate(json.loads(found[row]["generated_text"]), SCHEMAS[row % 3])
    assert [found[row]["error"] for row in range(12, 16)] == [
        "grammar_error",
        "invalid_sampling",
        "grammar_error",
        None,
    ]
    assert "uniqueItems" in found[12]["error_message"]
    assert "not JSON" in found[13]["error_message"]
    assert "generated tokens its grammar" in found[14]["error_message"], "the vocabulary cannot spell it"
    assert report.rows.errors_by_code == {"grammar_error": 2, "invalid_sampling": 1}
    (line,) = (line for line in text(report).splitlines() if line.startswith("    Grammars"))
    figures = line.removeprefix("    Grammars").strip()
    work, generated = report.work, sum(row["num_generated_tokens"] for row in found.values() if not row["error"])
    assert figures.startswith(f"{work.grammar_tokens:,} tokens checked, {work.grammar_masks:,} masks in ")
    assert figures.endswith(f"; {work.grammar_forced_tokens:,} forced, without a step")
    forced_by_schema = sum(len('{"a":') for row in range(0, 12, 3))
    assert work.grammar_forced_tokens >= forced_by_schema / 3, "the schema's names, in tokens of one character to three"
    of_others = found[15]["num_generated_tokens"]  # without a schema
    counted = work.grammar_tokens + work.grammar_forced_tokens
    assert generated - of_others <= counted <= generated - of_others + 60, "the row that failed had some"
    assert 0 < work.grammar_masks <= work.grammar_tokens
    assert work.grammar_mask_us > 0


def test_rows_that_finish_invalid_are_error_rows(job, without_ray, engines_in_threads):
    """They count like others: more of them than `run.max_error_rate` allows stop the job with its exit code."""
    table = pa.table({"id": range(16), "text": [f"row {i}" for i in range(16)]})
    pq.write_table(table, job.folder / "in" / "f.parquet")
    sampling = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "structured_outputs": {"json": TWICE}}
    backend = OwnEngine(f"{SMALL}:job_engine", f"{SMALL}:job_tokenizer")
    with pytest.raises(TooManyRowErrors) as caught:
        run_job(job.config(sampling=sampling, run={"max_error_rate": 0.01}), backend=backend)
    assert caught.value.exit_code == 1
    assert "grammar_error" in str(caught.value)
    report = run_job(job.config(sampling=sampling, run={"max_error_rate": 1.0}), backend=backend)
    rows = job.table().to_pylist()
    failed = [row for row in rows if row["error"]]
    assert len(rows) == 16
    assert report.rows.errors_by_code == {"grammar_error": len(failed)}
    assert 3 < len(failed) < 16
    for row in rows:
        if row["error"]:
            assert (row["error"], row["generated_text"]) == ("grammar_error", None)
            assert "the finished text cannot be read as JSON: an object has the name" in row["error_message"]
        else:
            assert row["finish_reason"] == "stop"
            jsonschema.validate(json.loads(row["generated_text"]), TWICE)
