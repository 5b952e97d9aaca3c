"""`--retry-failed` with another engine.max_model_len: only error rows are computed, and the parts name them."""

import json

import pyarrow.parquet as pq
import pytest

from pipeline.data.output.compact import compact
from pipeline.data.output.parts import PartStore
from pipeline.data.output.retried import KEY, RetriedRows
from pipeline.errors import EnvironmentFailed, FingerprintError, OutputError
from pipeline.job.output.audit import audit
from pipeline.job.running.driver import Driver
from pipeline.report.render import text
from pipeline.stores.local_folder import LocalFolder
from tests.job.conftest import TEXTS, run, runs, success

pytestmark = pytest.mark.usefixtures("without_ray")

LONG = {3: "text 3 " + "y" * 40, 22: "text 22 " + "y" * 90, 45: "text 45 " + "y" * 40}


@pytest.fixture
def long(job):
    """A finished job of 50 rows, three of which were too long for 40 tokens; one would be for 80, too."""
    job.texts = [LONG.get(i, text) for i, text in enumerate(TEXTS)]
    run(job.rows(job.texts), engine={"max_model_len": 40})
    assert success(job)["errors"] == {"prompt_too_long": 3}
    return job


def retry(job, max_model_len, **sections):
    return run(job, retry_failed=True, engine={"max_model_len": max_model_len}, **sections)[0]


def noted(job) -> list[tuple[int, int]]:
    """Return (source_row, limit) of all rows that the parts' footers name."""
    found = []
    for part in job.parts():
        for entry in json.loads((pq.read_metadata(part).metadata or {}).get(KEY.encode(), b"[]")):
            found += [(row, entry["limits"]["engine.max_model_len"]) for _, row in entry["rows"]]
    return sorted(found)


def store(job) -> PartStore:
    return PartStore(str(job.output))


def test_error_rows_are_computed_under_the_new_limit_and_named(long):
    names = [part.name for part in long.parts()]
    report = retry(long, 80)
    assert success(long)["errors"] == {"prompt_too_long": 1}
    long.check(long.texts)
    assert [part.name for part in long.parts()] == names
    assert noted(long) == [(3, 80), (22, 80), (45, 80)]
    assert runs(long)[-1]["retry_limits"] == {"engine.max_model_len": 80}
    assert "3 error rows with engine.max_model_len 80 (run 0002)" in text(report)
    assert audit(store(long), deep=True, log=lambda text: None).sound


def test_the_newest_limit_of_a_row_counts_and_the_jobs_own_needs_no_note(long):
    retry(long, 80)
    retry(long, 40)
    assert noted(long) == [(3, 80), (45, 80)]
    retry(long, 200)
    assert success(long)["errors"] == {}
    long.check(long.texts)
    assert noted(long) == [(3, 80), (22, 200), (45, 80)]


def test_later_runs_are_of_the_jobs_own_limit_and_other_changes_are_still_refused(long):
    with pytest.raises(FingerprintError, match=r"prompt\.template"):
        retry(long, 200, prompt={"template": "Read {text}"})
    assert noted(long) == []
    retry(long, 200)
    report, _ = run(long, engine={"max_model_len": 40})
    assert report.outcome == "finished"
    with pytest.raises(FingerprintError, match=r"max_model_len: 40 -> 200(.|\n)*With --retry-failed"):
        run(long, engine={"max_model_len": 200})


def test_rows_that_were_never_computed_belong_to_the_first_limit(long):
    long.parts()[0].unlink()
    (long.output / "_SUCCESS").unlink()
    with pytest.raises(FingerprintError, match=r"Finish the job without the change of engine.max_model_len"):
        retry(long, 200)
    run(long, engine={"max_model_len": 40})
    retry(long, 200)
    long.check(long.texts)
    assert success(long)["errors"] == {}


def test_a_part_that_is_removed_meanwhile_is_not_made_under_the_new_limit(long, monkeypatch):
    compute = Driver.compute

    def removed_first(self, spec):
        for part in long.parts():
            part.unlink()
        compute(self, spec)

    monkeypatch.setattr(Driver, "compute", removed_first)
    with pytest.raises(OutputError, match="no longer exists"):
        retry(long, 200)
    assert not long.parts()


@pytest.mark.usefixtures("one_unit_in_flight")
def test_a_run_that_fails_midway_leaves_whole_parts_of_both_kinds_and_is_resumed(long, monkeypatch):
    swap, calls = LocalFolder.swap, []

    def failing(self, name, data, tag):
        if name.startswith("part-"):
            calls.append(name)
            if len(calls) == 2:
                raise EnvironmentFailed("the disk is full")
        return swap(self, name, data, tag)

    monkeypatch.setattr(LocalFolder, "swap", failing)
    with pytest.raises(EnvironmentFailed):
        retry(long, 200)
    assert 0 < len(noted(long)) < 3
    assert not (long.output / "_SUCCESS").exists()
    monkeypatch.undo()
    retry(long, 200)
    assert success(long)["errors"] == {}
    long.check(long.texts)
    assert noted(long) == [(3, 200), (22, 200), (45, 200)]


def test_merged_files_name_their_own_rows(long, tmp_path):
    retry(long, 200)
    compact(store(long), PartStore(str(tmp_path / "merged")), "input", 3000, lambda text: None)
    files = sorted((tmp_path / "merged").glob("*.parquet"))
    assert len(files) > 1
    named = 0
    for file in files:
        table = pq.read_table(file)
        row_ids = RetriedRows({KEY: pq.read_metadata(file).metadata.get(KEY.encode(), b"[]").decode()}).row_ids
        assert row_ids <= set(zip(table["source_file"].to_pylist(), table["source_row"].to_pylist()))
        named += len(row_ids)
    assert named == 3


@pytest.mark.parametrize("note", ["[", '[{"limits": {"engine.max_model_len": 9}, "rows": [["f0.parquet", 999]]}]'])
def test_a_wrong_note_is_found(long, note):
    part = store(long)
    name, _ = next(part.parts())
    read = part.read_part(name)
    part.rewrite(name, read.table, {**read.metadata, KEY: note}, read.tag)
    found = audit(part, deep=True, log=lambda text: None)
    assert not found.sound
    assert KEY in str(found.to_json())
