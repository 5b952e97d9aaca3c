"""Merging parts: every row once, in the requested order, never half, and never over existing files."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.output.compact import PLAN, Compacted, compact
from pipeline.data.output.inventory import Inventory
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import SUCCESS, PartName, PartStore
from pipeline.data.output.result_columns import output_schema
from pipeline.errors import EnvironmentFailed, OutputError
from tests.stores.boxes import box_url

FINGERPRINT = "1a2b3c4d" * 8
ROWS_PER_FILE = 40  # in the input
RENAME = {"source_row": "line"}


def finish_job(store: PartStore, windows: int = 3, rows: int = 30, units: int = 4, seed: int = 0) -> pa.Table:
    """Write an output as a finished job leaves it: units of a window hold its rows in any order. Return all rows in
    the input's order."""
    store.folder.probe()
    schema = output_schema(pa.schema([("id", pa.int64()), ("tags", pa.list_(pa.string()))]), RENAME)
    draw = random.Random(seed)
    everything = []
    for window in range(windows):
        numbers = [window * rows + i for i in range(rows)]
        everything += numbers
        draw.shuffle(numbers)
        for unit in range(units):
            some = numbers[unit::units]
            table = pa.Table.from_pylist([_row(i) for i in some], schema=schema)
            name = PartName(FINGERPRINT[:8], window, unit, units, len(some))
            store.write(name, table, {"pipeline.fingerprint": FINGERPRINT, "pipeline.run": str(window)})
    if not everything:
        store.write(PartName(FINGERPRINT[:8], 0, 0, 1, 0), schema.empty_table())
    _succeed(store, store.totals())
    return pa.Table.from_pylist([_row(i) for i in everything], schema=schema)


def _row(i: int) -> dict:
    failed = i % 13 == 5
    return {
        "id": i, "tags": [f"t{i}", None], "generated_text": None if failed else f"answer {i} " * (i % 7),
        "error": "null_prompt" if failed else None, "num_input_tokens": i, "num_cached_tokens": 0,
        "num_generated_tokens": i % 7, "source_file": f"f{i // ROWS_PER_FILE}.parquet", "line": i % ROWS_PER_FILE,
    }  # fmt: skip


def _succeed(store: PartStore, totals: PartTotals) -> None:
    counts = {
        "job": "demo", "fingerprint": FINGERPRINT, "input_rows": totals.rows,
        "completed_rows": totals.rows - totals.num_error_rows, "error_rows": totals.num_error_rows,
        "num_generated_tokens": totals.num_generated_tokens, "output_rows": totals.output_rows,
        "rows_checksum": totals.checksum_hex, **asdict(Inventory.from_store(store)),
    }  # fmt: skip
    store.folder.replace(SUCCESS, json.dumps(counts).encode())


@pytest.fixture(params=["local", "memory"])
def stores(request, tmp_path):
    """Return the job's output and the target of the merge: on a local disk, and in an fsspec store."""
    if request.param == "local":
        return PartStore(str(tmp_path / "out")), PartStore(str(tmp_path / "merged"))
    root = box_url(tmp_path.name)
    return PartStore(f"{root}/out"), PartStore(f"{root}/merged")


def merged(store: PartStore) -> pa.Table:
    names = [name for name in store.folder.names("") if name[0] not in "_."]
    tables = [pq.read_table(pa.BufferReader(store.folder.read(name) or b"")) for name in names]
    return pa.concat_tables(tables).replace_schema_metadata(None)


def run(source: PartStore, target: PartStore, order="input", size: int = 2000) -> Compacted:
    return compact(source, target, order, size, lambda text: None)


def test_in_the_order_of_the_input(stores):
    source, target = stores
    expected = finish_job(source)
    done = run(source, target)
    assert merged(target).equals(expected)
    assert (done.rows, done.parts, done.error_rows) == (90, 12, 7)
    assert done.files == done.files_made == len([n for n in target.folder.names("") if n.startswith("data-")])
    assert done.files > 3, "files that end inside a window"
    success = json.loads(target.folder.read("_SUCCESS") or b"")
    assert (success["completed_rows"], success["error_rows"], success["files"]) == (83, 7, done.files)
    before = {name: target.folder.read(name) for name in target.folder.names("") if name != "_pipeline"}
    assert run(source, target).files_made == 0
    assert {name: target.folder.read(name) for name in before} == before


def test_in_the_order_of_the_parts_and_in_one_file(stores):
    source, target = stores
    expected = finish_job(source)
    assert run(source, target, "parts", 10**9).files == 1
    found = merged(target)
    assert found.column("id") != expected.column("id")
    assert found.sort_by("id").equals(expected)


@pytest.mark.parametrize("size", [300, 20_000, 10**9])
def test_texts_of_a_file_are_joined_in_order(stores, size):
    source, target = stores
    rows = finish_job(source, windows=7).to_pylist()
    done = run(source, target, "source_file", size)
    found = merged(target).to_pylist()
    assert [row["source_file"] for row in found] == [f"f{i}.parquet" for i in range(6)]
    for row in found:
        own = [each for each in rows if each["source_file"] == row["source_file"]]
        assert row["generated_text"] == "\n\n".join(each["generated_text"] for each in own if each["generated_text"])
        assert row["num_rows"] == len(own)
        assert row["error_rows"] == [each["line"] for each in own if each["error"]]
    assert (done.rows, done.files) == (210, len([n for n in target.folder.names("") if n.startswith("data-")]))
    assert size > 300 or done.files > 6, "some files hold no document"
    assert run(source, target, "source_file", size).files_made == 0
    with pytest.raises(OutputError, match="was started with --by source_file"):
        run(source, target, "input", size)


def test_only_single_texts_are_joined(stores):
    source, target = stores
    finish_job(source)
    for name in source.folder.names(""):
        if (part := PartName.parse(name)) is not None:
            table = source.read_part(part).table
            source.folder.replace(name, b"")
            sink = pa.BufferOutputStream()
            pq.write_table(table.drop_columns("generated_text"), sink)
            source.folder.replace(name, sink.getvalue().to_pybytes())
    counts = json.loads(source.folder.read(SUCCESS) or b"") | asdict(Inventory.from_store(source))
    source.folder.replace(SUCCESS, json.dumps(counts).encode())
    with pytest.raises(OutputError, match="needs one completion for each"):
        run(source, target, "source_file")


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_an_interrupted_call_is_resumed(stores, failing, monkeypatch):
    source, target = stores
    expected = finish_job(source)
    create, calls = target.folder.create, []

    def full(name, data):
        if name.startswith("data-"):
            calls.append(name)
            if len(calls) == failing + 1:
                raise EnvironmentFailed("disk full")
        return create(name, data)

    monkeypatch.setattr(target.folder, "create", full)
    with pytest.raises(EnvironmentFailed):
        run(source, target)
    assert target.folder.read("_SUCCESS") is None
    done = run(source, target)
    assert done.files - done.files_made == failing
    assert merged(target).equals(expected)


def test_two_concurrent_calls_make_one_result(stores, monkeypatch):
    """Another call writes each file just before this one."""
    source, target = stores
    expected = finish_job(source)
    create = target.folder.create

    def raced(name, data):
        return create(name, data) and not name.startswith("data-")

    monkeypatch.setattr(target.folder, "create", raced)
    done = run(source, target)
    assert done.files_made == 0
    assert merged(target).equals(expected)


def test_a_job_without_rows(stores):
    source, target = stores
    finish_job(source, windows=0)
    assert run(source, target).files == 1
    assert merged(target).num_rows == 0
    assert "generated_text" in merged(target).column_names


def test_other_inputs_and_targets_are_refused(stores):
    source, target = stores
    finish_job(source)
    raw = source.folder.read("_SUCCESS") or b""
    source.folder.remove("_SUCCESS")
    with pytest.raises(OutputError, match="not finished; finish it with `pipeline run`"):
        run(source, target)
    source.folder.replace(SUCCESS, b"[]")
    with pytest.raises(OutputError, match="no _SUCCESS that `pipeline run` wrote"):
        run(source, target)
    source.folder.replace(SUCCESS, raw.replace(b'"completed_rows": 83', b'"completed_rows": 82'))
    with pytest.raises(OutputError, match="its parts have 90 rows, but _SUCCESS counts 89"):
        run(source, target)
    source.folder.replace(SUCCESS, raw)
    target.folder.create("other.parquet", b"x")
    with pytest.raises(OutputError, match=r"not empty \(other.parquet\)"):
        run(source, target)
    target.folder.remove("other.parquet")
    for inside in (source.path, f"{source.path}/merged"):
        with pytest.raises(OutputError, match="is inside the job's output"):
            run(source, PartStore(inside))
    run(source, target)
    with pytest.raises(OutputError, match="started with --order input --target-size 2000; pass the same"):
        run(source, target, "parts")
    source.folder.replace(SUCCESS, raw + b" ")
    with pytest.raises(OutputError, match="from another state of"):
        run(source, target)
    target.folder.replace(PLAN, b"{}")
    with pytest.raises(OutputError, match="not written by this version"):
        run(source, target)


def test_rows_that_differ_from_the_jobs_count_leave_no_success(stores):
    source, target = stores
    finish_job(source)
    raw = (source.folder.read("_SUCCESS") or b"").replace(b'"num_generated_tokens": ', b'"num_generated_tokens": 1')
    source.folder.replace(SUCCESS, raw)
    with pytest.raises(OutputError, match="the job's _SUCCESS counts"):
        run(source, target)
    assert target.folder.read("_SUCCESS") is None


def test_provenance_and_checksums_are_kept_and_the_footer_names_the_parts(tmp_path):
    source, target = PartStore(str(tmp_path / "out")), PartStore(str(tmp_path / "merged"))
    finish_job(source)
    run(source, target)
    file = next((tmp_path / "merged").glob("data-*"))
    notes = pq.read_metadata(file).metadata
    assert notes[b"pipeline.fingerprint"] == FINGERPRINT.encode()
    assert PartTotals.from_json(notes[b"pipeline.unit"]).rows == pq.read_metadata(file).num_rows
    pq.read_table(file, page_checksum_verification=True)


def test_the_command(tmp_path: Path, monkeypatch, pipe):
    monkeypatch.chdir(tmp_path)
    finish_job(PartStore("out"))
    assert "Examples:\n    pipeline compact" in pipe("compact", "--help")[1]
    command = ("compact", "out", "--output", "merged", "--order", "input", "--target-size", "2kB")
    code, out, err = pipe(*command, "--json")
    assert code == 0, err
    assert json.loads(out)["rows"] == 90
    assert "file 1 of " in err
    assert "already complete" in pipe(*command)[1]
    assert pipe("compact", "out", "--output", "m2", "--target-size", "huge")[0] == 2
    assert pipe("compact", "nowhere", "--output", "m2")[0] == 2


def test_swapped_files_are_refused(stores):
    source, target = stores
    finish_job(source, rows=31)
    run(source, target, size=20_000)
    files = [name for name in target.folder.names("") if name[0] not in "_."]
    first, last = files[0], files[-1]
    a, b = target.folder.read(first), target.folder.read(last)
    assert first.rpartition("-")[2] != last.rpartition("-")[2], "not of as many rows"
    target.folder.replace(first, b or b"")
    target.folder.replace(last, a or b"")
    target.folder.remove("_SUCCESS")
    with pytest.raises(OutputError, match="by its name"):
        run(source, target, size=20_000)
