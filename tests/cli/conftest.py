"""A small valid job in a working directory, and output folders as runs leave them."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.output.inventory import Inventory
from pipeline.data.output.parts import SUCCESS, PartName, PartStore
from pipeline.data.output.result_columns import output_schema
from pipeline.job.planning.fingerprint import FORMAT
from pipeline.job.telemetry.status import Status
from pipeline.report.record.run_record import ActorRecord, RunRecord, no_phases

EVIL = "evil\x1b[31mRED\x1b]0;title\x07\x1b[2J\x9b\u202e"

JOB = """\
name: demo
input: {path: data, columns: [id]}
prompt: {template: "Sum up:\\n{text}\\n"}
model: {path: demo}
sampling: {max_tokens: 9}
output: {path: out}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a working directory with a small, valid job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    table = pa.table({"id": [1, 2, 3], "text": ["one \x1b[31mred", "two {id}", None], "error": ["a", "b", "c"]})
    pq.write_table(table, tmp_path / "data" / "a.parquet")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the environment for botocore; it applies to filesystems made afterwards."""
    from s3fs import S3FileSystem

    def put(endpoint_url: str, key: str = "AKIATESTKEY", secret: str = "none") -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        S3FileSystem.clear_instance_cache()

    yield put
    S3FileSystem.clear_instance_cache()


@pytest.fixture
def job_that(monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces `run_job` by its argument."""

    def put(function) -> None:
        monkeypatch.setattr("pipeline.job.running.run.run_job", function)

    return put


def golden(name: str, text: str) -> None:
    """Compare a command's text with the file `tests/cli/golden/<name>`; GOLDEN=write writes the file."""
    file = Path(__file__).parent / "golden" / name
    if os.environ.get("GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"if {file.name} should change, run the test with GOLDEN=write"


def finished_run(**changes) -> RunRecord:
    actor = ActorRecord(0, no_phases() | {"decode": 5_000_000}, {"generated_tokens": 20, "num_steps": 1})
    run = RunRecord("run-1", "2026-01-01T00:00:00+00:00", "finished", 6_000_000, actors=[actor], hourly_usd=1.0)
    return replace(run, **changes)


def leave_output(root: Path, run: RunRecord, outcome: str, rows: int = 2) -> PartStore:
    """Write an output folder as a run leaves it."""
    store = PartStore(str(root / "out"))
    store.folder.probe()
    schema = output_schema(pa.schema([]), {})
    row = {"generated_text": "x", "num_input_tokens": 5, "num_cached_tokens": 0, "num_generated_tokens": 10}
    table = pa.Table.from_pylist([row] * rows, schema=schema)
    store.write(PartName("1a2b3c4d", 0, 0, 1, rows), table)
    identity = {"prompt": {}, "files": {}}
    record = {"format": FORMAT, "job": "demo", "fingerprint": "1a2b3c4d" * 8, "identity": identity, "numerics": {}}
    store.folder.create("_pipeline/job.json", json.dumps(record).encode())
    store.folder.replace("_pipeline/runs/run-1.json", json.dumps(run.to_json()).encode())
    status = Status("run-1", "generating", outcome, rows_total=3, rows_done=2, eta_s=30.0)
    store.folder.replace("_pipeline/status.json", json.dumps(status.to_json()).encode())
    if outcome == "finished":
        store.folder.replace(SUCCESS, success_of(store))
    return store


def success_of(store: PartStore) -> bytes:
    """Return a `_SUCCESS` that counts the output's parts, without error rows."""
    inventory = Inventory.from_store(store)
    counts = {"parts": inventory.parts, "completed_rows": inventory.rows, "error_rows": 0}
    return json.dumps(counts | {"parts_bytes": inventory.parts_bytes, "parts_digest": inventory.parts_digest}).encode()
