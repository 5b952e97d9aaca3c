"""A job over a batch API's file: each line answered once, by its own values."""

from pathlib import Path

import pytest

from pipeline.errors import FingerprintError, InputError
from tests.job.conftest import run, success
from tests.job.fake_engine import text_of
from tests.job.requests.lines import converted, put, request, tokens_of

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("without_ray")


def check(job) -> None:
    rows = {row["custom_id"]: row for row in job.table().to_pylist()}
    assert job.table().num_rows == 40
    assert rows.keys() == {f"id-{i}" for i in range(40)}
    refused = {"id-6": "invalid_request", "id-7": "invalid_request", "id-8": "invalid_sampling"}
    assert {name: row["error"] for name, row in rows.items() if row["error"]} == refused
    assert rows["id-6"]["error_message"].startswith("body.tools: not supported")
    assert rows["id-7"]["error_message"].startswith("body: expected an object")
    for i in (*range(4), *range(9, 40)):
        max_tokens = 3 + i % 5 if i % 2 else 6
        assert rows[f"id-{i}"]["generated_text"] == text_of(tokens_of(i, max_tokens)), i
    assert rows["id-4"]["generated_text"] == text_of(tokens_of(4, 9, seed=11))
    assert len(rows["id-5"]["logprobs"]) == rows["id-5"]["num_generated_tokens"]
    assert rows["id-9"]["logprobs"] is None


def test_lines_are_answered_by_their_own_values_over_several_runs(batch):
    report, _ = run(batch)
    assert (report.rows.written, report.rows.errors) == (40, 3)
    check(batch)
    whole = sorted(batch.table().to_pylist(), key=lambda row: row["custom_id"])
    for part in batch.parts()[1:3]:
        part.unlink()
    (batch.output / "_SUCCESS").unlink()
    run(batch)
    assert sorted(batch.table().to_pylist(), key=lambda row: row["custom_id"]) == whole
    assert success(batch)["input_rows"] == 40


def test_lines_for_one_choice_make_no_lists_and_a_job_may_set_several_for_lines_without_a_number(batch):
    (batch.folder / "in" / "b.jsonl").unlink()
    put(batch, "a.jsonl", [request(0, n=1)])
    run(batch)
    assert batch.table()["generated_text"].to_pylist() == [text_of(tokens_of(0))]
    put(batch, "a.jsonl", [request(0), request(1, n=1), request(2, n=2)])
    batch.output = batch.folder / "several"
    run(batch, sampling={"n": 4}, output={"path": str(batch.output)})
    rows = sorted(batch.table().to_pylist(), key=lambda row: row["source_row"])
    assert [len(row["generated_text"]) for row in rows] == [4, 1, 2]


def test_appended_requests_and_a_repeated_id(batch):
    run(batch)
    put(batch, "c.jsonl", [request(50)])
    with pytest.raises(FingerprintError, match="--append"):
        run(batch)
    run(batch, append=True)
    assert len(converted(batch)[0]) == 38
    put(batch, "d.jsonl", [request(3)])
    with pytest.raises(InputError, match=r"d\.jsonl:1: custom_id 'id-3' is also used by \S+a\.jsonl:4"):
        run(batch, append=True)
