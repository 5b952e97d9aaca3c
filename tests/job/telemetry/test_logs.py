"""Logs of a run and its engines' processes in the output, in files of bounded size."""

import threading
import time

import pytest

from pipeline.data.output.parts import PartStore
from pipeline.errors import EnvironmentFailed
from pipeline.job.telemetry import logs
from pipeline.job.telemetry.logs import LogFolder, LogOptions, RotatedLog
from pipeline.stores.local_folder import LocalFolder
from tests.faults.store import FaultyStore
from tests.job.conftest import TEXTS, run, runs

pytestmark = pytest.mark.usefixtures("without_ray")


def wait_until(holds, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def log_of(job, name: str, number: int = -1) -> str:
    return (job.output / "_pipeline" / "logs" / runs(job)[number]["run_id"] / name).read_text()


def test_the_driver_notes_its_phases_with_their_time(job):
    run(job.rows(TEXTS))
    lines = log_of(job, "driver.log").splitlines()
    assert all(line[:2] == "20" for line in lines)
    messages = [line[24:].split(maxsplit=1)[1] for line in lines]
    assert messages[0].startswith(f"run {runs(job)[0]['run_id']}: 50 rows")
    phases = ("loading the model", "verifying", "publishing", "ended: finished")
    assert [phase for phase in messages if phase in phases] == list(phases)


def test_the_prints_of_an_engine_its_stack_at_a_crash_and_the_end_of_each_process_are_kept(job):
    run(job.fake(segfault="poison", prints="loading shard 1 of 2").rows(["fine", "poison", *TEXTS[:8]]))
    log = log_of(job, "engine-0.log")
    assert "loading shard 1 of 2" in log
    assert "Fatal Python error: Segmentation fault" in log
    assert "in _maybe_fail" in log
    assert "ended: signal SIGSEGV" in log
    assert "a row ended the process each time, even alone" in log


def test_a_failure_of_the_environment_names_the_logs(job):
    with pytest.raises(EnvironmentFailed) as raised:
        run(job.fake(die_loading=True, prints="what went wrong").rows(TEXTS))
    folder = job.output / "_pipeline" / "logs" / runs(job)[0]["run_id"]
    assert f"The logs of this run: {folder}" in str(raised.value)
    assert f"Its output is in {folder}/engine-0.log" in str(raised.value)
    assert "what went wrong" in log_of(job, "engine-0.log")
    assert "ended 3 times while loading" in log_of(job, "driver.log")


def test_a_log_continues_in_other_files_and_its_control_characters_are_spelled_out(tmp_path):
    log = RotatedLog(LocalFolder(str(tmp_path)), "x/a.log", max_bytes=2000)
    for number in range(500):
        log.line(f"line {number} \x1b[31m")
    log.close()
    files = {path.name: path.read_text() for path in (tmp_path / "x").iterdir()}
    assert len(files) == 3
    assert all(len(text) <= 2000 for text in files.values())
    assert "line 0 " in files["a.log"]
    assert max(files.values()).endswith("line 499 \\x1b[31m\n")


def test_a_disk_that_fails_or_hangs_blocks_no_caller(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MAX_WAITING", 10)
    (tmp_path / "file").write_text("")
    failing = RotatedLog(LocalFolder(str(tmp_path)), "file/a.log")
    failing.line("one")
    time.sleep(0.2)
    (tmp_path / "file").unlink()
    failing.line("two")
    failing.close()
    words = [line.split()[-1] for line in (tmp_path / "file" / "a.log").read_text().splitlines()]
    assert words == ["one", "two"], "a failed write is repeated"
    hang = threading.Event()
    monkeypatch.setattr(logs.Path, "mkdir", lambda *_, **__: hang.wait(60.0))
    hanging = RotatedLog(LocalFolder(str(tmp_path)), "y/a.log")
    for _ in range(100):
        hanging.line("line")
    assert hanging.dropped >= 88
    hang.set()


def test_logs_of_an_output_in_a_store_are_uploaded_as_they_grow(tmp_path, monkeypatch):
    """A local folder replaces the store, which has no paths to write to."""
    store, uploads = PartStore(str(tmp_path / "o")), []
    store.folder.probe()
    replace = LocalFolder.replace
    monkeypatch.setattr(logs, "LocalFolder", str)
    monkeypatch.setattr(logs, "SYNC_S", 0.05)
    monkeypatch.setattr(LocalFolder, "replace", lambda *a: (uploads.append(a[1]), replace(*a)))
    log = LogFolder(store, "0001-x").log("driver.log", "info")
    name = "_pipeline/logs/0001-x/driver.log"
    for line in ("one", "two"):
        log.line(line)
        wait_until(lambda line=line: (store.folder.read(name) or b"").endswith(f"{line}\n".encode()))
    time.sleep(0.3)
    assert uploads == [name] * 2, "what did not change is not uploaded again"
    log.line("three")
    log.close()
    assert store.folder.read(name).endswith(b"three\n")


def test_logs_of_old_runs_are_removed_from_a_disk_and_from_a_store(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MAX_RUNS", 2)
    for number in ("0001", "9999", "10000"):
        (tmp_path / "_pipeline" / "logs" / f"{number}-x").mkdir(parents=True)
    LogFolder(PartStore(str(tmp_path)), "10001-x").prune()
    assert {path.name for path in (tmp_path / "_pipeline" / "logs").iterdir()} == {"9999-x", "10000-x"}
    with FaultyStore() as faulty:
        bucket = faulty.bucket
        for run in ("0001-x", "9999-x", "10000-x"):
            for name in ("driver.log", "engine-0.log.1"):
                bucket.put(f"out/_pipeline/logs/{run}/{name}", b"a line\n")
        LogFolder(PartStore(bucket.url("out"), dict(bucket.storage)), "10001-x").prune()
        wait_until(lambda: len(bucket.tags()) == 4)
        assert {key.split("/")[3] for key in bucket.tags()} == {"9999-x", "10000-x"}


def test_a_log_keeps_lines_of_its_level_and_all_that_was_printed(tmp_path):
    log = RotatedLog(LocalFolder(str(tmp_path)), "a.log", "warning")
    written = [log.line(f"{level} line", level) for level in logs.LEVELS]
    log.close()
    assert [len(lines) for lines in written] == [0, 0, 1, 1]
    kept = (tmp_path / "a.log").read_text().splitlines()
    assert kept == [*written[2], *written[3]]
    assert [line[24:] for line in kept] == ["warning warning line", "print   print line"]


def test_the_level_debug_logs_units_and_counters_and_the_driver_shows_its_lines(job, monkeypatch):
    shown = []
    monkeypatch.setattr("pipeline.job.process.supervisor.COUNTERS_US", 0)
    job.fake(step_s=0.1)
    run(job.rows(TEXTS), logs=LogOptions("debug", shown.append))
    driver, engine = log_of(job, "driver.log"), log_of(job, "engine-0.log")
    assert driver.splitlines() == shown
    assert "debug   unit 0 of window 0: 8 rows, 0 error rows" in driver
    assert "debug   unit 0 of window 0: 8 rows" in engine
    assert "info    loading: warming up" in engine
    assert "debug   num_steps" in engine
    assert "info    running: " in driver
    run(job.rows(TEXTS), output={"path": str(job.folder / "other")}, logs=LogOptions())
    (other,) = (job.folder / "other" / "_pipeline" / "logs").iterdir()
    assert " debug " not in (other / "driver.log").read_text() + (other / "engine-0.log").read_text()


def test_the_error_files_of_rays_processes_are_copied(tmp_path):
    session = tmp_path / "logs"
    session.mkdir()
    (session / "worker-1.err").write_text("x" * 100_000 + "the end of it")
    (session / "worker-2.err").write_text("")
    (session / "worker-2.out").write_text("not this")
    folder = LogFolder(PartStore(str(tmp_path / "out")), "0001-x")
    folder.collect_ray(tmp_path / "nothing")
    folder.collect_ray(session)
    copied = (tmp_path / "out" / "_pipeline" / "logs" / "0001-x" / "ray.log").read_text()
    assert copied.startswith("--- worker-1.err\nxxx")
    assert copied.endswith("the end of it")
    assert len(copied) < 70_000
    assert "worker-2" not in copied


def test_records_count_restarted_engines_and_the_log_has_the_reason(job):
    texts = ["fine", "poison", *TEXTS[:8]]
    report, _ = run(job.fake(crash="poison").rows(texts))
    job.check(texts)
    assert report.rows.errors_by_code == {"engine_failure": 1}
    assert report.work.engine_restarts > 0
    assert report.phases_us["wasted"] > 0
    assert sum(report.phases_us.values()) == report.machine_us
    assert "RuntimeError: a fake step failed" in log_of(job, "engine-0.log")
    assert "a fake step failed" in str(runs(job)[0]["actors"][0]["restart_reasons"])


def test_the_logs_of_an_output_in_a_store_are_complete_at_the_end_of_the_run(job):
    job.rows(TEXTS)
    with FaultyStore() as faulty:
        bucket = faulty.bucket
        run(job, output={"path": bucket.url("out")}, storage_options={"s3": dict(bucket.storage)})
        names = {key.rpartition("/")[2]: bucket.get(key) for key in bucket.tags() if "/logs/" in key}
    assert b"ready" in names["engine-0.log"]
    assert b"ended: finished" in names["driver.log"]
