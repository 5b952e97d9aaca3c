"""The input: every row once, the same windows on every run, and damaged or drifting files refused by name."""

import os
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.columns import plain_type
from pipeline.data.source import cut_windows, narrowed, open_source, read_window
from pipeline.errors import EnvironmentFailed, InputError
from tests.data.conftest import StoreSaidNo, in_memory

BIG = 1 << 40
_DICTIONARY = pa.dictionary(pa.int32(), pa.string())


def texts(n: int, start: int = 0) -> dict:
    return {"text": [f"row {i}" for i in range(start, start + n)]}


def rows_of(source, windows, column="text"):
    """(file, row, value) of every window's rows, in reading order."""
    out = []
    for window in windows:
        table = read_window(source, window, [column])
        assert table.num_rows == window.num_rows
        out += zip(*(table.column(c).to_pylist() for c in ("source_file", "source_row", column)), strict=True)
    return out


def alone(source, files):
    return pickle.loads(pickle.dumps(replace(source, files=files)))


@settings(max_examples=20, deadline=None)
@given(
    layout=st.lists(st.tuples(st.integers(0, 25), st.integers(1, 12)), min_size=1, max_size=4),
    max_rows=st.integers(1, 30),
    max_bytes=st.sampled_from([1, 200, 2000, BIG]),
    limit=st.one_of(st.none(), st.integers(0, 60)),
)
def test_windows_cover_every_row_once(layout, max_rows, max_bytes, limit):
    with tempfile.TemporaryDirectory() as folder:
        expected = []
        for i, (num_rows, group) in enumerate(layout):
            pq.write_table(pa.table(texts(num_rows, 100 * i)), f"{folder}/f{i}.parquet", row_group_size=group)
            expected += [(f"f{i}.parquet", r, f"row {100 * i + r}") for r in range(num_rows)]
        source = open_source(folder)
        windows = cut_windows(source, max_rows, max_bytes, limit)
        assert windows == cut_windows(open_source(folder), max_rows, max_bytes, limit)
        assert all(0 < w.num_rows <= max_rows for w in windows)
        assert [w.index for w in windows] == list(range(len(windows)))
        assert rows_of(source, windows) == (expected if limit is None else expected[:limit])
        for window, (files, own) in zip(windows, narrowed(source, windows), strict=True):
            whole, part = (read_window(*asked, ["text"]) for asked in ((source, window), (alone(source, files), own)))
            assert part.equals(whole, check_metadata=True)
            read = {(file, r) for file, r, _ in rows_of(source, [window])}
            assert {f.relative for f in files} == {file for file, _ in read}
            assert sum(f.num_rows for f in files) < len(read) + 2 * 12  # row groups of 12 rows at most, two cut


def test_windows_keep_to_the_bytes_and_join_small_row_groups(write):
    write("a.parquet", texts(100), row_group_size=10)
    source = open_source(write("b.parquet", texts(100), row_group_size=10))
    group = source.files[0].group_bytes[0]
    sizes = [w.num_rows for w in cut_windows(source, 1000, int(group * 3.5))]
    assert sum(sizes) == 200
    assert set(sizes[:-1]) == {30}
    assert len(cut_windows(source, 1000, BIG)) == 1


def test_a_copy_of_the_data_is_the_same_data(write, tmp_path):
    source = open_source(write("a.parquet", texts(10)))
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/a.parquet").write_bytes(Path(source.root, "a.parquet").read_bytes())
    os.utime(tmp_path / "copy/a.parquet", (0, 0))
    assert open_source(str(tmp_path / "copy")).files == source.files


def test_a_large_row_group_is_read_in_slices(write):
    source = open_source(write("a.parquet", texts(10_000), row_group_size=10_000))
    windows = cut_windows(source, 3000, BIG)
    assert [(w.start, w.stop) for w in windows] == [(i, i + 2500) for i in range(0, 10_000, 2500)]
    assert [r for _, r, _ in rows_of(source, windows)] == list(range(10_000))
    assert [t for _, _, t in rows_of(source, windows[2:3])] == texts(2500, 5000)["text"]


def test_source_and_windows_travel(write):
    source = open_source(write("a.parquet", texts(5)), {"auto_mkdir": False})
    windows = cut_windows(source, 2, BIG)
    again, again_windows = pickle.loads(pickle.dumps((source, windows)))
    assert rows_of(again, again_windows) == rows_of(source, windows)
    assert "auto_mkdir" not in repr(source)


def test_relative_paths_are_pinned_to_where_they_were_opened(write, tmp_path, monkeypatch):
    write("a.parquet", texts(3))
    monkeypatch.chdir(tmp_path)
    source = open_source("in")
    monkeypatch.chdir("/")
    assert len(rows_of(source, cut_windows(source, 10, BIG))) == 3


def test_other_filesystems_through_fsspec(write):
    folder = write("a.parquet", texts(7), row_group_size=4)
    source = open_source(in_memory(f"{folder}/a.parquet", "bucket/in"))
    fsspec.filesystem("memory").pipe_file("/bucket/in/_SUCCESS", b"")
    assert source.files == open_source(folder).files
    assert rows_of(source, cut_windows(source, 3, BIG)) == [("a.parquet", i, f"row {i}") for i in range(7)]
    assert [f.relative for f in open_source("memory://bucket/*/a.parquet").files] == ["in/a.parquet"]
    assert [f.relative for f in open_source("memory://bucket/*").files] == ["in/a.parquet"]


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (PermissionError(13, "Forbidden"), InputError),
        (StoreSaidNo("no credentials"), EnvironmentFailed),
        (OSError(5, "I/O error"), EnvironmentFailed),
        (TypeError("got an unexpected keyword argument 'nonsense'"), InputError),
    ],
)
def test_a_store_that_refuses(monkeypatch, error, becomes):
    def refuse(*args, **options):
        raise error

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", refuse)
    with pytest.raises(becomes, match=rf"input\.path memory://x.*{error}".replace("[", r"\[")):
        open_source("memory://x")


def test_a_store_that_refuses_later(write, monkeypatch):
    folder = write("a.parquet", texts(3))
    source = open_source(in_memory(f"{folder}/a.parquet", "later"))

    def refuse(*args, **options):
        raise StoreSaidNo("token expired")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", refuse)
    with pytest.raises(EnvironmentFailed, match=r"later/a\.parquet: .*StoreSaidNo: token expired"):
        rows_of(source, cut_windows(source, 10, BIG))


def test_a_file_that_shrinks_while_it_is_looked_at(write, monkeypatch):
    folder = write("a.parquet", texts(3))
    monkeypatch.setattr(fsspec.get_filesystem_class("file"), "cat_file", lambda *args, **options: b"short")
    with pytest.raises(EnvironmentFailed, match=r"a\.parquet: short read: 5 of"):
        open_source(folder)


def test_a_footer_larger_than_one_read(write):
    folder = write("a.parquet", pa.table({f"column_{i}": [1] for i in range(900)}))
    assert Path(folder, "a.parquet").stat().st_size > 128 * 1024
    assert open_source(folder).num_rows == 1


def test_fault_27_zero_row_files(write):
    write("a.parquet", texts(0))
    write("b.parquet", texts(2))
    source = open_source(write("c.parquet", texts(0)))
    assert rows_of(source, cut_windows(source, 10, BIG)) == [("b.parquet", 0, "row 0"), ("b.parquet", 1, "row 1")]
    only = open_source(source.root + "/a.parquet")
    assert (only.num_rows, only.schema.names, cut_windows(only, 10, BIG)) == (0, ["text"], ())


def test_fault_28_schema_drift_is_refused_with_the_file_named(write):
    write("a.parquet", {"report": ["x"], "id": [1], "n": [1], "wide": pa.array([1], pa.int32())})
    write("b.parquet", {"report": ["x"], "n": ["one"], "wide": pa.array([1 << 40], pa.int64())})
    source = open_source(write("c.parquet", {"report": [None], "id": [1], "n": [1], "wide": [None]}))
    source.check_columns(["report", "wide"])
    assert source.schema.field("wide").type == pa.int64()
    (window,) = cut_windows(source, 10, BIG)
    assert read_window(source, window, ["wide", "report"]).column("wide").to_pylist() == [1, 1 << 40, None]
    with pytest.raises(InputError, match=r"b\.parquet: has no column 'id'"):
        source.check_columns(["report", "id"])
    with pytest.raises(InputError, match=r"column 'n'.*it is string in .*b\.parquet, but int64 in earlier files"):
        source.check_columns(["n"])
    with pytest.raises(InputError, match=r"a\.parquet: has no column 'reprot' \(did you mean 'report'\?\)"):
        source.check_columns(["reprot"])


@pytest.mark.parametrize(
    ("a", "b", "merged"),
    [
        (pa.int64(), pa.float64(), None),  # 2**53 + 1 would change
        (pa.uint64(), pa.int64(), None),
        (pa.uint8(), pa.int32(), pa.int32()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.null(), pa.string(), pa.string()),
        (pa.string(), pa.binary(), None),
        (pa.string(), pa.list_(pa.string()), None),
        (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us")),
    ],
)
def test_fault_28_types_widen_only_without_loss(write, a, b, merged):
    write("a.parquet", pa.table({"x": pa.array([], a)}))
    source = open_source(write("b.parquet", pa.table({"x": pa.array([], b)})))
    if merged is None:
        with pytest.raises(InputError, match=r"b\.parquet"):
            source.check_columns(["x"])
    else:
        source.check_columns(["x"])
        assert source.schema.field("x").type == merged


def test_ways_to_store_text_are_one(write):
    values = ["a", None, "b" * 50]
    stored = {
        "dictionary": pa.array(values).dictionary_encode(),
        "large": pa.array(values, pa.large_string()),
        "view": pa.array(values, pa.string_view()),
        "a.b": pa.array(values, pa.large_string()).dictionary_encode(),
    }
    nested = pa.array(
        [[{"role": "user", "content": "x"}]] * 3,
        pa.large_list(pa.struct([("role", pa.dictionary(pa.int32(), pa.string())), ("content", pa.large_string())])),
    )
    source = open_source(write("a.parquet", pa.table({**stored, "nested": nested})))
    for max_rows in (10, 2):  # whole row groups and slices
        windows = cut_windows(source, max_rows, BIG)
        tables = [read_window(source, w, ["nested", *stored]) for w in windows]
        table = pa.concat_tables(t.replace_schema_metadata(None) for t in tables)
        for name in stored:
            assert table.column(name).type == pa.string()
            assert table.column(name).to_pylist() == values
        assert table.column("nested").type == pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    write("b.parquet", pa.table({name: pa.array(values) for name in stored}))
    open_source(source.root).check_columns(stored)


def test_input_columns_named_like_ours(write):
    source = open_source(write("a.parquet", {"source_file": ["x"], "source_row": [9]}))
    table = read_window(source, cut_windows(source, 10, BIG)[0], source.schema.names)
    assert table.column_names == ["source_file", "source_row"] * 2
    assert [c.to_pylist() for c in table.columns] == [["x"], [9], ["a.parquet"], [0]]


def test_no_columns_still_says_which_rows(write):
    source = open_source(write("a.parquet", texts(3)))
    table = read_window(source, cut_windows(source, 10, BIG)[0], [])
    assert table.to_pydict() == {"source_file": ["a.parquet"] * 3, "source_row": [0, 1, 2]}


def test_many_small_files_of_a_store_keep_their_order_and_end_with_the_first_failure(write):
    memory = fsspec.filesystem("memory")
    for i in range(40):
        folder = write("a.parquet", texts(1 + i % 3, 10 * i))
        memory.pipe_file(f"/many/f{i:02d}.parquet", Path(folder, "a.parquet").read_bytes())
    source = open_source("memory://many")
    expected = [(f"f{i:02d}.parquet", r, f"row {10 * i + r}") for i in range(40) for r in range(1 + i % 3)]
    for max_rows in (1000, 7):
        assert rows_of(source, cut_windows(source, max_rows, BIG)) == expected
    for i in (7, 30):
        memory.pipe_file(f"/many/f{i:02d}.parquet", b"")
    with pytest.raises(InputError, match=r"f07\.parquet: the file has changed"):
        rows_of(source, cut_windows(source, 1000, BIG))


def test_what_is_kept_of_a_file_does_not_grow_with_its_columns_and_hardly_with_its_row_groups(write):
    def kept(columns: int, groups: int) -> int:
        table = pa.table({f"c{i}": list(range(groups)) for i in range(columns)})
        notes = {f"note {i}": "x" * 1000 for i in range(5)}  # as pandas leaves them
        for i in range(3):
            table = table.replace_schema_metadata({**notes, "file": str(i)})
            folder = write(f"{columns}-{groups}/f{i}.parquet", table, row_group_size=1)
        source = open_source(f"{folder}/{columns}-{groups}")
        return len(pickle.dumps((source.files, cut_windows(source, 1 << 16, BIG)))) // 3

    assert abs(kept(40, 2) - kept(2, 2)) < 10
    assert kept(2, 300) - kept(2, 2) < 298 * 20  # two integers for each


@pytest.mark.parametrize(
    ("a", "b", "kept"),
    [
        (pa.large_string(), pa.large_string(), pa.large_string()),
        (pa.large_string(), pa.null(), pa.large_string()),
        (pa.large_string(), pa.string(), pa.string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int16(), pa.string()), _DICTIONARY),
        (_DICTIONARY, pa.string(), pa.string()),
        (pa.int16(), pa.int16(), pa.int16()),
        (pa.int16(), pa.int32(), pa.int32()),
        (pa.json_(pa.large_string()), pa.json_(pa.large_string()), pa.json_(pa.large_string())),
    ],
)
def test_kept_columns_keep_a_type_that_all_files_share(write, a, b, kept):
    write("a.parquet", pa.table({"x": pa.array([], a)}))
    source = open_source(write("b.parquet", pa.table({"x": pa.array([], b)})))
    assert source.kept.field("x").type == kept
    assert source.schema.field("x").type == plain_type(kept)
