"""No file reports "finished" before `_SUCCESS` exists; a later failure is reported, and the next run completes it."""

import json

import pytest

from pipeline.errors import EnvironmentFailed
from pipeline.stores.local_folder import LocalFolder
from tests.job.conftest import TEXTS, run, runs

pytestmark = pytest.mark.usefixtures("without_ray")


def outcomes(job) -> dict[str, str]:
    """Return the outcome of the last run according to its record, report and status."""
    folder = job.output / "_pipeline"
    names = {"report": folder / "report.json", "status": folder / "status.json"}
    return {name: json.loads(path.read_text())["outcome"] for name, path in names.items()} | {
        "record": runs(job)[-1]["outcome"]
    }


def test_a_success_that_cannot_be_written_is_no_finished_run(job):
    job.rows(TEXTS)
    blocked = []

    def block(status):
        if status.phase == "verifying" and not blocked:
            blocked.append((job.output / "_SUCCESS").mkdir())

    with pytest.raises(EnvironmentFailed, match=r"All 50 rows are written, but writing _SUCCESS failed"):
        run(job, show=block)
    assert set(outcomes(job).values()) == {"failed"}
    (job.output / "_SUCCESS").rmdir()
    report, _ = run(job)
    job.check(TEXTS)
    assert report.outcome == "finished"
    assert set(outcomes(job).values()) == {"finished"}


def test_a_failed_write_of_the_report_is_a_warning_and_the_next_run_writes_it(job, monkeypatch):
    job.rows(TEXTS)
    replace, failing = LocalFolder.replace, True

    def broken(self, name, data):
        if failing and (self.root / "_SUCCESS").exists():
            raise EnvironmentFailed(f"{name}: no space left")
        replace(self, name, data)

    monkeypatch.setattr(LocalFolder, "replace", broken)
    report, statuses = run(job)
    assert report.outcome == "finished"
    assert "The output is complete, but its report may be outdated" in statuses[-1].warning
    assert "no space left" in statuses[-1].warning
    assert runs(job)[0]["outcome"] == "running", "the last that could be written"
    failing = False
    run(job)
    folder = job.output / "_pipeline"
    assert json.loads((folder / "status.json").read_text())["outcome"] == "finished"
    assert json.loads((folder / "report.json").read_text())["outcome"] == "finished"


def test_success_is_written_before_any_file_reports_finished(job, monkeypatch):
    job.rows(TEXTS)
    replace, order = LocalFolder.replace, []

    def noted(self, name, data):
        replace(self, name, data)
        if name == "_SUCCESS" or (name.endswith(".json") and json.loads(data).get("outcome") == "finished"):
            order.append(name.split("/")[1] if "/" in name else name)

    monkeypatch.setattr(LocalFolder, "replace", noted)
    run(job)
    assert order[0] == "_SUCCESS"
    assert set(order[1:]) == {"runs", "report.json", "status.json"}
