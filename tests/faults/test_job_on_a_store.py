"""A whole job, over a fake engine, whose input, output and model are in a store that fails all the time."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.stores.retries import RetryPolicy
from tests.faults.store import KEY, SECRET, FaultyStore
from tests.job.conftest import TEXTS, Job, run, stop_in_a_unit
from tests.job.input.test_repaired import Damaged

pytestmark = pytest.mark.usefixtures("without_ray")

CHANCES = {"lost_put": 0.1, "slow_down": 0.1, "server_error": 0.05, "truncated": 0.1, "reset": 0.02, "conflict": 0.05}


@pytest.fixture(scope="module")
def store():
    with FaultyStore(seed=5, chances=CHANCES) as store:
        yield store


@pytest.fixture
def job(tmp_path, store, monkeypatch) -> Job:
    """A job of `tests.job` whose files go into the store under the test's own name."""
    quick = RetryPolicy(first_wait_s=0.001, max_wait_s=0.01)
    monkeypatch.setattr("pipeline.stores.filesystem.RetryPolicy", lambda: quick)
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    return Job(tmp_path)


def upload(job: Job, store: FaultyStore) -> None:
    """Put the job's files into the store and change its settings to them."""
    for kind in ("in", "model"):
        for path in (job.folder / kind).iterdir():
            store.bucket.upload(path, f"{job.folder.name}/{kind}/{path.name}")
    for section, kind in (("input", "in"), ("output", "out")):
        job.settings[section] |= {"path": store.bucket.url(f"{job.folder.name}/{kind}")}
    job.settings["storage_options"] = {"s3": dict(store.bucket.storage)}


def table(job: Job, store: FaultyStore) -> pa.Table:
    folder = job.folder / "copy"
    store.bucket.download(f"{job.folder.name}/out/", folder)
    assert (folder / "_SUCCESS").exists()
    return pa.concat_tables(pq.read_table(p) for p in sorted(folder.glob("part-*.parquet")))


def test_to_21_a_job_through_all_of_them_gives_the_rows_of_one_on_disk(job, store):
    job.rows(TEXTS)
    run(job)
    job.check(TEXTS)
    expected = {r["id"]: r["generated_text"] for r in job.table().to_pylist()}
    upload(job, store)
    for fault in CHANCES:  # each strikes at least once, whatever the chances
        store.proxy.add(fault, f"{job.folder.name}/out/")
    report, _ = run(job)
    assert {r["id"]: r["generated_text"] for r in table(job, store).to_pylist()} == expected
    assert table(job, store).num_rows == len(TEXTS)
    # aiohttp may retry a broken connection itself, and counts no retry
    assert {"throttled", "server_error", "conflict", "short_read"} <= report.work.storage_retries.keys()
    assert all(store.proxy.done[fault] > 0 for fault in CHANCES), store.fault_counts()


def test_rows_of_an_interrupted_run_are_reused_from_the_store(job, store):
    job.fake(step_s=0.05, max_num_seqs=3).rows(TEXTS[:16])
    upload(job, store)
    done = stop_in_a_unit(job)
    report, _ = run(job, output={"rows_per_file": 16})
    rows = table(job, store)
    assert sorted(rows["id"].to_pylist()) == list(range(16))
    kept_tokens = sum(len(row["token_ids"]) for row in done)
    assert report.runs[1].stat("generated_tokens") == sum(rows["num_generated_tokens"].to_pylist()) - kept_tokens
    assert not store.bucket.tags(f"{job.folder.name}/out/_pipeline/partial/")


def test_a_file_that_was_repaired_in_the_store_leaves_each_row_once(job, store):
    damaged = Damaged(job, 1, 6)
    upload(job, store)
    run(job)
    out = f"{job.folder.name}/out/"
    parts = [key for key in sorted(store.bucket.tags(out)) if key.startswith("part-")]
    for key in (*parts[1:], "_SUCCESS", "_pipeline/damaged/w00001.json"):
        store.bucket.client.delete_object(Bucket=store.bucket.name, Key=out + key)
    store.bucket.put(f"{job.folder.name}/in/f0.parquet", damaged.backup)
    run(job)
    rows = table(job, store).to_pylist()
    assert sorted(row["source_row"] for row in rows) == list(range(80))
    assert {row["source_row"] for row in rows if row["error"] == "corrupt_input"} == set(range(10, 20))


def test_no_file_or_log_of_a_job_holds_its_storage_options(job, store, caplog, capfd):
    job.rows(TEXTS[:10])
    upload(job, store)
    report, statuses = run(job)
    objects = [store.bucket.get(f"{job.folder.name}/out/{key}") for key in store.bucket.tags(f"{job.folder.name}/out/")]
    shown = [
        repr(report),
        *map(repr, statuses),
        caplog.text,
        *capfd.readouterr(),
        *(d.decode("latin1") for d in objects),
    ]
    assert len(objects) > 4
    for text in shown:
        assert SECRET not in text
        assert KEY not in text
