"""JSON Schema of the job file, for editors: keys, types and descriptions.

Most checks between keys, and whether paths and columns exist, are beyond a schema.
"""

import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from pipeline.config.job import JobConfig

FILE_NAME = "job.schema.json"


class SchemaGenerator(GenerateJsonSchema):
    """Generator of schemas without titles of keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # a title "Max Tokens" for `max_tokens`

    def encode_default(self, dft: Any) -> Any:
        return {} if isinstance(dft, BaseModel) else super().encode_default(dft)  # its keys have their own defaults


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file."""
    head = {
        "$schema": GenerateJsonSchema.schema_dialect,
        "$id": FILE_NAME,
        "title": "Job file of parquet-batch-inference",
        "description": "One batch inference job: input, prompt, model and output.",
    }
    return {**JobConfig.model_json_schema(mode="validation", schema_generator=SchemaGenerator), **head}


def schema_text() -> str:
    """Return the schema as printed and committed, without the final newline."""
    schema = job_schema()
    first = {key: schema.pop(key) for key in ("$schema", "$id", "title", "description")}
    return json.dumps(first | schema, indent=2, ensure_ascii=False)
