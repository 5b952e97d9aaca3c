"""A finished output is checked again: parts that were cut, swapped or removed since then are reported."""

import json
from pathlib import Path

import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from pipeline.data.output.compact import compact
from pipeline.data.output.parts import LOADER, PartStore
from pipeline.errors import OutputError
from pipeline.job.output.read_output import report_of
from pipeline.job.output.run_follower import RunFollower
from pipeline.job.planning.fingerprint import JOB, undated_digest
from pipeline.job.telemetry.run_log import PLAN
from pipeline.report.estimate import Estimate, Interval
from tests.job.conftest import TEXTS, run, runs, success

pytestmark = pytest.mark.usefixtures("without_ray")


@pytest.fixture
def finished(job):
    run(job.rows(TEXTS))
    return job


def doubt(job) -> str | None:
    return RunFollower(PartStore(str(job.output))).staleness


def cut(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:500])


def test_loaders_of_folders_find_the_rows_alone(finished, tmp_path, monkeypatch):
    """`_pipeline/` holds more JSON, and of samples more Parquet, than there are parts."""
    import datasets
    import pandas

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    compacted = PartStore(str(tmp_path / "compacted"))
    compact(PartStore(str(finished.output)), compacted, "parts", 10**9, str)
    for file in range(5):
        (finished.output / f"_pipeline/{file}.json").write_text("{}")
        (finished.output / f"_pipeline/samples/{file}.parquet").parent.mkdir(exist_ok=True)
        (finished.output / f"_pipeline/samples/{file}.parquet").write_bytes(finished.parts()[0].read_bytes())
    for folder in (str(finished.output), compacted.path):
        loaded = datasets.load_dataset(folder, cache_dir=str(tmp_path / "cache"), split="train")
        assert sorted(loaded["source_row"]) == sorted(finished.table()["source_row"].to_pylist())
        assert pyarrow.dataset.dataset(folder).count_rows() == len(pandas.read_parquet(folder)) == len(loaded)
    (finished.output / LOADER).write_text("configs: mine")
    run(finished)
    assert (finished.output / LOADER).read_text() == "configs: mine"


def test_an_estimate_is_compared_with_runs_of_its_own_job_alone(finished):
    """`pipeline plan` with another prompt, limit or overlay leaves its estimate in the same output."""
    each, store = Interval(1, 2, 3), PartStore(str(finished.output))
    job = undated_digest(json.loads((finished.output / JOB).read_text())["identity"])
    for number, (planned, compared) in enumerate({job: True, "another job's": False, "": False}.items(), 1):
        made = Estimate("", 0, 3, each, 0.0, each, each, each, job=planned)
        (finished.output / PLAN).write_text(json.dumps(made.to_json()))
        finished.parts()[0].unlink()
        report, _ = run(finished)
        (finished.output / "_pipeline/report.json").unlink()
        assert [each.estimate is not None for each in (report, report_of(store))] == [compared] * 2
        logs = [path.read_text() for path in (finished.output / "_pipeline/logs").glob("*/driver.log")]
        assert sum("plan.json is the estimate of another job" in log for log in logs) == number - 1


@pytest.mark.parametrize(("which", "removed"), [(0, False), (2, False), (0, True)])
def test_a_cut_part_is_named_by_the_next_run(finished, which, removed):
    part = finished.parts()[which]
    cut(part)
    if removed:
        finished.parts()[1].unlink()
    with pytest.raises(OutputError, match=f"{part.name}: this part is damaged"):
        run(finished)
    assert not (finished.output / "_SUCCESS").exists(), "a process that waits for it must not read this output"
    part.unlink()
    report, _ = run(finished)
    finished.check(TEXTS)
    assert report.outcome == "finished"
    assert doubt(finished) is None


def test_a_problem_is_reported_in_one_line(finished):
    part = finished.parts()[0]
    whole = part.read_bytes()
    cut(part)
    assert "bytes" in (doubt(finished) or "")
    part.unlink()
    assert f"{len(finished.parts())} parts" in (doubt(finished) or "")
    part.write_bytes(whole)
    assert doubt(finished) is None
    (finished.output / "_SUCCESS").unlink()
    assert "no _SUCCESS" in (doubt(finished) or "")


def test_parts_that_changed_places_are_seen(finished):
    by_size = {part.stat().st_size: part for part in finished.parts()}
    one, two = list(by_size.values())[:2]
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    assert "names or sizes" in (doubt(finished) or "")


def test_a_part_of_other_bytes_and_a_good_footer_is_counted_again(finished):
    part = finished.parts()[0]
    pq.write_table(pq.read_table(part), part, compression="none")
    assert "bytes" in (doubt(finished) or "")
    _, statuses = run(finished)
    assert any("bytes" in status.phase for status in statuses), "why all parts are counted again"
    assert doubt(finished) is None
    assert len(runs(finished)) == 2


def test_replaced_parts_are_counted_anew(job, tmp_path):
    texts: list[str | None] = [*TEXTS[:7], "text ☠ 7", *TEXTS[8:]]
    job.rows(texts).fake(kill="☠", cured_by=str(tmp_path / "cured"))
    run(job)
    before = success(job)
    (tmp_path / "cured").touch()
    run(job, retry_failed=True)
    assert (before["errors"], success(job)["errors"]) == ({"engine_failure": 1}, {})
    assert success(job)["parts"] == len(job.parts())
    assert success(job)["parts_bytes"] == sum(part.stat().st_size for part in job.parts())
    assert doubt(job) is None
