"""JSON Schemas of what a run leaves in `_pipeline/`: status.json, runs/*.json and report.json.

Made from the dataclasses. Keys that a schema does not name may be there too: figures derived from others, and what a
later version adds. `schema_version` grows when a key goes or means something else.
"""

import json
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from pipeline.job.telemetry.status import Status
from pipeline.report.record.run_record import RunRecord
from pipeline.report.run_report import RunReport

RECORDS: dict[str, tuple[type, str]] = {
    "status": (Status, "_pipeline/status.json: how far a job is"),
    "run": (RunRecord, "_pipeline/runs/*.json: what one run measured about itself"),
    "report": (RunReport, "_pipeline/report.json: what a job did and cost over all its runs"),
}


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def record_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one of RECORDS."""
    kind, title = RECORDS[name]
    head = {"$schema": GenerateJsonSchema.schema_dialect, "$id": f"{name}.schema.json"}
    schema = TypeAdapter(kind).json_schema(mode="serialization", schema_generator=_WithoutTitles)
    return head | schema | {"title": title}


def record_schema_text(name: str) -> str:
    """The schema as it is printed and committed, without the last line's end."""
    return json.dumps(record_schema(name), indent=2, ensure_ascii=False)
