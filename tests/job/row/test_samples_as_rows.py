"""Several completions of a row as rows of their own (`output.samples_as: rows`): each exists once, through everything
that counts, moves or replaces rows."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.sample import _shown
from pipeline.config.jobfile import JobFileError
from pipeline.data.output.compact import compact
from pipeline.data.output.inventory import Inventory
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import PartName, PartStore
from pipeline.errors import ConfigError, FingerprintError
from pipeline.job.output.audit import audit
from pipeline.job.output.read_output import divided_by, report_of
from pipeline.job.running.sample import read_sample
from pipeline.report.render import text
from tests.job.conftest import TEXTS, run, runs, success
from tests.job.drive import drive_and_kill
from tests.job.fake_engine import text_of
from tests.job.row.test_several_samples import samples_of

pytestmark = pytest.mark.usefixtures("without_ray")
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "n": 3}
SAMPLED = ("generated_text", "finish_reason", "logprobs")


@pytest.fixture
def rows(job):
    job.settings["output"]["samples_as"] = "rows"
    job.settings["sampling"] = SAMPLING
    return job


def check(job, texts, n=3):
    """Assert that each sample exists once, an error row as sample 0, all with the kept columns."""
    found = {(row["id"], row["sample_index"]): row for row in job.table().to_pylist()}
    assert job.table().num_rows == len(found)
    counts = [1 if prompt is None else n for prompt in texts]
    assert found.keys() == {(i, index) for i, count in enumerate(counts) for index in range(count)}
    for i, prompt in enumerate(texts):
        if counts[i] == 1 < n:
            assert found[i, 0]["error"]
            assert found[i, 0]["generated_text"] is None
            assert (found[i, 0]["finish_reason"], found[i, 0]["num_generated_tokens"]) == ("error", 0)
            continue
        for index, ids in enumerate(samples_of(i, prompt, n)):
            row = found[i, index]
            assert (row["source_row"], row["generated_text"], row["error"]) == (i, text_of(ids), None)
            assert row["finish_reason"] == ("length" if len(ids) == 6 else "stop")
            assert row["num_generated_tokens"] == len(ids)
            assert row["num_input_tokens"] == len(f"Say {prompt}")


def whole(store: PartStore) -> pa.Table:
    names = sorted(name for name in store.folder.names("") if name.endswith(".parquet"))
    return pa.concat_tables([pq.read_table(pa.BufferReader(store.folder.read(name) or b"")) for name in names])


def test_lists_and_rows_hold_the_same_and_are_counted_verified_divided_and_compacted(rows, tmp_path, capsys):
    texts = [*TEXTS[:20], None, *TEXTS[21:30]]
    rows.rows(texts)
    rows.fake(cached=4)  # from cache, of every prompt but the first
    sampling, paths = SAMPLING | {"logprobs": 1}, {form: str(tmp_path / form) for form in ("lists", "rows")}
    reports = {
        form: run(rows, sampling=sampling, output={"path": path, "samples_as": form})[0] for form, path in paths.items()
    }
    stores = {form: PartStore(path) for form, path in paths.items()}
    listed = {row["id"]: row for row in whole(stores["lists"]).to_pylist()}
    rows.output = Path(paths["rows"])
    check(rows, texts)
    for row in rows.table().to_pylist():
        if row["error"] is None:
            one = listed[row["id"]]
            assert [row[name] for name in SAMPLED] == [one[name][row["sample_index"]] for name in SAMPLED]
            assert row["num_input_tokens"] == one["num_input_tokens"]
    assert len({(row["id"], row["num_cached_tokens"]) for row in rows.table().to_pylist()}) == 30

    counts = {form: json.loads(store.folder.read("_SUCCESS") or b"") for form, store in stores.items()}
    for name in counts["lists"]:
        if name.startswith(("num_", "error", "input_", "completed")):
            assert counts["rows"][name] == counts["lists"][name], name
    assert [each["output_rows"] for each in counts.values()] == [30, 88]
    assert counts["rows"]["completed_rows"] == 29
    report, as_json = reports["rows"], reports["rows"].to_json()["rows"]
    assert (report.rows.written, report.rows.completed, as_json["output"]) == (30, 29, 88)
    assert report.tokens == reports["lists"].tokens
    assert "30 of 30: 29 completed, 1 error row; 88 in the output, one for each sample" in " ".join(
        text(report).split()
    )
    assert "in the output" not in text(reports["lists"])
    assert report_of(stores["rows"]).rows == report.rows

    seen = audit(stores["rows"], deep=True, log=print)
    assert seen.sound
    assert "30 rows as 88 samples (1 error row)" in seen.to_text()
    groups = divided_by(stores["rows"], report, "sample_index", 5).groups
    found = {group.value: (group.rows, group.completed.rows, group.completed.input_tokens) for group in groups}
    assert found == {"0": (30, 29, report.tokens.input), "1": (29, 29, 0), "2": (29, 29, 0)}
    assert sum(group.completed.generated_tokens for group in groups) == report.tokens.generated
    assert sum(group.completed.cached_tokens for group in groups) == report.tokens.cached > 0

    everything = rows.table()
    for order in ("input", "parts"):
        target = PartStore(str(tmp_path / f"merged-{order}"))
        done = compact(stores["rows"], target, order, 3000, print)  # type: ignore[arg-type]
        assert (done.rows, done.output_rows, done.error_rows, done.files_made) == (30, 88, 1, done.files)
        assert done.files > 3
        assert "30 rows as 88 samples (1 error row)" in done.to_text()
        merged, keys = whole(target), [("id", "ascending"), ("sample_index", "ascending")]
        assert (merged if order == "input" else merged.sort_by(keys)).equals(everything.sort_by(keys))
        for name in target.folder.names(""):
            if name.startswith("data-"):
                table = pq.read_table(pa.BufferReader(target.folder.read(name) or b""))
                own = set(table["id"].to_pylist())
                assert len(own) == int(name.rpartition("-n")[2].removesuffix(".parquet"))
                assert set(Counter(table["id"].to_pylist()).values()) <= {1, 3}, "samples stay together"

    report, _ = run(rows, sampling=sampling, output={"path": paths["rows"]})
    assert report.rows.output == 88, "of a job that is finished already"
    with pytest.raises(FingerprintError, match=r'output\.samples: "lists" -> "rows"'):
        run(rows, sampling=sampling, output={"path": paths["lists"]})


def test_rows_may_have_one_sample_or_differ_in_their_number(rows):
    table = pa.table(
        {"id": list(range(5)), "text": TEXTS[:5], "n": [1, 3, None, 2, 4], "t": [1.0, 0.5, None, 0.0, 1.0]}
    )
    pq.write_table(table, rows.folder / "in" / "f0.parquet")
    report, _ = run(rows, sampling={"max_tokens": 6, "n": {"column": "n"}, "temperature": {"column": "t"}})
    found = sorted((row["id"], row["sample_index"], row["error"]) for row in rows.table().to_pylist())
    assert Counter(i for i, _, _ in found) == {0: 1, 1: 3, 2: 1, 3: 1, 4: 4}
    assert [(index, error) for i, index, error in found if i == 3] == [(0, "invalid_sampling")]
    assert (report.rows.written, report.rows.output, success(rows)["output_rows"]) == (5, 10, 10)
    report, _ = run(rows, sampling={"n": 1}, output={"path": str(rows.folder / "one")})
    one = pq.read_table(rows.folder / "one", columns=["id", "sample_index", "generated_text"]).to_pylist()
    assert [row["sample_index"] for row in one] == [0] * 5
    assert report.rows.extra_samples == 0
    assert all(isinstance(row["generated_text"], str) for row in one)


def test_samples_kept_of_a_try_and_of_a_run_that_is_killed_exist_once(rows):
    texts = TEXTS[:30]
    rows.rows(texts)
    rows.settings["run"] |= {"window_rows": 100}  # one window, so without Ray
    rows.settings["output"] |= {"rows_per_file": 4}
    rows.fake(step_s=0.02)
    report, _ = run(rows, sample=6)
    tried = list(read_sample(PartStore(str(rows.output)), report.runs[-1].run_id))
    assert Counter(row.sample_index for row in tried) == {0: 6, 1: 6, 2: 6}
    assert all(row.prompt == f"Say {texts[row.source_row]}" for row in tried)
    assert _shown(tried[1]).startswith(f"f0.parquet, row {tried[0].source_row}, sample 1: ")
    rows.config()
    drive_and_kill(rows.folder / "job.yaml", rows.parts)
    killed = report_of(PartStore(str(rows.output))).rows
    assert 0 < killed.written < 30
    assert killed.output == rows.table().num_rows == 3 * killed.written
    report, _ = run(rows)
    check(rows, texts)
    assert (report.rows.written, report.rows.output, success(rows)["output_rows"]) == (30, 90, 90)
    assert runs(rows)[-1]["extra_samples"] == 2 * runs(rows)[-1]["rows_written"]


def test_error_rows_computed_again_become_all_their_samples(rows):
    rows.rows(TEXTS[:16]).fake(kill="text 3 ", cured_by=str(rows.folder / "cure"))
    run(rows)
    assert [(row["id"], row["sample_index"]) for row in rows.table().to_pylist() if row["error"]] == [(3, 0)]
    (rows.folder / "cure").touch()
    run(rows, retry_failed=True)
    check(rows, TEXTS[:16])


def without(table: pa.Table, row: int) -> pa.Table:
    return pa.concat_tables([table.slice(0, row), table.slice(row + 1)])


def twice(table: pa.Table, row: int) -> pa.Table:
    return pa.concat_tables([table.slice(0, row + 1), table.slice(row)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: without(table, 4), "row 1: 1 samples up to 2 are missing"),
        (lambda table: twice(table, 4), "row 1: 1 samples are duplicates"),
        (lambda table: without(table, 5), "output_rows: the parts contain 29, _SUCCESS counts 30"),
    ],
)
def test_a_sample_that_is_lost_or_doubled_is_found(rows, change, message):
    """The changed part still has a good footer and sizes that `_SUCCESS` knows."""
    rows.rows(TEXTS[:10])
    run(rows, output={"rows_per_file": 10})
    store, (part,) = PartStore(str(rows.output)), rows.parts()
    name = PartName.parse(part.name)
    assert name is not None
    assert name.rows == 10
    stored = store.read_part(name)
    assert PartTotals.of_table(stored.table).output_rows == 30
    store.rewrite(name, change(stored.table), stored.metadata, stored.tag)
    now, counts = Inventory.from_store(store), success(rows)
    tokens = store.totals().num_generated_tokens
    sizes = {"parts_bytes": now.parts_bytes, "parts_digest": now.parts_digest, "num_generated_tokens": tokens}
    store.folder.replace("_SUCCESS", json.dumps(counts | sizes).encode())
    found = audit(store, deep=True, log=print)
    assert len(found.problems) == 1
    assert message in found.problems[0]


def test_a_kept_column_may_not_be_called_as_the_samples_are(rows):
    table = pa.table({"id": [1], "text": ["a"], "sample_index": [7]})
    pq.write_table(table, rows.folder / "in" / "f0.parquet")
    with pytest.raises(ConfigError, match="sample_index: sample_index_2"):
        run(rows, input={"columns": ["id", "sample_index"]})
    kept = {"input": {"columns": ["id", "sample_index"]}, "sampling": {"n": 1}}
    report, _ = run(rows, output={"samples_as": "lists"}, **kept)
    assert rows.table()["sample_index"].to_pylist() == [7]
    assert report.rows.output == 1
    assert audit(PartStore(str(rows.output)), deep=True, log=print).sound


def test_a_task_without_samples_has_no_form_of_them(rows):
    with pytest.raises(
        JobFileError, match=r"output\.samples_as: has no effect with task score, which generates no text"
    ):
        rows.config(task="score")
