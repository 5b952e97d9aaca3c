"""`pipeline status` and `report`: what they show of a folder, and when a status is stale or damaged."""

import json
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.data.output.part_totals import PartTotals
from pipeline.report.build import build_report
from pipeline.report.render import text
from tests.cli.conftest import finished_run, leave_output


def test_status_of_a_folder_and_of_a_job(work, pipe):
    leave_output(work, finished_run(), "finished")
    for path in ("out", "job.yaml"):
        code, out, _ = pipe("status", path)
        assert code == 0
        assert f"{path}: finished\n" in out
        assert "66.7%, 2/3 rows" in out
    raw = json.loads(pipe("status", "out", "--json")[1])
    assert (raw["rows_done"], raw["stale"]) == (2, None)


def test_status_of_a_run_whose_process_died(work, pipe):
    import socket

    child = subprocess.Popen(["sleep", "60"])
    versions = {"host": socket.gethostname(), "pid": str(child.pid)}
    leave_output(work, finished_run(outcome="running", versions=versions), "running")
    try:
        assert "out: running\n" in pipe("status", "out")[1]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    code, out, _ = pipe("status", "out")
    assert code == 0
    assert "out: stale\n" in out
    assert "`pipeline run` resumes" in out


def test_status_of_a_run_without_recent_updates(work, pipe):
    """A process on another machine cannot be checked, so an old status is stale."""
    store = leave_output(work, finished_run(outcome="running", versions={"host": "elsewhere", "pid": "1"}), "running")
    status = json.loads(store.folder.read("_pipeline/status.json"))
    now = datetime.now(UTC)
    for updated_at, head in ((now, "running"), (now - timedelta(hours=3), "stale")):
        changes = {"updated_at": updated_at.isoformat()}
        store.folder.replace("_pipeline/status.json", json.dumps(status | changes).encode())
        out = pipe("status", "out")[1]
        assert f"out: {head}\n" in out
        assert ("No status for 3 h. If its process on elsewhere has ended" in out) == (head == "stale")


def test_status_of_a_run_that_could_not_write_its_end(work, pipe):
    """The disk was full at the end: the record was written, the status was not."""
    store = leave_output(work, finished_run(outcome="failed", versions={"host": "elsewhere", "pid": "1"}), "running")
    status = json.loads(store.folder.read("_pipeline/status.json"))
    for seconds, head, code in ((5, "running", 0), (60, "stale", 3)):
        updated_at = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
        store.folder.replace("_pipeline/status.json", json.dumps(status | {"updated_at": updated_at}).encode())
        out = pipe("status", "out")[1]
        assert f"out: {head}\n" in out
        assert ("The run's record is failed; its last status could not be written" in out) == (head == "stale")
        if code:
            assert pipe("status", "out", "--watch")[0] == code


def test_report_is_the_stored_one_or_a_new_one_after_a_killed_run(work, pipe):
    store = leave_output(work, finished_run(), "finished")
    kept = build_report("demo", "x", [finished_run()], PartTotals(rows=3), 3)
    store.folder.replace("_pipeline/report.json", json.dumps(kept.to_json()).encode())
    code, out, _ = pipe("report", "out")
    assert (code, out) == (0, text(kept) + "\n")
    killed = finished_run(run_id="run-2", outcome="killed", started_at="2026-01-02T00:00:00+00:00")
    store.folder.replace("_pipeline/runs/run-2.json", json.dumps(killed.to_json()).encode())
    raw = json.loads(pipe("report", "job.yaml", "--json")[1])
    assert [run["run_id"] for run in raw["runs"]] == ["run-1", "run-2"]
    assert raw["rows"]["written"] == 2, "counted from the parts"
    assert raw["rows"]["input"] == 3


@pytest.mark.parametrize(("command", "path", "expected"), [
    ("status", "nowhere", "nowhere: no such folder"),
    ("status", "data/a.parquet", "is neither an output folder nor a job file"),
    ("status", "data", "no status of a job's run here"),
    ("report", "data", "no record of a job's run here"),
    ("report", "none.yaml", "none.yaml: no such file"),
])  # fmt: skip
def test_paths_without_a_job(work, pipe, command: str, path: str, expected: str):
    code, out, err = pipe(command, path)
    assert (code, out) == (2, "")
    assert expected in err


def test_a_finished_output_without_its_parts_is_reported(work, pipe):
    store = leave_output(work, finished_run(), "finished")
    kept = build_report("demo", "x", [finished_run()], PartTotals(rows=3), 3)
    store.folder.replace("_pipeline/report.json", json.dumps({**kept.to_json(), "outcome": "finished"}).encode())
    next(Path(store.path).glob("part-*")).unlink()
    assert "out: damaged\n" in pipe("status", "out")[1]
    for command in ("status", "report"):
        assert "it has 0 parts, but _SUCCESS counts 1" in pipe(command, "out")[1]
        assert "0 parts" in json.loads(pipe(command, "out", "--json")[1])["stale"]
    store.folder.replace("_pipeline/status.json", b"[1]")
    code, _, err = pipe("status", "out")
    assert (code, "not one JSON object" in err) == (2, True)
