"""`sampling.structured_outputs` in job files: its forms, its mistakes with their key, and the job's identity."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import JobConfig, JobFileError, load_job
from pipeline.config.identity import identity_of
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.job.actor.resolved_job import sampling_columns, sampling_params

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}


@pytest.fixture
def job(tmp_path: Path):
    def load(**sampling: Any) -> JobConfig:
        minimal = {"input": {"path": "a"}, "prompt": {"column": "t"}, "model": {"path": "demo"}}
        path = tmp_path / "job.yaml"
        path.write_text(
            yaml.safe_dump(minimal | {"output": {"path": "b"}, "sampling": sampling}, sort_keys=False), encoding="utf-8"
        )
        return load_job(path)

    return load


def test_a_schema_as_object_text_or_file_is_the_same_job(job, tmp_path: Path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA, indent=3), encoding="utf-8")
    forms = [
        job(structured_outputs={"json": SCHEMA}),
        job(structured_outputs={"json": json.dumps(SCHEMA)}),
        job(structured_outputs={"json_file": str(tmp_path / "schema.json")}),
    ]
    wanted = StructuredOutputs.from_config({"json": SCHEMA})
    assert {sampling_params(config.sampling).structured_outputs for config in forms} == {wanted}
    assert all(identity_of(config) == identity_of(forms[0]) for config in forms)
    assert identity_of(forms[0])["sampling"]["structured_outputs"] == {"json": SCHEMA}
    assert "json_file" not in json.dumps(forms[2].data), "a job that is sent elsewhere holds the schema"
    (tmp_path / "schema.json").write_text(json.dumps({**SCHEMA, "required": ["a"]}), encoding="utf-8")
    changed = job(structured_outputs={"json_file": str(tmp_path / "schema.json")})
    assert identity_of(changed) != identity_of(forms[0])


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_a_column_has_the_form_of_each_row(kind: str, job):
    config = job(structured_outputs={kind: {"column": "form"}})
    assert sampling_columns(config) == {f"structured_outputs.{kind}": "form"}
    assert sampling_params(config.sampling).structured_outputs is None
    assert identity_of(config)["sampling"]["structured_outputs"] == {kind: {"column": "form"}}


@pytest.mark.parametrize(("sampling", "expected"), [
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}},
     'job.yaml:10: sampling.structured_outputs: json: Unimplemented keys: ["uniqueItems"]'),
    ({"structured_outputs": {"json": {"properties": {"id": {"enum": [9007199254740993]}}}}},
     "sampling.structured_outputs: json: properties.id.enum[0] = 9007199254740993: a number beyond 2^53"),
    ({"structured_outputs": {"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}},
     "sampling.structured_outputs: json: the schema requires itself without end"),
    ({"structured_outputs": {"regex": "a(?=b)"}}, "look-ahead"),
    ({"structured_outputs": {"jsn": {}}}, "jsn: unknown key"),
    ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "exactly one of"),
    ({"structured_outputs": {"json": {"column": "a"}, "whitespace_pattern": "[ ]?"}}, "cannot be combined"),
    ({"structured_outputs": {"json_file": "/nowhere/x.json"}},
     "sampling.structured_outputs.json_file: /nowhere/x.json: cannot be read"),
    ({"structured_outputs": {"json_file": __file__}}, "not JSON"),
    ({"structured_outputs": {"json_file": "a", "json": {}}}, "are both set"),
    ({"response_format": {"type": "json_object"}}, "write sampling.structured_outputs: {json: SCHEMA}"),
    ({"min_tokens": 2, "structured_outputs": {"regex": "a"}}, "min_tokens"),
    ({"min_tokens": 2, "structured_outputs": {"regex": {"column": "a"}}}, "min_tokens"),
])  # fmt: skip
def test_unsupported_forms_are_refused_at_their_key(sampling: dict, expected: str, job):
    with pytest.raises(JobFileError) as caught:
        job(**sampling)
    assert expected in str(caught.value)
