"""`pipeline logs`: lines, their form, and the end of following; `run --verbose` and `--log-level`."""

import json
import threading
import time
from dataclasses import replace

import pytest

from pipeline.data.output.part_totals import PartTotals
from pipeline.job.output import run_follower
from pipeline.job.telemetry.status import Status
from pipeline.report.build import build_report
from tests.cli.conftest import EVIL, finished_run, leave_output, success_of

DRIVER = "2026-11-23 12:00:01.000 info    starting Ray\n2026-11-23 12:00:03.000 warning slow\n"
ENGINE = "2026-11-23 12:00:02.000 print   loading shard 1\n"


@pytest.fixture
def logged(work):
    """Write an output with the logs of a running job."""
    store = leave_output(work, finished_run(), "running")
    logs = work / "out" / "_pipeline" / "logs" / "run-1"
    logs.mkdir(parents=True)
    (logs / "driver.log").write_text(DRIVER)
    (logs / "engine-0.log").write_text(ENGINE)
    return store, logs


def test_all_logs_or_those_of_some_actors(logged, pipe):
    code, out, err = pipe("logs", "job.yaml")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "driver     2026-11-23 12:00:01.000 info    starting Ray",
        "engine-0   2026-11-23 12:00:02.000 print   loading shard 1",
        "driver     2026-11-23 12:00:03.000 warning slow",
    ]
    assert pipe("logs", "out", "--actor", "0")[1] == ENGINE
    assert pipe("logs", "out", "--actor", "driver")[1] == DRIVER
    assert pipe("logs", "out", "--actor", "driver", "--actor", "0")[1] == out
    assert pipe("logs", "out", "--actor", "9")[1] == ""
    assert pipe("logs", "out", "--tail", "1")[1] == out.splitlines()[-1] + "\n"
    assert pipe("logs", "out", "--tail", "0")[1] == ""
    assert json.loads(pipe("logs", "out", "--json")[1].splitlines()[2]) == {
        "run_id": "run-1", "log": "driver", "time": "2026-11-23 12:00:03.000", "level": "warning", "text": "slow",
    }  # fmt: skip


def test_missing_actors_runs_and_logs_are_errors(logged, pipe):
    assert "expected an engine's number" in pipe("logs", "out", "--actor", "x")[2]
    code, _, err = pipe("logs", "out", "--run", "7")
    assert code == 2
    assert "no logs of run 7; available: run-1" in err
    assert "no run has left logs" in pipe("logs", "data")[2]


def test_logs_control_no_terminal(logged, pipe):
    (logged[1] / "engine-0.log").write_text(f"2026-11-23 12:00:02.000 print   {EVIL}\n")
    out = pipe("logs", "out")[1]
    assert "evil\\x1b[31mRED" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("stopped", 1), ("failed", 3), ("interrupted", 75)])
def test_following_ends_with_the_run_and_has_its_exit_code(logged, pipe, monkeypatch, outcome, code):
    store, logs = logged
    monkeypatch.setattr(run_follower, "LOOK_S", 0.1)
    status = Status.from_json(json.loads(store.folder.read("_pipeline/status.json")))

    def end_run() -> None:
        time.sleep(0.5)
        with (logs / "driver.log").open("a") as log:
            log.write("2026-11-23 12:00:04.000 info    ended\n")
        if outcome == "finished":
            store.folder.create("_SUCCESS", success_of(store))
        store.folder.replace("_pipeline/status.json", json.dumps(replace(status, outcome=outcome).to_json()).encode())

    writer = threading.Thread(target=end_run)
    writer.start()
    left, out, _ = pipe("logs", "out", "--follow", "--tail", "1")
    writer.join()
    assert left == code
    assert [line.split()[-1] for line in out.splitlines()] == ["slow", "ended"]


def test_run_verbose_shows_its_log(work, pipe, job_that):
    seen = {}

    def run_job(config, *, progress, logs, **_):
        seen["level"] = logs.level
        progress(Status(phase="planning"))
        if logs.show:
            logs.show("2026-11-23 12:00:01.000 info    starting Ray")
        progress(Status(run_id="1", phase="starting Ray"))
        return build_report("demo", "1a2b3c4d", [finished_run()], PartTotals(3), 3)

    job_that(run_job)
    assert pipe("run", "job.yaml")[2].splitlines() == ["planning", "starting Ray"]
    assert seen["level"] == "info"
    _, _, err = pipe("run", "job.yaml", "-v", "--log-level", "debug")
    assert err.splitlines() == ["planning", "2026-11-23 12:00:01.000 info    starting Ray"], "each is shown once"
    assert seen["level"] == "debug"
