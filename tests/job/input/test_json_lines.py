"""A whole job over JSON Lines: each line once, over several runs, with kept columns as the file has them."""

import gzip
import json

import pyarrow as pa
import pytest

from pipeline.data.files import text_blocks
from pipeline.errors import InputError
from tests.job.conftest import TEXTS, run, success

pytestmark = pytest.mark.usefixtures("without_ray")


def put(job, name: str, rows: list) -> None:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (job.folder / "in" / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


@pytest.fixture
def lines(job, monkeypatch):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 100)
    rows = [{"id": i, "text": text, "tags": ["a", str(i)]} for i, text in enumerate([*TEXTS, None])]
    put(job, "a.jsonl", rows[:20])
    put(job, "b.jsonl.gz", rows[20:])
    return job


def answers(job) -> list[dict]:
    return sorted(job.table().to_pylist(), key=lambda row: row["id"])


def test_a_job_that_lost_parts_resumes_with_the_same_rows(lines):
    keep = {"input": {"columns": ["id", "tags"]}}
    run(lines, **keep)
    whole = answers(lines)
    assert [row["id"] for row in whole] == list(range(len(TEXTS) + 1))
    assert [(r["source_file"], r["source_row"]) for r in whole[19:21]] == [("a.jsonl", 19), ("b.jsonl.gz", 0)]
    assert whole[3]["tags"] == ["a", "3"]
    assert lines.table().schema.field("tags").type == pa.list_(pa.string())
    assert (whole[-1]["error"], whole[-1]["generated_text"]) == ("null_prompt", None)
    parts = lines.parts()
    assert len(parts) > 3
    for part in parts[1:3]:
        part.unlink()
    (lines.output / "_SUCCESS").unlink()
    run(lines, **keep)
    assert answers(lines) == whole
    assert success(lines)["input_rows"] == len(whole)


def test_a_bad_line_stops_the_job_before_it_begins_or_is_an_error_row(lines):
    with open(lines.folder / "in" / "a.jsonl", "ab") as file:
        file.write(b'{"id": 99, "text": \n')
    with pytest.raises(InputError, match=r"a\.jsonl:21: not JSON"):
        run(lines)
    assert not lines.output.exists()
    run(lines, input={"on_corrupt": "skip"})
    (bad,) = [row for row in lines.table().to_pylist() if row["error"] == "corrupt_input"]
    assert (bad["id"], bad["source_file"], bad["source_row"]) == (None, "a.jsonl", 20)
    assert bad["error_message"].startswith("line 21: not JSON")
