"""Whole runs over dirty data: readable rows are delivered, damage is reported, and each row appears once."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import FingerprintError, InputError
from pipeline.job.actor.tokenize import row_seed
from pipeline.job.planning.plan import make_plan
from pipeline.job.preview.validation import validate_job
from pipeline.report.render import text
from tests.job.conftest import Job, Started, success
from tests.job.conftest import run as run_with_statuses
from tests.job.fake_engine import answer, text_of

pytestmark = pytest.mark.usefixtures("without_ray")

SKIP = {"on_corrupt": "skip"}


def run(job: Job, **sections):
    return run_with_statuses(job, **sections)[0]


def put(job: Job, name: str, table: pa.Table, **options) -> Path:
    path = job.folder / "in" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, write_page_checksum=True, **options)
    return path


def rows(start: int, count: int) -> pa.Table:
    return pa.table(
        {"id": list(range(start, start + count)), "text": [f"row {i:04d}" for i in range(start, start + count)]}
    )


def uncleaned(job: Job) -> None:
    put(job, "a.parquet", rows(0, 25))
    path = put(job, "b.parquet", rows(25, 30), row_group_size=10, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[data.index(b"row 0037")] ^= 1  # one bit
    path.write_bytes(data)
    (job.folder / "in/empty.parquet").write_bytes(b"")
    whole = put(job, "half.parquet", rows(100, 30))
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])


def test_damage_is_reported_and_the_rest_delivered(job):
    uncleaned(job)
    with pytest.raises(InputError, match=r"in/empty\.parquet: the file is empty"):
        run(job)
    assert not job.output.exists()
    report = run(job, input=SKIP)
    found = sorted(job.table().to_pylist(), key=lambda row: (row["source_file"], row["source_row"]))
    locations = [(f"{name}.parquet", i) for name, count in (("a", 25), ("b", 30)) for i in range(count)]
    assert [(r["source_file"], r["source_row"]) for r in found] == locations
    lost, good = found[35:45], [*found[:35], *found[45:]]
    assert {(r["error"], r["id"], r["generated_text"], r["finish_reason"]) for r in lost} == {
        ("corrupt_input", None, None, "error")
    }
    assert all(r["error_message"].startswith("row group 1: damaged: ") for r in lost)
    assert [(r["error"], r["id"]) for r in good] == [(None, i) for i in [*range(35), *range(45, 55)]]
    assert (report.rows.input, report.rows.written, report.rows.errors) == (55, 55, 10)
    counts = success(job)
    assert (counts["input_rows"], counts["errors"], counts["num_skipped_files"]) == (55, {"corrupt_input": 10}, 2)
    assert [(f["file"], f["bytes"] > 0, f["reason"].split(" (")[0]) for f in counts["skipped_files"]] == [
        ("empty.parquet", False, "the file is empty"),
        ("half.parquet", True, "not a Parquet file, or a truncated one"),
    ]
    assert "2 damaged files" in text(report)
    assert "| half.parquet |" in (job.output / "_pipeline" / "report.md").read_text()
    run(job, input=SKIP)
    assert Started.count == 1


def test_a_job_that_was_stopped_by_damage_resumes_with_skip(job):
    uncleaned(job)
    for name in ("empty", "half"):
        (job.folder / f"in/{name}.parquet").unlink()
    with pytest.raises(InputError, match=r"b\.parquet"):
        run(job)
    report = run(job, input=SKIP)
    assert (report.rows.written, report.rows.errors) == (55, 10)


CHANGES = {  # file -> its change: repaired, damaged, removed
    "half": lambda job: put(job, "half.parquet", rows(100, 30)),
    "a": lambda job: (job.folder / "in/a.parquet").write_bytes(b""),
    "empty": lambda job: (job.folder / "in/empty.parquet").unlink(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_input_that_changes_between_runs_is_refused_also_under_skip(job, name):
    uncleaned(job)
    run(job, input=SKIP)
    CHANGES[name](job)
    with pytest.raises(FingerprintError, match=rf"files\.{name}\.parquet: .*bytes.* -> "):
        run(job, input=SKIP)


def test_a_shard_without_a_column_is_refused_before_anything_is_written(job):
    put(job, "a.parquet", rows(0, 3))
    put(job, "b.parquet", rows(3, 3).drop_columns("text"))
    with pytest.raises(InputError, match=r"in/b\.parquet: has no column 'text'"):
        run(job)
    assert not job.output.exists()


def test_a_shard_without_rows_and_one_of_wider_types_are_accepted(job):
    narrow = rows(0, 3)
    put(job, "a.parquet", narrow.set_column(0, "id", narrow["id"].cast(pa.int16())))
    put(job, "b.parquet", rows(1 << 40, 2))
    put(job, "without-rows.parquet", rows(0, 0))
    run(job)
    assert job.table().schema.field("id").type == pa.int64()
    assert sorted(job.table()["id"].to_pylist()) == [0, 1, 2, 1 << 40, (1 << 40) + 1]


def test_rows_with_the_same_id_are_both_kept(job):
    table = pa.table({"id": pa.array([7, 7, None, None]), "text": ["same", "same", "same", "other"]})
    put(job, "a.parquet", table)
    put(job, "b.parquet", table)
    run(job)
    found = job.table().to_pylist()
    assert sorted(str(r["id"]) for r in found) == ["7"] * 4 + ["None"] * 4
    assert len({(r["source_file"], r["source_row"]) for r in found}) == 8


def test_partition_columns_are_columns_of_the_prompt_the_options_and_the_output(job):
    put(job, "date=2024-01-01/site=2/x.parquet", rows(0, 2))
    put(job, "date=2024-01-02/site=3/x.parquet", rows(2, 1))
    job.settings["input"].pop("columns")
    job.settings["output"]["rows_per_file"] = 1
    run(job, prompt={"template": "{date} {text}"}, sampling={"max_tokens": {"column": "site"}})
    found = sorted(job.table().to_pylist(), key=lambda r: r["id"])
    assert [(r["id"], r["date"], r["site"], r["source_file"]) for r in found] == [
        (0, "2024-01-01", 2, "date=2024-01-01/site=2/x.parquet"),
        (1, "2024-01-01", 2, "date=2024-01-01/site=2/x.parquet"),
        (2, "2024-01-02", 3, "date=2024-01-02/site=3/x.parquet"),
    ]
    assert [r["num_input_tokens"] for r in found] == [len("2024-01-01 row 0000")] * 3
    assert [r["num_generated_tokens"] <= r["site"] for r in found] == [True] * 3


def test_folders_partitioned_in_part_are_refused_by_name(job):
    put(job, "day=1/x.parquet", rows(0, 2))
    put(job, "x.parquet", rows(2, 2))
    job.settings["input"].pop("columns")
    with pytest.raises(InputError, match=r"in/x\.parquet: is not in a folder day="):
        make_plan(job.config(), "cpu")
    assert make_plan(job.config(input={"columns": ["id"]}), "cpu").num_rows == 4


def test_a_column_whose_name_has_a_dot_is_sent(job):
    put(job, "a.parquet", pa.table({"id": [0], "author.name": ["Ann"], "was": [{"born": 7}]}))
    template = "{author.name} is {was.born}"
    found = validate_job(job.config(prompt={"template": template}, model={"path": "owner/not-here"}))
    assert not found.mistakes
    assert found.facts["first_prompt"]["text"] == "Ann is 7"
    run(job, prompt={"template": template})
    (row,) = job.table().to_pylist()
    prompt = list(b"Ann is 7")
    assert row["generated_text"] == text_of(answer(prompt, row_seed(0, "a.parquet", 0), 6))
