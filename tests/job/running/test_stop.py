"""Signals at any moment of a run: it soon drains or ends with Interrupted, and the next run does the rest."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pipeline.errors import EnvironmentFailed, Interrupted
from pipeline.job.running import run as run_module
from pipeline.machine.signals import ONE_STOP_S, Stopped, StopSignals
from tests.job.conftest import TEXTS, run, runs, stop_in_a_unit

pytestmark = pytest.mark.usefixtures("without_ray", "default_sighup")

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_while_planning_ends_the_run_before_anything_is_written(job, number):
    job.rows(TEXTS)
    with pytest.raises(Interrupted, match=f"Stopped by {number.name} while planning"):
        run(job, [(lambda status: status.phase == "planning", number)])
    assert not job.output.exists()
    run(job)
    job.check(TEXTS)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("step", ["count_rows", "write_success"])
def test_a_signal_while_verifying_or_publishing_ends_the_run_at_once(job, monkeypatch, step, number):
    """Verifying and publishing take long with a million parts in a store."""
    job.rows(TEXTS)
    original, entered = getattr(run_module, step), threading.Event()

    def slow(*args):
        entered.set()
        threading.Event().wait(30.0)
        return original(*args)

    monkeypatch.setattr(run_module, step, slow)

    def send():
        entered.wait()
        time.sleep(0.2)  # the main thread waits by then
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    phase = {"count_rows": "verifying", "write_success": "publishing"}[step]
    began = time.monotonic()
    with pytest.raises(Interrupted, match=f"Stopped by {number.name} while {phase}"):
        run(job)
    assert time.monotonic() - began < 20
    assert runs(job)[0]["outcome"] == "interrupted"
    assert not (job.output / "_SUCCESS").exists()
    monkeypatch.setattr(run_module, step, original)
    run(job)
    job.check(TEXTS)


def test_a_stop_in_a_large_unit_of_short_rows_begins_no_more_and_keeps_what_has_finished(job):
    texts = [f"text {i}" for i in range(1024)]
    job.fake(step_s=0.01, max_num_seqs=4).rows(texts)
    sections = {"output": {"rows_per_file": 1024}, "run": {"window_rows": 5000, "drain_timeout": "1 s"}}
    with pytest.raises(Interrupted, match="Stopped by SIGINT with 0 of 1,024 rows written, and ") as stopped:
        run(job, [(lambda status: status.rows_done > 50, signal.SIGINT)], **sections)
    (partial,) = (job.output / "_pipeline" / "partial").iterdir()
    kept = len(json.loads(partial.read_text())["rows"])
    (actor,) = runs(job)[0]["actors"]
    assert 50 < kept < 600
    assert f", and {kept} finished rows of open units saved." in str(stopped.value)
    assert actor["kept_tokens"]["generated"] == actor["stats"]["generated_tokens"]  # no row was begun in vain
    shown = []
    report, _ = run(job, show=lambda status: shown.append(status.rows_done), **sections)
    assert next(filter(None, shown)) >= kept  # progress continues where it stopped
    job.check(texts)
    assert report.work.resumed_rows == kept


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: {**saved, "format": 99},
        lambda saved: {**saved, "rows": [{**row, "unknown_field": 1} for row in saved["rows"]]},
        lambda saved: {**saved, "rows": [{k: v for k, v in row.items() if k != "text"} for row in saved["rows"]]},
        lambda saved: saved["rows"],
    ],
    ids=["format", "more fields", "fewer fields", "a list"],
)
def test_saved_rows_of_another_version_are_computed_again(job, change):
    job.fake(step_s=0.1, max_num_seqs=2).rows(TEXTS[:16])
    stop_in_a_unit(job)
    (path,) = (job.output / "_pipeline" / "partial").iterdir()
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    report, _ = run(job, output={"rows_per_file": 16})
    job.check(TEXTS[:16])
    assert report.work.resumed_rows == 0
    log = job.output / "_pipeline" / "logs" / runs(job)[1]["run_id"] / "engine-0.log"
    assert f"{path} is not used, its rows are computed again: " in log.read_text()


@pytest.mark.parametrize("rows_per_file", [8, 512])
def test_rows_that_finished_before_an_engine_failed_for_good_are_kept(job, tmp_path, rows_per_file):
    cured = tmp_path / "cured"
    job.fake(step_s=0.02, unusable="text 40", cured_by=str(cured)).rows(TEXTS)
    sections = {"output": {"rows_per_file": rows_per_file}, "run": {"window_rows": 100}}
    with pytest.raises(EnvironmentFailed, match="a fake failure that no restart heals"):
        run(job, **sections)
    first = runs(job)[0]
    kept = sum(len(json.loads(p.read_text())["rows"]) for p in (job.output / "_pipeline").glob("partial/*"))
    assert first["rows_written"] + kept > 0  # row 40 may be among the first
    assert [actor["restarts"] for actor in first["actors"]] == [0]
    cured.touch()
    report, _ = run(job, **sections)
    job.check(TEXTS)
    assert report.work.resumed_rows == kept


def test_a_hangup_that_was_ignored_stays_ignored():
    """`nohup` ignores SIGHUP for its command."""
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.count == 0
    finally:
        signal.signal(signal.SIGHUP, old)


def test_signals_are_counted_while_draining_and_raise_elsewhere():
    """One stop may send several SIGTERMs: Ray's job server sends one to the guard and one to the driver, and the guard
    passes its own on."""
    old = {number: signal.getsignal(number) for number in NUMBERS}
    with StopSignals() as stop, stop.draining():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.count, stop.reason) == (2, "SIGTERM")
    with StopSignals() as stop, stop.draining():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.count == 1
        stop._terminated_s -= ONE_STOP_S
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.count == 2
    with StopSignals() as stop, pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGINT)
    assert {number: signal.getsignal(number) for number in NUMBERS} == old


@pytest.mark.parametrize(
    ("body", "signals"),
    [
        ("swallow()", 1),  # the timer ends it
        ("swallow()", 2),  # a second signal does, before the timer
        ("with stop.draining(): swallow()", 3),  # the first drains, the second ends the drain, the third is enough
    ],
)
def test_a_library_that_swallows_the_stop_cannot_hold_the_process(body, signals):
    script = f"""
import sys, time
from pipeline.machine.signals import StopSignals
def swallow():
    end, printed = time.monotonic() + 60, False
    while time.monotonic() < end:
        try:
            if not printed:
                printed = True
                print("ready", flush=True)
            while time.monotonic() < end:
                time.sleep(0.02)
        except BaseException:
            pass
with StopSignals(grace_s={0.5 if signals == 1 else 60.0}) as stop:
    {body}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[:signals]:
        process.send_signal(number)
        time.sleep(0.2)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code
    assert "Stopped by SIGTERM. Run the same command to resume." in stderr
