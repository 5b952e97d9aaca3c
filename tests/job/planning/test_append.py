"""`--append`: only files that are new since the first run are computed; existing rows stay as they are."""

import json
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.output.compact import compact
from pipeline.data.output.parts import PartStore
from pipeline.errors import EnvironmentFailed, FingerprintError, InputError, Interrupted, OutputError
from pipeline.job.output import success as success_module
from pipeline.job.output.audit import audit
from pipeline.job.planning import fingerprint
from pipeline.job.planning.appended import FOLDER, Batches
from pipeline.job.running.run import run_job
from tests.faults.store import FaultyStore
from tests.job.conftest import FAKES, TEXTS, run, runs, success

pytestmark = pytest.mark.usefixtures("without_ray")


def add(job, name: str, texts: list[str], first_id: int, **columns) -> None:
    ids = pa.array(range(first_id, first_id + len(texts)), pa.int64())
    table = pa.table({"id": ids, "text": texts, **columns})
    pq.write_table(table, job.folder / "in" / name, row_group_size=10)


@pytest.fixture
def begun(job):
    """A finished job of 50 rows in two files, with new files that sort before and between them."""
    run(job.rows(TEXTS, per_file=30))
    job.before = {part.name: part.read_bytes() for part in job.parts()}
    add(job, "a.parquet", [f"early {i}" for i in range(12)], 1000)
    add(job, "f0x.parquet", [f"middle {i}" for i in range(5)], 2000)
    return job


def texts_by_id(job) -> dict[int, str]:
    rows = job.table().to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["generated_text"] for row in rows}


def sound(job) -> bool:
    found = audit(PartStore(str(job.output)), deep=True, log=lambda text: None)
    assert found.sound, found.to_text()
    return True


def test_new_files_and_a_changed_prompt_are_refused_and_nothing_is_recorded(begun):
    with pytest.raises(FingerprintError, match=r"files\.a\.parquet: nothing -> (.|\n)*With --append"):
        run(begun)
    with pytest.raises(FingerprintError, match=r"prompt\.template"):
        run(begun, append=True, prompt={"template": "Read {text}"})
    assert not (begun.output / FOLDER).exists()
    assert (begun.output / "_SUCCESS").exists()
    assert {part.name: part.read_bytes() for part in begun.parts()} == begun.before


def test_only_new_files_are_computed_and_they_are_merged_last(begun, tmp_path):
    report, _ = run(begun, append=True)
    assert begun.before.items() <= {part.name: part.read_bytes() for part in begun.parts()}.items()
    assert texts_by_id(begun).keys() == {*range(50), *range(1000, 1012), *range(2000, 2005)}
    assert success(begun)["completed_rows"] == report.rows.written == 67
    assert runs(begun)[-1]["rows_written"] == 17
    assert sound(begun)
    compact(PartStore(str(begun.output)), PartStore(str(tmp_path / "m")), "input", 1 << 20, lambda text: None)
    (file,) = (tmp_path / "m").glob("*.parquet")
    assert pq.read_table(file)["id"].to_pylist() == [*range(50), *range(1000, 1012), *range(2000, 2005)]


def test_the_output_is_that_of_one_run_over_all_files(begun, tmp_path):
    run(begun, append=True)
    appended = texts_by_id(begun)
    begun.output = tmp_path / "at-once"
    run(begun, output={"path": str(begun.output)})
    assert texts_by_id(begun) == appended


def test_batches_follow_each_other_and_plain_runs_still_work(begun):
    run(begun, append=True)
    before = {part.name: part.read_bytes() for part in begun.parts()}
    assert run(begun)[0].outcome == "finished"
    add(begun, "0.parquet", ["last 1", "last 2"], 3000)
    with pytest.raises(FingerprintError, match="--append"):
        run(begun)
    run(begun, append=True)
    assert before.items() <= {part.name: part.read_bytes() for part in begun.parts()}.items()
    assert success(begun)["completed_rows"] == 69
    assert sound(begun)
    run(begun, append=True)
    assert len(Batches.load(PartStore(str(begun.output))).appended) == 2, "nothing was new"


def test_an_unfinished_job_gets_its_own_rows_and_the_new_ones(job):
    run(job.rows(TEXTS, per_file=30))
    (job.output / "_SUCCESS").unlink()
    job.parts()[0].unlink()
    add(job, "a.parquet", ["early"], 1000)
    run(job, append=True)
    assert success(job)["completed_rows"] == 51
    assert sound(job)


def test_changed_or_missing_files_are_another_job_even_with_the_flag(begun):
    run(begun, append=True)
    add(begun, "f0x.parquet", ["changed"], 2000)
    with pytest.raises(FingerprintError, match=r"f0x\.parquet was appended as "):
        run(begun, append=True)
    (begun.folder / "in" / "f0x.parquet").unlink()
    with pytest.raises(FingerprintError, match="is now missing"):
        run(begun)
    add(begun, "f0.parquet", ["changed"], 0)
    with pytest.raises(FingerprintError):
        run(begun, append=True)


FLOATS = {kind: pa.array([0.1] * 5, kind) for kind in (pa.float32(), pa.float64())}


@pytest.mark.parametrize(
    ("prompt", "kept", "first", "message"),
    [
        ("Say {text}", ["id", "x"], {"x": FLOATS[pa.float32()]}, "but float in"),
        # no part stores x, but 0.1 as a float is another text than as a double: recomputed parts would differ
        ("Say {x}", ["id"], {"x": FLOATS[pa.float32()]}, "but float in"),
        ("Say {text}", None, {}, "but not in"),
    ],
)
def test_a_column_of_another_type_is_refused_before_anything_is_written(job, prompt, kept, first, message):
    sections = {"prompt": {"template": prompt}, "input": {"columns": kept}}
    add(job, "f0.parquet", TEXTS[:5], 0, **first)
    run(job, **sections)
    add(job, "a.parquet", TEXTS[5:10], 5, x=FLOATS[pa.float64()])
    with pytest.raises(InputError, match=rf"column 'x': it is (double )?in the appended file .*a\.parquet, {message}"):
        run(job, append=True, **sections)
    assert not (job.output / FOLDER).exists()
    assert (job.output / "_SUCCESS").exists()


def test_two_runs_that_append_at_once(begun, monkeypatch):
    record = Batches.record

    def second(self, store, *rest):
        record(self, store, *rest)
        record(self, store, *rest)

    monkeypatch.setattr(Batches, "record", second)
    with pytest.raises(EnvironmentFailed, match="another run has appended"):
        run(begun, append=True)
    monkeypatch.undo()
    run(begun)
    assert success(begun)["completed_rows"] == 67


def test_an_input_of_very_many_files(begun, monkeypatch, tmp_path):
    """Above MAX_LISTED_FILES, job.json does not list the names of files."""
    monkeypatch.setattr(fingerprint, "MAX_LISTED_FILES", 1)
    begun.output = tmp_path / "many"
    begun.settings["output"]["path"] = str(begun.output)
    run(begun)
    add(begun, "0.parquet", ["last"], 3000)
    listed = begun.output / fingerprint.FILES
    kept = listed.read_bytes()
    listed.unlink()
    with pytest.raises(OutputError, match=r"files\.json: damaged or missing; it lists the 4 input files"):
        run(begun, append=True)
    listed.write_bytes(kept)
    run(begun, append=True)
    assert success(begun)["completed_rows"] == 68
    assert sound(begun)


def test_error_rows_of_all_batches_are_tried_again(job, tmp_path):
    job.rows(["fine", "text \u2620"]).fake(kill="\u2620", cured_by=str(tmp_path / "cured"))
    run(job)
    add(job, "a.parquet", ["new \u2620", "new"], 1000)
    run(job, append=True)
    assert success(job)["error_rows"] == 2
    (tmp_path / "cured").touch()
    run(job, retry_failed=True)
    assert success(job)["error_rows"] == 0
    assert sound(job)


def test_in_a_store(begun):
    with FaultyStore() as faulty:
        bucket = faulty.bucket
        for name in ("f0.parquet", "f1.parquet"):
            bucket.upload(begun.folder / "in" / name, f"in/{name}")
        in_store = {
            "storage_options": {"s3": dict(bucket.storage)},
            "input": {"path": bucket.url("in")},
            "output": {"path": bucket.url("out")},
        }
        run(begun, **in_store)
        bucket.upload(begun.folder / "in" / "a.parquet", "in/a.parquet")
        report, _ = run(begun, append=True, **in_store)
        assert report.rows.written == 62
        assert json.loads(bucket.get("out/_SUCCESS"))["completed_rows"] == 62


@pytest.mark.parametrize("rows", [0, 1, 45])
def test_a_first_run_of_no_rows_has_an_empty_part_and_loses_none_of_what_is_appended(job, rows):
    report, _ = run(job.rows([]))
    assert [warning.kind for warning in report.warnings] == ["no_rows"]
    (empty,) = job.parts()
    add(job, "a.parquet", [f"more {i}" for i in range(rows)], 50)
    report, _ = run(job, append=True)
    assert len(report.warnings) == (rows == 0)
    assert (report.rows.input, report.rows.written) == (rows, rows)
    add(job, "b.parquet", [f"last {i}" for i in range(5)], 100)
    run(job, append=True)
    assert texts_by_id(job).keys() == {*range(50, 50 + rows), *range(100, 105)}
    assert empty in job.parts()
    assert success(job)["input_rows"] == rows + 5
    assert sound(job)
    for part in job.parts():
        part.unlink()
    run(job)
    assert len(texts_by_id(job)) == rows + 5
    assert sound(job)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("phase", ["verifying", "publishing"])
def test_a_run_whose_output_was_appended_to_meanwhile_does_not_report_completion(job, phase, killed):
    """It would count the rows that it planned, though more belong to the output."""
    job.rows(TEXTS)
    ended = []

    def append(status):
        if killed and status.phase == "starting":
            raise KeyboardInterrupt  # the record exists, but none of its rows

    def other():
        try:
            run_job(job.config(), backend=FAKES, append=True, progress=append)
        except KeyboardInterrupt:
            ended.append("killed")

    def meanwhile(status):
        if status.phase == phase and status.outcome == "running" and not (job.folder / "in/a.parquet").exists():
            add(job, "a.parquet", [f"more {i}" for i in range(10)], 50)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    with pytest.raises(Interrupted, match="has appended input files while this one ran"):
        run(job, show=meanwhile)
    assert bool(ended) == killed
    if killed:
        assert not (job.output / "_SUCCESS").exists()
    else:
        assert success(job)["input_rows"] == 60, "the other run's"
    run(job)
    assert texts_by_id(job).keys() == set(range(60))
    assert sound(job)


def test_a_success_written_after_the_record_of_a_batch_is_removed(job, monkeypatch):
    from_store = success_module.Inventory.from_store

    def record_first(store):
        store.folder.create(f"{FOLDER}/0001.json", json.dumps({"format": 1, "files": {"a.parquet": "x"}}).encode())
        return from_store(store)

    job.rows(TEXTS[:8])
    monkeypatch.setattr(success_module.Inventory, "from_store", record_first)
    with pytest.raises(Interrupted, match="has appended input files"):
        run(job)
    assert not (job.output / "_SUCCESS").exists()


def test_narrower_types_and_other_encodings_become_those_of_the_parts(job):
    kept = {"input": {"columns": ["id", "n", "kind"]}}
    colours = pa.array(["red", "blue"] * 5).dictionary_encode()
    add(job, "f.parquet", ["x"] * 10, 0, n=pa.array(range(10), pa.int64()), kind=colours, rest=[1] * 10)
    run(job, **kept)
    schema = pq.read_schema(job.parts()[0]).remove_metadata()
    add(job, "a.parquet", ["x"] * 10, 10, n=pa.array(range(10), pa.int8()), kind=["green"] * 10, rest=["other"] * 10)
    run(job, append=True, **kept)
    assert {row["id"]: row["kind"] for row in job.table().to_pylist()}[19] == "green"
    assert len(texts_by_id(job)) == 20
    assert all(pq.read_schema(part).remove_metadata().equals(schema) for part in job.parts())
    assert sound(job)


def test_values_of_folder_names_keep_their_type(job):
    def put(site, first_id):
        (job.folder / "in" / f"site={site}").mkdir()
        add(job, f"site={site}/x.parquet", [f"more {i}" for i in range(5)], first_id)

    everything = {"input": {"columns": None}}
    put(1, 0), put(2, 5)
    run(job, **everything)
    put(0, 10)
    run(job, append=True, **everything)
    assert {row["id"]: row["site"] for row in job.table().to_pylist()}[12] == 0
    assert sound(job)
    put("north", 15)
    with pytest.raises(InputError, match=r"column 'site': it is string in .*site=north/x\.parquet, but int64"):
        run(job, append=True, **everything)
