"""The schemas of status, run records and report: fresh, valid, and matched by the files of real runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from pipeline.job.telemetry.record_schemas import RECORDS, record_schema, record_schema_text
from pipeline.job.telemetry.status import Status
from pipeline.report.run_report import RunReport
from tests.job.conftest import TEXTS, run

ROOT = Path(__file__).parents[3]


def validator(name: str, **changes) -> Draft202012Validator:
    return Draft202012Validator({**record_schema(name), **changes})


@pytest.mark.parametrize("name", RECORDS)
def test_the_committed_schemas_are_fresh_and_valid(name, pipe):
    committed = (ROOT / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8")
    assert committed == record_schema_text(name) + "\n", f"run `pipeline schema {name} > schemas/{name}.schema.json`"
    assert pipe("schema", name) == (0, committed, "")
    Draft202012Validator.check_schema(record_schema(name))


def test_records_of_runs_match_the_schemas(job, without_ray):
    """The run has error rows, restarts and a skipped file."""
    job.rows(["fine", "poison", None, *TEXTS])
    (job.folder / "in" / "broken.parquet").write_bytes(b"PAR1 no more")
    run(job.fake(crash="poison"), input={"on_corrupt": "skip"}, cost={"hourly_usd": 1.0})
    folder = job.output / "_pipeline"
    (record,) = (folder / "runs").iterdir()
    left = {"status": folder / "status.json", "run": record, "report": folder / "report.json"}
    for name, path in left.items():
        raw = json.loads(path.read_text())
        assert raw["schema_version"] == 1
        validator(name).validate(raw)
        keys = set(record_schema(name)["properties"])
        assert keys <= set(raw), "each key of the schema is present"
        for key in sorted(keys - {"warning"}):
            wrong = {**raw, key: [None] if not isinstance(raw[key], list) else "text"}
            assert key in ("resolved", "settings") or not validator(name).is_valid(wrong), (name, key)


def test_keys_of_a_later_version_are_ignored():
    status = Status.from_json({**replace(Status(), phase="x").to_json(), "schema_version": 2, "of_later": 1})
    assert (status.schema_version, status.phase) == (2, "x")
    assert "schema_version" in RunReport.__dataclass_fields__
