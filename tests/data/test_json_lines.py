"""JSON Lines: every line once, with any compression; types of keys; errors with file and line."""

import gzip
import json
import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.files import json_lines, text_blocks
from pipeline.data.files.json_types import JsonTypes, column_of
from pipeline.data.prompts import PromptSpec
from pipeline.data.source import cut_windows, narrowed, open_source, read_window
from pipeline.data.units import UnitSpec, make_units
from pipeline.errors import InputError
from pipeline.report.record.data_warnings import input_warnings
from tests.data.test_source import BIG, rows_of

PACK = {
    ".jsonl": lambda data: data,
    ".jsonl.gz": gzip.compress,
    ".ndjson.zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


def lines(rows: list) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def put(folder: Path | str, name: str, rows: list | bytes) -> str:
    """Write rows or raw bytes, compressed according to the name."""
    data = rows if isinstance(rows, bytes) else lines(rows)
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(next(pack for ending, pack in PACK.items() if name.endswith(ending))(data))
    return str(folder)


@settings(max_examples=40, deadline=None)
@given(
    files=st.lists(st.tuples(st.integers(0, 25), st.sampled_from(sorted(PACK))), min_size=1, max_size=4),
    block=st.integers(1, 400),
    max_rows=st.integers(1, 30),
    max_bytes=st.sampled_from([1, 200, 2000, BIG]),
    limit=st.one_of(st.none(), st.integers(0, 60)),
)
def test_windows_cover_every_line_once(files, block, max_rows, max_bytes, limit):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_blocks, "BLOCK_BYTES", block)
        expected = []
        for i, (num_rows, ending) in enumerate(files):
            rows = [{"text": f"row {100 * i + r}"} for r in range(num_rows)]
            put(folder, f"f{i}{ending}", b"\n".join([*(lines([row]) for row in rows), b" \r\n"]))
            expected += [(f"f{i}{ending}", r, row["text"]) for r, row in enumerate(rows)]
        if not expected:
            return
        source = open_source(folder)
        windows = cut_windows(source, max_rows, max_bytes, limit)
        assert windows == cut_windows(open_source(folder), max_rows, max_bytes, limit)
        assert rows_of(source, windows) == (expected if limit is None else expected[:limit])
        for window, (some, own) in zip(windows, narrowed(source, windows), strict=True):
            part = pickle.loads(pickle.dumps(replace(source, files=some)))
            assert read_window(part, own, ["text"]).equals(read_window(source, window, ["text"]), check_metadata=True)


def test_several_members_in_one_compressed_file(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines([{"x": 1}])) + gzip.compress(lines([{"x": 2}])))
    source = open_source(str(tmp_path))
    assert [x for *_, x in rows_of(source, cut_windows(source, 9, BIG), "x")] == [1, 2]


def test_the_digest_is_of_every_line(tmp_path):
    one = open_source(put(tmp_path / "a", "x.jsonl", [{"x": 1}, {"x": 2}])).files[0]
    assert open_source(put(tmp_path / "b", "x.jsonl", [{"x": 1}, {"x": 2}])).files[0] == one
    assert open_source(put(tmp_path / "c", "x.jsonl", [{"x": 1}, {"x": 3}])).files[0].digest != one.digest


@pytest.mark.parametrize("ending", sorted(PACK))
@pytest.mark.parametrize("rows", [[{"x": 1}, {"x": 5}], [{"x": 1}], [{"x": 1}, {"x": 2}, {"x": 3}]])
def test_a_file_that_changed_after_planning_is_refused(tmp_path, ending, rows):
    source = open_source(put(tmp_path, f"a{ending}", [{"x": 1}, {"x": 2}]))
    put(tmp_path, f"a{ending}", rows)
    with pytest.raises(InputError, match=r"a\..*the file has changed since the job was planned"):
        rows_of(source, cut_windows(source, 9, BIG), "x")


KINDS = [
    ([None, None], pa.null()),
    ([True, None], pa.bool_()),
    ([1, 2**62], pa.int64()),
    ([1, 2.5], pa.float64()),
    ([2**53 + 1, 2.5], pa.string()),  # no float is equal to it
    ([1, 2**63], pa.string()),
    (["2026-01-31T00:00:00", "x"], pa.string()),
    (["2026-01-31"], pa.string()),
    ([True, 1], pa.string()),
    ([1, "1"], pa.string()),
    ([[], None, ["a"]], pa.list_(pa.string())),
    ([[1], [2.5]], pa.list_(pa.float64())),
    ([["a"], [1]], pa.string()),
    ([{"a": 1, "b": None}, {"b": "x", "a": 2}], pa.struct([("a", pa.int64()), ("b", pa.string())])),
    ([{"a": 1}, {"a": 1, "b": 2}], pa.string()),  # in a struct, the first would have "b":null
    ([{}], pa.string()),
    ([[{"role": "user", "content": "x"}]], pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ([[{"content": "x"}, {"content": [{"type": "text"}]}]], pa.string()),
]


@pytest.mark.parametrize(("values", "expected"), KINDS)
def test_the_type_of_a_key_fits_all_its_values(values, expected):
    for order in (values, values[::-1]):
        whole, parts = JsonTypes(), JsonTypes()
        for value in order:
            whole.add({"x": value})
            one = JsonTypes()
            one.add({"x": value})
            parts.add_all(one)
        assert whole.schema().field("x").type.equals(parts.schema().field("x").type)
        got = whole.schema().field("x")
        if not pa.types.is_struct(expected):  # its keys are in the order of their first use
            assert got.type.equals(expected)
        column = column_of(order, got).to_pylist()
        if pa.types.is_string(expected):
            column = [v if v is None or isinstance(o, str) else json.loads(v) for v, o in zip(column, order)]
        assert column == order


def test_a_key_that_lines_or_files_do_not_have_is_null(tmp_path):
    put(tmp_path, "a.jsonl", [{"x": 1}, {"y": "b"}])
    source = open_source(put(tmp_path, "b.jsonl", [{"z": 1.5}]))
    source.check_columns(["x", "y", "z"])
    table = read_window(source, cut_windows(source, 9, BIG)[0], ["x", "y", "z"])
    assert table.select(["x", "y", "z"]).to_pylist() == [
        {"x": 1, "y": None, "z": None}, {"x": None, "y": "b", "z": None}, {"x": None, "y": None, "z": 1.5}
    ]  # fmt: skip
    with pytest.raises(InputError, match="no column 'w'"):
        source.check_columns(["w"])


def test_folders_are_columns_too(tmp_path):
    source = open_source(put(tmp_path, "day=3/a.jsonl", b'\xef\xbb\xbf{"x": "caf\xc3\xa9"}'))
    table = read_window(source, cut_windows(source, 9, BIG)[0], ["x", "day"])
    assert table.select(["x", "day"]).to_pylist() == [{"x": "café", "day": 3}]


BAD = [
    (b'{"x": 1,}', "not JSON: "),
    (b"[1, 2]", "expected an object .* JSON Lines has one object per line"),
    (b'"x"', "expected an object such as"),
    (b'{"x": "\xff"}', "byte 8 is not UTF-8"),
    (b'{"x": "\\ud83d"}', "contains a lone surrogate"),
    (b"{" * 20_000, "not JSON"),
    (b'{"x": ' + b"[" * 20_000, "not JSON"),
    (b'{"x": ' + b"9" * 5000 + b"}", "not JSON: "),
    (b'{"x": [-1e400]}', "the number -1e400 is out of range"),
    (b'{"x": ' + b"9" * 400 + b".0}", "the number 9999.* is out of range"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_refused_by_file_and_line_or_an_error_row(tmp_path, line, message, monkeypatch):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 20)
    put(tmp_path, "a.jsonl", b'{"x": "one"}\n\n' + line + b'\n{"x": "three"}\n')
    with pytest.raises(
        InputError, match=rf"a\.jsonl:3: {message}.*; repair or remove it, or set input\.on_corrupt: skip"
    ):
        open_source(str(tmp_path))
    source = open_source(str(tmp_path), on_corrupt="skip")
    table = read_window(source, cut_windows(source, 9, BIG)[0], ["x"])
    units = make_units(table, UnitSpec(PromptSpec(column="x")))
    rows = [row for unit in units for row in zip(*(unit.own(n).to_pylist() for n in ("source_row", "_error")))]
    assert sorted(rows) == [(0, None), (1, "corrupt_input"), (2, None)]
    assert next(m for u in units for m in u.own("_error_message").to_pylist() if m).startswith("line 3: ")


@pytest.mark.parametrize(("name", "content", "message"), [
    ("b.jsonl.gz", gzip.compress(b'{"x": 1}\n' * 9, mtime=0)[:-9], "b.jsonl.gz: damaged: Truncated"),
    ("b.jsonl.gz", b'{"x": 1}\n', "b.jsonl.gz: damaged"),
    ("b.jsonl.zst", b'{"x": 1}\n', "b.jsonl.zst: damaged"),
    ("b.jsonl.gz", b"", "b.jsonl.gz: the file is empty"),
    ("b.jsonl", b'{"x": "' + b"y" * 3000 + b'"}', "b.jsonl: a row of more than"),
])  # fmt: skip
def test_a_damaged_file_is_refused_by_name_or_skipped(tmp_path, name, content, message, monkeypatch):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 500)
    monkeypatch.setattr(text_blocks, "MAX_ROW_BYTES", 2000)
    put(tmp_path, "a.jsonl", [{"x": 1}])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        open_source(str(tmp_path))
    source = open_source(str(tmp_path), on_corrupt="skip")
    assert [f.relative for f in source.files] == ["a.jsonl"]
    assert [f.relative for f in source.skipped] == [name]


def test_a_large_compressed_file_is_named_with_a_command_that_avoids_its_cost(tmp_path):
    rows = [{"x": i} for i in range(9)]
    for name in ("a.jsonl.gz", "b.ndjson.zst", "c.jsonl", "d.jsonl.gz"):
        put(tmp_path, name, rows)
    source = open_source(str(tmp_path))
    assert source.large_compressed == []
    sizes = [2 * 10**9, 2 * 10**9, 2 * 10**9, 10**8]
    large = replace(source, files=tuple(replace(f, size=size) for f, size in zip(source.files, sizes, strict=True)))
    assert large.large_compressed == ["a.jsonl.gz", "b.ndjson.zst"]
    (warning,) = input_warnings([], [], large.large_compressed, [])
    text = warning.to_text()
    assert text.startswith("2 large compressed files of text (a.jsonl.gz): each window decompresses")
    command = text.partition("python -c ")[2].strip('"').replace("FILE", "b.ndjson.zst")
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "b.ndjson").read_bytes() == lines(rows)


def test_lines_without_a_row_have_no_column(tmp_path):
    source = open_source(put(tmp_path, "a.jsonl", []))
    with pytest.raises(InputError, match=r"a\.jsonl: has no column 'x': it and all other files have no rows"):
        source.check_columns(["x"])


def test_keys_that_are_data_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_KEYS", 10)
    with pytest.raises(InputError, match="more than 10 different keys by line 11; do its keys hold data"):
        open_source(put(tmp_path, "a.jsonl", [{str(i): i} for i in range(11)]))


def test_two_formats_in_a_folder_are_refused(write, tmp_path):
    folder = write("b.parquet", {"x": [1]})
    put(folder, "a.jsonl.gz", [{"x": 1}])
    with pytest.raises(InputError, match=r"a\.jsonl\.gz is JSON Lines by its name, .*b\.parquet is not.*one format"):
        open_source(folder)
    assert open_source(f"{folder}/*.parquet").num_rows == open_source(f"{folder}/*.jsonl.gz").num_rows == 1


def test_memory_grows_with_blocks_not_with_files(tmp_path):
    """A gzip of 200 KiB that unpacks to 200 MiB is planned and read within the memory of a few blocks."""
    import tracemalloc

    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(200):
            file.write((b'{"x": "' + b"y" * (2**17 - 10) + b'"}\n') * 8)
    tracemalloc.start()
    source = open_source(str(tmp_path))
    read_window(source, cut_windows(source, 10**9, 1 << 20)[-1], ["x"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.num_rows == 1600
    assert peak < 16 << 20
