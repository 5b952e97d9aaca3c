"""`--retry-failed`: only error rows are computed again, and their parts are replaced whole."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import OutputError, TooManyRowErrors
from pipeline.stores.local_folder import LocalFolder
from tests.job.conftest import TEXTS, run, runs, success

pytestmark = pytest.mark.usefixtures("without_ray")

RED = {7: "text ☠ 7", 31: "text ☠ 31"}  # rows that end the engine's process while it is not cured


@pytest.fixture
def ill(job, tmp_path):
    """A finished job of 50 rows in which two ended the engine and one has no prompt."""
    texts: list[str | None] = [RED.get(i, text) for i, text in enumerate(TEXTS)]
    texts[40] = None
    job.rows(texts).fake(kill="☠", cured_by=str(tmp_path / "cured"))
    run(job)
    assert success(job)["errors"] == {"engine_failure": 2, "null_prompt": 1}
    job.texts, job.cure = texts, (tmp_path / "cured").touch
    return job


def retry(job, **sections):
    return run(job, retry_failed=True, **sections)[0]


def contents(job):
    return {part.name: part.read_bytes() for part in job.parts()}


def test_only_error_rows_are_computed_again(ill):
    before = contents(ill)
    ill.cure()
    report = retry(ill)
    ill.check(ill.texts)
    assert success(ill)["errors"] == {"null_prompt": 1}
    assert (report.rows.written, report.rows.errors) == (50, 1)
    after = contents(ill)
    assert after.keys() == before.keys(), "a part keeps its name"
    bad = {n for n, data in before.items() if any(pq.read_table(pa.BufferReader(data))["error"].is_valid().to_pylist())}
    assert bad
    assert {name for name in before if after[name] != before[name]} == bad, "only parts with error rows are replaced"
    last = runs(ill)[-1]
    assert last["rows_written"] == 3
    engines = last["actors"][0]["stats"]
    assert engines["prompt_tokens"] == sum(len(f"Say {text}".encode()) for text in RED.values())


def test_rows_that_fail_again_stay_error_rows_and_count_against_the_limit(ill):
    with pytest.raises(TooManyRowErrors):
        retry(ill, run={**ill.settings["run"], "max_error_rate": 0.01})
    assert not (ill.output / "_SUCCESS").exists()
    retry(ill)
    assert success(ill)["error_rows"] == 3
    ill.check(ill.texts)


def test_nothing_failed_and_nothing_is_done(job):
    job.rows(TEXTS)
    run(job)
    before = contents(job)
    report = retry(job)
    assert report.rows.errors == 0
    assert contents(job) == before
    assert len(runs(job)) == 1


def test_what_is_left_of_an_unfinished_job_is_done_too(ill):
    ill.cure()
    clean = next(p for p in ill.parts() if not any(pq.read_table(p)["error"].is_valid().to_pylist()))
    clean.unlink()
    retry(ill)
    ill.check(ill.texts)
    assert success(ill)["error_rows"] == 1


def test_a_store_that_cannot_replace_is_refused_before_anything_is_done(ill, monkeypatch):
    def cannot(self):
        raise OutputError("this store has no conditional replace")

    monkeypatch.setattr(LocalFolder, "probe_swap", cannot)
    before = contents(ill)
    with pytest.raises(OutputError, match="conditional replace"):
        retry(ill)
    assert contents(ill) == before
    assert len(runs(ill)) == 1
