"""Telemetry neither ends a run nor holds it up: failing and hanging writes, long lists."""

import signal
import threading
import time

import pytest

from pipeline.data.output.parts import PartStore
from pipeline.errors import EnvironmentFailed, Interrupted
from pipeline.job.telemetry.writer import Telemetry
from pipeline.report.render import text
from pipeline.stores.local_folder import LocalFolder
from tests.job.conftest import TEXTS, run, runs

pytestmark = pytest.mark.usefixtures("without_ray")


@pytest.fixture
def replacing(monkeypatch):
    """Return `install(fault)`: from then on `fault(name)` is called before a small file is written."""
    replace = LocalFolder.replace

    def install(fault):
        def faulty(self, name, data):
            fault(name)
            replace(self, name, data)

        monkeypatch.setattr(LocalFolder, "replace", faulty)

    return install


def test_failed_writes_are_counted_and_reported(job, replacing):
    def fail(name):
        if name.endswith("status.json"):
            raise EnvironmentFailed(f"{name}: the store says no")

    replacing(fail)
    report, statuses = run(job.rows(TEXTS).fake(step_s=0.02))
    job.check(TEXTS)
    assert any("status and records cannot be written: EnvironmentFailed" in status.warning for status in statuses)
    assert "the store says no" in statuses[-1].warning
    assert runs(job)[0]["telemetry_failures"] > 0
    assert report.work.telemetry_failures > 0
    assert "failed writes of status, record or report" in text(report)


@pytest.mark.parametrize("stopped", [False, True])
def test_writes_that_hang_hold_up_neither_the_run_nor_its_drain(job, replacing, monkeypatch, stopped):
    monkeypatch.setattr(Telemetry, "FLUSH_S", 0.3)
    hang = threading.Event()
    replacing(lambda name: hang.wait(120.0) if name.startswith("_pipeline/") and "partial" not in name else None)
    job.rows(TEXTS).fake(step_s=0.2 if stopped else 0.02)
    began = time.monotonic()
    try:
        if stopped:
            with pytest.raises(Interrupted):
                run(job, [(lambda status: status.units > 0, signal.SIGTERM)], run={"drain_timeout": "1 s"})
        else:
            _, statuses = run(job)
            assert "writing to the output takes too long" in statuses[-1].warning
            job.check(TEXTS)
    finally:
        hang.set()
    assert time.monotonic() - began < 40


def test_the_newest_content_of_a_file_is_written_and_older_ones_are_skipped(tmp_path, replacing):
    store, resume, seen = PartStore(str(tmp_path / "o")), threading.Event(), []
    store.folder.probe()
    replacing(lambda name: (seen.append(name), resume.wait(10.0)))
    telemetry = Telemetry(store.folder)
    telemetry.put("_pipeline/first", b"0")
    while not seen:
        time.sleep(0.01)
    for number in range(50):
        telemetry.put("_pipeline/a", b"%d" % number)
    resume.set()
    assert telemetry.close()
    assert seen == ["_pipeline/first", "_pipeline/a"]
    assert store.folder.read("_pipeline/a") == b"49"


def test_the_list_of_skipped_files_is_written_once(job, replacing):
    writes: dict[str, int] = {}
    replacing(lambda name: writes.update({name: writes.get(name, 0) + 1}))
    job.rows(TEXTS).fake(step_s=0.1)
    for number in range(30):
        (job.folder / "in" / f"damaged-{number}.parquet").write_bytes(b"nothing")
    for _ in range(2):
        report, _ = run(job, input={"on_corrupt": "skip"})
        assert len(report.runs[0].skipped_files) == 30
        assert "Skipped" in text(report)
    assert [count for name, count in writes.items() if "skipped" in name] == [1]
    assert writes[f"_pipeline/runs/{report.runs[0].run_id}.json"] > 2
