"""A whole job over CSV and over Arrow: each row once, over several runs, as over Parquet."""

import csv
import gzip
import io

import pyarrow as pa
import pytest

from pipeline.data.files import text_blocks
from pipeline.data.output.parts import PartStore
from pipeline.job.output.audit import audit
from tests.data.test_arrow import put
from tests.job.conftest import TEXTS, run, success

pytestmark = pytest.mark.usefixtures("without_ray")


def write_csv(folder, name: str, rows: list[tuple[str, str]]) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([("id", "text"), *rows])
    (folder / name).write_bytes(
        gzip.compress(text.getvalue().encode()) if name.endswith(".gz") else text.getvalue().encode()
    )


@pytest.mark.parametrize("form", ["csv", "file", "stream"])
def test_a_job_that_lost_parts_resumes_with_the_same_rows(job, form, monkeypatch):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 100)
    rows = [(f"{i:04}", f'{text}, "quoted"\nand on') for i, text in enumerate(TEXTS)]
    first, last = ("a.csv", "b.csv.gz") if form == "csv" else ("a.arrow", "b.feather")
    for name, some in ((first, rows[:30]), (last, rows[30:])):
        if form == "csv":
            write_csv(job.folder / "in", name, some)
        else:
            put(job.folder / "in", name, pa.table(dict(zip(("id", "text"), map(list, zip(*some))))), form, 7)
    run(job, input={"columns": ["id", "text"]})
    whole = sorted(job.table().to_pylist(), key=lambda row: row["id"])
    assert [(row["id"], row["text"]) for row in whole] == rows
    assert [(row["source_file"], row["source_row"]) for row in whole[29:31]] == [(first, 29), (last, 0)]
    for part in job.parts()[1:3]:
        part.unlink()
    (job.output / "_SUCCESS").unlink()
    run(job, input={"columns": ["id", "text"]})
    assert sorted(job.table().to_pylist(), key=lambda row: row["id"]) == whole
    assert success(job)["input_rows"] == len(rows)
    assert audit(PartStore(str(job.output)), deep=True, log=lambda text: None).sound


def test_a_ragged_row_is_an_error_row_under_skip(job):
    write_csv(job.folder / "in", "a.csv", [("1", "one"), ("2", "two", "more"), ("3", "three")])
    run(job, input={"on_corrupt": "skip"})
    rows = sorted(job.table().to_pylist(), key=lambda row: row["source_row"])
    assert [(row["id"], row["error"]) for row in rows] == [("1", None), (None, "corrupt_input"), ("3", None)]
    assert rows[1]["error_message"].startswith("line 3: expected 2 fields, as in the header, but got 3")
