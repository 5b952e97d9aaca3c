"""`pipeline status --watch`: its screen, and its end."""

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from pipeline.cli.watch import ActorRates, drawing
from pipeline.data.output.parts import PartStore
from pipeline.job.output import run_follower
from pipeline.job.output.run_follower import RunFollower
from pipeline.job.telemetry.status import Status
from pipeline.report.record.run_record import ActorRecord, no_phases
from tests.cli.conftest import EVIL, finished_run, golden, leave_output, success_of

STATUS = Status("run-1", "running", "running", 2000, 1000, 900, 3, 7, 2, 50_000, 9_000, 1234.5, 99, 300.0, 60.0)


def actor(number: int, generated: int, **phases: int) -> ActorRecord:
    stats = {"prompt_tokens": 100 * generated, "generated_tokens": generated, "num_steps": 1}
    return ActorRecord(number, no_phases() | phases, stats, units=4, rows=512, error_rows=1)


def run_of(wall_s: float, *actors: ActorRecord):
    return finished_run(outcome="running", wall_us=int(wall_s * 1e6), actors=list(actors))


def put(store: PartStore, status: Status, run) -> None:
    store.folder.replace(f"_pipeline/runs/{run.run_id}.json", json.dumps(run.to_json()).encode())
    store.folder.replace("_pipeline/status.json", json.dumps(status.to_json()).encode())


def drawn(seen: RunFollower, rates: ActorRates, width: int, height: int = 40) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, height=height).print(drawing(seen, "out", rates, height))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 160])
def test_rows_tokens_and_actors_are_drawn_within_the_terminal(work, width):
    store, rates = leave_output(work, finished_run(), "running"), ActorRates()
    put(store, STATUS, run := run_of(10, actor(0, 100, load=5), actor(1, 0, startup=9)))
    seen = RunFollower(store)
    rates.add(run)
    later = run_of(20, actor(0, 600, load=5, decode=8), actor(1, 0, startup=19))
    put(store, STATUS, later)
    seen.look()
    rates.add(later)
    lines = drawn(seen, rates, width)
    assert all(len(line) <= width for line in lines)
    golden("status-watch.txt", "".join(f"{line.rstrip()}\n" for line in lines))


def test_more_actors_than_lines_are_counted(work):
    store = leave_output(work, finished_run(), "running")
    put(store, STATUS, run_of(10, *(actor(number, 1) for number in range(100))))
    lines = drawn(RunFollower(store), ActorRates(), 80, height=20)
    assert len(lines) <= 20
    assert "and 89 more" in lines[-1]


def test_names_and_warnings_control_no_terminal(work):
    store = leave_output(work, finished_run(), "running")
    put(store, replace(STATUS, phase=f"loading {EVIL} [red]x", warning=EVIL), run_of(10))
    text = "".join(drawn(RunFollower(store), ActorRates(), 160))
    assert "[red]x" in text
    assert all(char.isprintable() for char in text)


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("stopped", 1), ("failed", 3), ("interrupted", 75)])
def test_watching_ends_with_the_run_and_has_its_exit_code(work, pipe, monkeypatch, outcome, code):
    store = leave_output(work, finished_run(), "running")
    put(store, STATUS, run_of(10, actor(0, 1)))
    monkeypatch.setattr(run_follower, "LOOK_S", 0.1)

    def end_run() -> None:
        time.sleep(0.4)
        if outcome == "finished":
            store.folder.create("_SUCCESS", success_of(store))
        put(store, replace(STATUS, phase=outcome, outcome=outcome), run_of(11))

    writer = threading.Thread(target=end_run)
    writer.start()
    left, out, _ = pipe("status", "out", "--watch")
    writer.join()
    assert left == code
    assert [line.partition(":")[0] for line in out.splitlines()] == ["running", outcome]
    left, out, _ = pipe("status", "out", "--watch", "--json")
    assert (left, [json.loads(line)["outcome"] for line in out.splitlines()]) == (code, [outcome])


def test_watching_ends_when_the_process_died(work, pipe):
    gone = finished_run(outcome="running", versions={"host": socket.gethostname(), "pid": "4194300"})
    leave_output(work, gone, "running")
    (work / "out" / "_pipeline" / "logs" / "run-1").mkdir(parents=True)
    for command in (("status", "out", "--watch"), ("logs", "out", "--follow")):
        code, _, err = pipe(*command)
        assert (code, "is no longer running" in err) == (3, True), command


def test_ctrl_c_leaves_a_terminal_as_it_was(work):
    put(leave_output(work, finished_run(), "running"), STATUS, run_of(10, actor(0, 1)))
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "status", "out", "--watch"], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"tok/s" not in shown:
        shown += os.read(ours, 4096)
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 75
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:
            break
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h"), "the cursor is back"
    assert b"Traceback" not in shown
    assert shown.rstrip().endswith(b"Interrupted.")
