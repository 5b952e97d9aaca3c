"""CSV and TSV: every row once, all columns text, quotes across lines and blocks, errors with file and line."""

import csv
import gzip
import io
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.files import text_blocks
from pipeline.data.prompts import PromptSpec
from pipeline.data.source import cut_windows, narrowed, open_source, read_window
from pipeline.data.units import UnitSpec, make_units
from pipeline.errors import InputError
from tests.data.test_source import BIG

PACK = {
    "a.csv": lambda data: data,
    "a.csv.gz": gzip.compress,
    "a.tsv.zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


def put(folder: Path | str, name: str, data: bytes) -> str:
    Path(folder, name).write_bytes(PACK.get(name, PACK["a.csv"])(data))
    return str(folder)


def table_of(source, max_rows: int = 9) -> list[dict]:
    names = source.schema.names
    windows = cut_windows(source, max_rows, BIG)
    return [row for w in windows for row in read_window(source, w, names).select(names).to_pylist()]


TEXTS = st.lists(st.sampled_from([" ", '"', "a", ",", "é", "\n", "\r\n", "\t"]), max_size=6).map("".join)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(TEXTS, TEXTS), max_size=20),
    name=st.sampled_from(sorted(PACK)),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    ending=st.sampled_from(["\n", "\r\n"]),
    block=st.integers(1, 60),
    max_rows=st.integers(1, 9),
)
def test_rows_are_those_that_were_written(rows, name, quoting, ending, block, max_rows):
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t" if "tsv" in name else ",", quoting=quoting, lineterminator=ending)
    writer.writerows([("x", "y"), *rows])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_blocks, "BLOCK_BYTES", block)
        source = open_source(put(folder, name, text.getvalue().encode()))
        assert source.schema.equals(pa.schema([("x", pa.string()), ("y", pa.string())]))
        assert [tuple(row.values()) for row in table_of(source, max_rows)] == rows
        windows = cut_windows(source, max_rows, BIG)
        for window, (some, own) in zip(windows, narrowed(source, windows), strict=True):
            part = pickle.loads(pickle.dumps(replace(source, files=some)))
            assert read_window(part, own, ["y"]).equals(read_window(source, window, ["y"]), check_metadata=True)


def test_fields_are_texts_as_pyarrow_reads_them(tmp_path):
    content = 'id,"text, with comma",n\r\n0012, "x" ,\r\n\r\nNA,"a ""b""\r\nc",1e5\r\nnull,5" disk,""\r\n'
    source = open_source(put(tmp_path, "a.csv", b"\xef\xbb\xbf" + content.encode()))
    expected = pa.csv.read_csv(
        tmp_path / "a.csv",
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(source.schema.names, pa.string())),
    )
    assert table_of(source) == expected.to_pylist()
    assert table_of(source)[0] == {"id": "0012", "text, with comma": ' "x" ', "n": ""}


BAD = [
    (b"1", "expected 2 fields, as in the header, but got 1"),
    (b"1,2,3", "expected 2 fields, as in the header, but got 3"),
    (b"1,\xff\xfe", "is not UTF-8"),
    (b'1,"x"y', "has a quote that is not closed, or text after one"),
    (b"1,x\ry", ".*or a lone carriage return"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
@pytest.mark.parametrize("block", [5, 1 << 20])
def test_a_bad_row_is_refused_by_file_and_line_or_an_error_row(tmp_path, line, message, block, monkeypatch):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", block)
    put(tmp_path, "a.csv", b'x,y\n1,"one\ntwo"\n\n' + line + b"\n3,three\n")
    with pytest.raises(
        InputError, match=rf"a\.csv:5: {message}.*; repair or remove it, or set input\.on_corrupt: skip"
    ):
        open_source(str(tmp_path))
    source = open_source(str(tmp_path), on_corrupt="skip")
    table = read_window(source, cut_windows(source, 9, BIG)[0], ["y"])
    units = make_units(table, UnitSpec(PromptSpec(column="y")))
    rows = [row for unit in units for row in zip(*(unit.own(n).to_pylist() for n in ("source_row", "_error")))]
    assert sorted(rows) == [(0, None), (1, "corrupt_input"), (2, None)]
    assert next(m for u in units for m in u.own("_error_message").to_pylist() if m).startswith("line 5: ")


@pytest.mark.parametrize(("content", "message"), [
    (b"", "a.csv: empty, without a header line"),
    (b"\xef\xbb\xbf\r\n\n", "a.csv: empty, without a header line"),
    (b"x,\n1,2\n", r"a.csv:1: the header has no name for column 2; name it \(pandas: index=False\)"),
    (b"x,y,x\n1,2,3\n", "a.csv:1: the header has more than one column 'x'"),
    (b"x,\xff\n1,2\n", "a.csv:1: the header is not UTF-8"),
    (b"x;y\n1;so, so\n", "a.csv:2: expected 1 field, as in the header, but got 2; a .csv has commas between fields;"),
    (b'x,"y\n1,2\n', "a.csv:1: the header has a quote that is not closed"),
    (b'x\n"' + b"y" * 3000 + b'"', "a.csv: a row of more than"),
])  # fmt: skip
def test_a_file_without_a_usable_header_is_refused(tmp_path, content, message, monkeypatch):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 500)
    monkeypatch.setattr(text_blocks, "MAX_ROW_BYTES", 2000)
    with pytest.raises(InputError, match=message):
        open_source(put(tmp_path, "a.csv", content))


def test_a_column_that_another_file_lacks_is_refused_by_name(tmp_path):
    put(tmp_path, "a.csv", b"x,y\n1,2\n")
    source = open_source(put(tmp_path, "b.tsv", b"y\tz\n3\t4\n"))
    assert [row["y"] for w in cut_windows(source, 9, BIG) for row in read_window(source, w, ["y"]).to_pylist()] == [
        "2", "3"
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"b\.tsv: has no column 'x', but other files"):
        source.check_columns(["x"])


def test_a_field_longer_than_the_default_limit_of_the_parser(tmp_path):
    source = open_source(put(tmp_path, "a.csv", b'x\n"' + b"y\n" * 200_000 + b'"\nz\n'))
    assert [len(row["x"]) for row in table_of(source)] == [400_000, 1]


def test_a_change_after_planning_is_refused(tmp_path):
    source = open_source(put(tmp_path, "a.csv", b"x\n1\n2\n"))
    put(tmp_path, "a.csv", b"x\n1\n3\n")
    with pytest.raises(InputError, match=r"a\.csv: the file has changed since the job was planned"):
        table_of(source)
    assert open_source(str(tmp_path)).files[0].digest != source.files[0].digest
