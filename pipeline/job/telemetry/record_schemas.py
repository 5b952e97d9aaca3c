"""JSON Schemas of the records in `_pipeline/`: status.json, runs/*.json and report.json.

Generated from the dataclasses. Records may contain more keys than a schema: derived values, and additions of later
versions. `schema_version` increases when a key is removed or changes its meaning.
"""

import json
from typing import Any

from pydantic import TypeAdapter

from pipeline.config.schema import SchemaGenerator
from pipeline.job.telemetry.status import Status
from pipeline.report.record.run_record import RunRecord
from pipeline.report.run_report import RunReport

RECORDS: dict[str, tuple[type, str]] = {
    "status": (Status, "_pipeline/status.json: progress of a job"),
    "run": (RunRecord, "_pipeline/runs/*.json: measurements of one run"),
    "report": (RunReport, "_pipeline/report.json: results and cost of a job over all its runs"),
}


def record_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one of RECORDS."""
    kind, title = RECORDS[name]
    head = {"$schema": SchemaGenerator.schema_dialect, "$id": f"{name}.schema.json"}
    schema = TypeAdapter(kind).json_schema(mode="serialization", schema_generator=SchemaGenerator)
    return head | schema | {"title": title}


def record_schema_text(name: str) -> str:
    """Return the schema as printed and committed, without the final newline."""
    return json.dumps(record_schema(name), indent=2, ensure_ascii=False)
