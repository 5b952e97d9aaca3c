"""Publication to a Delta table: its rows and transactions, and what is refused."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from pipeline.data.output.parts import PartStore
from pipeline.errors import ConfigError, EnvironmentFailed, OutputError
from pipeline.job.publish.delta import DeltaDestination
from pipeline.job.publish.finished import FinishedOutput
from pipeline.job.publish.publication import Unsettled, publish
from tests.faults.store import KEY, SECRET, FaultyStore
from tests.job.conftest import run
from tests.job.publish.kills import rows_in_folder, rows_in_table, rows_of, to_delta

MINE = pa.table({"a": [1, 2, 3]})


@pytest.fixture
def table(tmp_path):
    return tmp_path / "tables" / "answers"


def test_each_state_is_one_transaction(states, table):
    for version, state in enumerate(states):
        done = to_delta(state, table)
        assert (done.is_new, done.version, done.rows) == (True, f"version {version}", 22)
        assert not to_delta(state, table).is_new
        assert rows_in_table(table) == rows_in_folder(state)
        figures = DeltaTable(str(table)).history(1)[0]["pipeline"]
        assert (figures["error_rows"], figures["cost_usd"]) == (2 - version, None)
    assert DeltaTable(str(table)).version() == 1
    assert to_delta(states[0], table).version == "version 2", "an earlier state is published again"


def test_rows_of_other_origin_are_overwritten_only_on_request(states, table):
    write_deltalake(str(table), MINE)
    with pytest.raises(OutputError, match=r"rows that no job has published.* replaces its 3 rows by the 22 of .*out"):
        to_delta(states[1], table)
    assert to_delta(states[1], table, replace=True).version == "version 1"
    write_deltalake(str(table), pa.table({"id": [9]}), mode="append", schema_mode="merge")
    with pytest.raises(OutputError, match="holds 23 rows, and this job has published 22"):
        to_delta(states[1], table)
    to_delta(states[1], table, replace=True)
    assert rows_in_table(table) == rows_in_folder(states[1])
    shown = dataclasses.replace(FinishedOutput.open(PartStore(str(states[1]))), fingerprint="0" * 64)
    with pytest.raises(OutputError, match="holds another job's output"):
        publish(shown, DeltaDestination(f"delta:{table}", replace=False), print)


def test_a_table_that_another_writer_changes_meanwhile_is_looked_at_again(states, table):
    shown = FinishedOutput.open(PartStore(str(states[0])))
    for seen in range(2):
        destination = DeltaDestination(f"delta:{table}", replace=bool(seen))
        assert destination.held(shown) is None
        write_deltalake(str(table), MINE, mode="append")
        with pytest.raises(Unsettled, match="another writer has committed"):
            destination.write(shown, print)
        assert DeltaTable(str(table)).count() == 3 * (seen + 1)


def test_a_part_that_is_replaced_meanwhile_ends_the_publication(states, output, table):
    shown = FinishedOutput.open(PartStore(str(output)))
    (changed,) = [part for part in states[1].glob("part-*") if part.read_bytes() != (output / part.name).read_bytes()]
    shutil.copy(changed, output)
    with pytest.raises(OutputError, match=f"{changed.name}: replaced or removed while it was published"):
        publish(shown, DeltaDestination(f"delta:{table}", replace=False), print)
    assert rows_in_table(table) == []


@pytest.mark.usefixtures("without_ray")
def test_types_that_delta_lacks_become_wider_ones_or_are_refused(job, table):
    values = {"big": pa.array([2**64 - 1], pa.uint64()), "half": pa.array([0.5], pa.float16()),
              "vector": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))}  # fmt: skip
    pq.write_table(pa.table({"text": ["a"], **values}), job.folder / "in" / "f0.parquet")
    run(job, input={"columns": [*values]})
    to_delta(job.output, table)
    (row,) = pa.table(DeltaTable(str(table)).to_pyarrow_table()).select([*values]).to_pylist()
    assert row == {"big": 2**64 - 1, "half": 0.5, "vector": [1.0, 2.0]}
    shown = FinishedOutput.open(PartStore(str(job.output)))
    schema = shown.schema.set(0, pa.field("at", pa.time64("us")))
    destination = DeltaDestination(f"delta:{table}", replace=True)
    destination.held(shown)
    with pytest.raises(OutputError, match=r"Delta has no type for a column.*Time64"):
        destination.write(dataclasses.replace(shown, schema=schema), print)


def test_a_path_that_cannot_be_a_table(output, tmp_path, pipe, monkeypatch):
    code, _, err = pipe("publish", str(output), f"delta:{output}/table")
    assert code == 2
    assert "is inside the job's output" in err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / next(Path(output).glob("part-*")).name).touch()
    with pytest.raises(OutputError, match="is not a Delta table and holds part-"):
        to_delta(output, tmp_path / "full")
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFailed, match="Not a directory"):
        to_delta(output, tmp_path / "file")
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match=r"install it with pip install 'parquet-batch-inference\[delta\]'"):
        to_delta(output, tmp_path / "new")
    assert os.listdir(tmp_path / "full")


def test_a_table_in_a_store(output):
    """The command is a process of its own: the library holds the interpreter's lock while it waits for the store."""

    def command(target: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", "publish", str(output), target],
            env={**os.environ, **access},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    with FaultyStore() as store:
        access = {
            "AWS_ENDPOINT_URL": store.proxy.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }
        code, text = command("delta:s3://bucket/deep/table")
        assert code == 0, text
        log = store.bucket.get("deep/table/_delta_log/00000000000000000000.json").decode()
        (added,) = [line["add"] for line in map(json.loads, log.splitlines()) if "add" in line]
        data = store.bucket.get(f"deep/table/{added['path']}")
        assert rows_of(pq.read_table(pa.BufferReader(data))) == rows_in_folder(output)
        assert KEY not in log
        code, text = command("delta:s3://missing/table")
        assert code == 3
        assert "The specified bucket does not exist" in text
        assert SECRET not in text
