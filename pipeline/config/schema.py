"""The job file's JSON Schema, for editors: the keys as they are written, with what each means.

Owns only what pydantic does not say of itself. Checks between keys, and what a path or column names, no schema sees.
"""

import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from pipeline.config.job import JobConfig

FILE_NAME = "job.schema.json"


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # "Max Tokens" beside `max_tokens`

    def encode_default(self, dft: Any) -> Any:
        return {} if isinstance(dft, BaseModel) else super().encode_default(dft)  # its keys have their own


def job_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a job file."""
    head = {
        "$schema": GenerateJsonSchema.schema_dialect,
        "$id": FILE_NAME,
        "title": "Job file of parquet-batch-inference",
        "description": "One job: what is read, what is asked of which model, and where the answers go.",
    }
    return {**JobConfig.model_json_schema(mode="validation", schema_generator=_Generator), **head}


def schema_text() -> str:
    """The schema as it is printed and committed, without the last line's end."""
    schema = job_schema()
    first = {key: schema.pop(key) for key in ("$schema", "$id", "title", "description")}
    return json.dumps(first | schema, indent=2, ensure_ascii=False)
