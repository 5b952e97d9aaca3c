"""Arrow files and streams: every row once, types as written, changes and damage found, folders of Hugging Face."""

import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.source import cut_windows, narrowed, open_source, read_window
from pipeline.errors import InputError
from tests.data.test_corrupt import flip
from tests.data.test_source import BIG, rows_of

WRITERS = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}


def put(folder: Path | str, name: str, table: pa.Table, form: str = "file", batch: int = 3, **options) -> str:
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with WRITERS[form](path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=batch)
    return str(folder)


def texts(num_rows: int, first: int = 0) -> pa.Table:
    return pa.table({"text": [f"row {first + i}" for i in range(num_rows)]})


def table_of(source, max_rows: int = 4) -> list[dict]:
    names = source.schema.names
    return [
        row
        for window in cut_windows(source, max_rows, BIG)
        for row in read_window(source, window, names).select(names).to_pylist()
    ]


@settings(max_examples=30, deadline=None)
@given(
    files=st.lists(st.tuples(st.integers(0, 20), st.sampled_from([*WRITERS])), min_size=1, max_size=3),
    batch=st.integers(1, 9),
    compression=st.sampled_from([None, "lz4", "zstd"]),
    max_rows=st.integers(1, 20),
    max_bytes=st.sampled_from([1, 100, BIG]),
)
def test_windows_cover_every_row_once(files, batch, compression, max_rows, max_bytes):
    with tempfile.TemporaryDirectory() as folder:
        expected = []
        for i, (num_rows, form) in enumerate(files):
            put(folder, f"f{i}.arrow", texts(num_rows, 100 * i), form, batch, compression=compression)
            expected += [(f"f{i}.arrow", r, f"row {100 * i + r}") for r in range(num_rows)]
        source = open_source(folder)
        windows = cut_windows(source, max_rows, max_bytes)
        assert rows_of(source, windows) == expected
        for window, (some, own) in zip(windows, narrowed(source, windows), strict=True):
            part = pickle.loads(pickle.dumps(replace(source, files=some)))
            assert read_window(part, own, ["text"]).equals(read_window(source, window, ["text"]), check_metadata=True)


@pytest.mark.parametrize("form", [*WRITERS])
def test_values_of_all_kinds_are_as_written(tmp_path, form):
    rows = range(7)
    columns = {
        "number": pa.array(rows, pa.int32()),
        "category": pa.array([None if i == 2 else "ab"[i % 2] for i in rows]).dictionary_encode(),
        "category_view": pa.array(["x", "y"] * 3 + [None], pa.string_view()).dictionary_encode(),
        "view": pa.array([f"a text that is longer than twelve {i}" for i in rows], pa.string_view()),
        "large": pa.array(["x", None] * 3 + ["y"], pa.large_string()),
        "chat": pa.array([[{"role": "user", "content": str(i)}] for i in rows]),
        "views": pa.array([[i] * (i % 3) for i in rows], pa.list_view(pa.int64())),
        "day": pa.array(rows, pa.date32()),
        "nothing": pa.nulls(7),
    }
    table = pa.table(columns)
    source = open_source(put(tmp_path, f"a.{'feather' if form == 'file' else 'ipc'}", table, form))
    for max_rows in (1, 2, 3, 9):
        assert table_of(source, max_rows) == table.to_pylist()
    assert source.kept.field("category").type == pa.dictionary(pa.int32(), pa.string())


def test_a_file_whose_first_message_is_aligned_to_64_bytes(tmp_path):
    put(tmp_path, "a.arrow", texts(2), "stream")
    (tmp_path / "a.arrow").write_bytes(b"ARROW1".ljust(64, b"\0") + (tmp_path / "a.arrow").read_bytes() + b"..ARROW1")
    assert [row["text"] for row in table_of(open_source(str(tmp_path)))] == ["row 0", "row 1"]


def test_a_folder_that_hugging_face_datasets_saved(tmp_path):
    put(tmp_path, "train/data-00000-of-00002.arrow", texts(4), "stream")
    put(tmp_path, "train/data-00001-of-00002.arrow", texts(3, 4), "stream")
    put(tmp_path, "train/cache-0123456789abcdef.arrow", texts(4), "stream")  # of a `map`
    for name in ("dataset_dict.json", "train/dataset_info.json", "train/state.json"):
        (tmp_path / name).write_text("{}")
    source = open_source(str(tmp_path))
    assert [row["text"] for row in table_of(source)] == [f"row {i}" for i in range(7)]
    assert source.passed_over == (
        "dataset_dict.json", "train/cache-0123456789abcdef.arrow", "train/dataset_info.json", "train/state.json",
    )  # fmt: skip


def test_columns_of_several_files_are_merged_and_missing_ones_named(tmp_path):
    put(tmp_path, "a.arrow", pa.table({"x": pa.array([1], pa.int32()), "y": ["a"]}))
    source = open_source(put(tmp_path, "b.arrow", pa.table({"x": pa.array([2], pa.int64())})))
    assert [x for *_, x in rows_of(source, cut_windows(source, 9, BIG), "x")] == [1, 2]
    with pytest.raises(InputError, match=r"b\.arrow: has no column 'y', but other files"):
        source.check_columns(["y"])


@pytest.mark.parametrize("form", [*WRITERS])
def test_every_change_after_planning_is_refused_or_harmless(tmp_path, form):
    table = pa.table({"text": [f"{i} and more" for i in range(40)], "n": range(40)})
    source = open_source(put(tmp_path, "a.arrow", table, form, 8))
    path, expected = tmp_path / "a.arrow", table_of(source)
    good, found, positions = path.read_bytes(), 0, 0
    for position in range(0, len(good), 23):
        flip(path, position)
        positions += 1
        try:
            assert table_of(source) == expected
        except InputError as error:
            found += "a.arrow: the file has changed since the job was planned" in str(error)
        path.write_bytes(good)
    assert found > 0.6 * positions  # the rest is the footer, and padding after the last batch
    for changed in (table.slice(1), table.set_column(1, "n", pa.array(range(1, 41)))):
        put(tmp_path, "a.arrow", changed, form, 8)
        with pytest.raises(InputError, match="the file has changed since the job was planned"):
            table_of(source)
        assert open_source(str(tmp_path)).files[0].digest != source.files[0].digest


@pytest.mark.parametrize("form", [*WRITERS])
def test_a_damaged_file_is_refused_by_name_or_skipped(tmp_path, form):
    put(tmp_path, "a.arrow", texts(1))
    put(tmp_path, "b.arrow", texts(20), form)
    good = (tmp_path / "b.arrow").read_bytes()
    invalid = good.replace(b"row 1", b"row \xff", 1)
    for bad in (b"", b"ARROW1\0\0", good[:-1], good[: len(good) // 2], b"text\n" * 9, invalid):
        (tmp_path / "b.arrow").write_bytes(bad)
        with pytest.raises(InputError, match=r"b\.arrow: .*; repair or remove it, or set input\.on_corrupt: skip"):
            open_source(str(tmp_path))
        source = open_source(str(tmp_path), on_corrupt="skip")
        assert [f.relative for f in source.skipped] == ["b.arrow"]


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    union = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])
    with pytest.raises(InputError, match=r"a\.arrow: column 'u': its type dense_union.* cannot be kept in Parquet"):
        open_source(put(tmp_path, "a.arrow", pa.table({"u": union})))
    (tmp_path / "a.arrow").write_bytes(b"FEA1" + bytes(20) + b"FEA1")
    with pytest.raises(InputError, match=r"a\.arrow: Feather V1 is not supported"):
        open_source(str(tmp_path), on_corrupt="skip")
    batches = [pa.record_batch({"x": pa.array(values).dictionary_encode()}) for values in (["a"], ["b"])]
    put(tmp_path, "a.arrow", pa.Table.from_batches(batches), "stream")
    with pytest.raises(InputError, match=r"a\.arrow: a dictionary changes between record batches"):
        open_source(str(tmp_path))
