"""Source of the input: every row once, the same windows on every run, damaged or changed files refused by name."""

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

from pipeline.data.source import cut_windows, narrowed, open_source, read_window
from pipeline.errors import EnvironmentFailed, InputError
from tests.data.conftest import StoreSaidNo

BIG = 1 << 40


def texts(n: int, start: int = 0) -> dict:
    return {"text": [f"row {i}" for i in range(start, start + n)]}


def rows_of(source, windows, column="text"):
    """Return (file, row, value) of every window's rows, in reading order."""
    out = []
    for window in windows:
        table = read_window(source, window, [column])
        assert table.num_rows == window.num_rows
        out += zip(*(table.column(c).to_pylist() for c in ("source_file", "source_row", column)), strict=True)
    return out


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
            part = read_window(pickle.loads(pickle.dumps(replace(source, files=files))), own, ["text"])
            assert part.equals(read_window(source, window, ["text"]), check_metadata=True)
            read = {(file, r) for file, r, _ in rows_of(source, [window])}
            assert {f.relative for f in files} == {file for file, _ in read}
            assert sum(f.num_rows for f in files) < len(read) + 2 * 12  # row groups have at most 12 rows, two are cut


def test_windows_respect_max_bytes_and_join_small_row_groups(write):
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


def test_relative_paths_are_resolved_when_opened(write, tmp_path, monkeypatch):
    write("a.parquet", texts(3))
    monkeypatch.chdir(tmp_path)
    source = open_source("in")
    monkeypatch.chdir("/")
    assert len(rows_of(source, cut_windows(source, 10, BIG))) == 3


@pytest.mark.parametrize(("error", "becomes"), [
    (PermissionError(13, "Forbidden"), InputError),
    (StoreSaidNo("no credentials"), EnvironmentFailed),
    (OSError(5, "I/O error"), EnvironmentFailed),
    (TypeError("got an unexpected keyword argument 'nonsense'"), InputError),
])  # fmt: skip
def test_errors_of_a_store(monkeypatch, error, becomes):
    def refuse(*args, **options):
        raise error

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", refuse)
    with pytest.raises(becomes, match=rf"input\.path memory://x.*{error}".replace("[", r"\[")):
        open_source("memory://x")


def test_a_file_that_shrinks_while_it_is_opened(write, monkeypatch):
    folder = write("a.parquet", texts(3))
    monkeypatch.setattr(fsspec.get_filesystem_class("file"), "cat_file", lambda *args, **options: b"short")
    with pytest.raises(EnvironmentFailed, match=r"a\.parquet: short read: 5 of"):
        open_source(folder)


def test_a_footer_larger_than_one_read(write):
    folder = write("a.parquet", pa.table({f"column_{i}": [1] for i in range(900)}))
    assert Path(folder, "a.parquet").stat().st_size > 128 * 1024
    assert open_source(folder).num_rows == 1


def test_reading_no_columns_still_returns_the_rows(write):
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


def test_memory_of_a_file_does_not_grow_with_columns_and_little_with_row_groups(write):
    def kept(columns: int, groups: int) -> int:
        table = pa.table({f"c{i}": list(range(groups)) for i in range(columns)})
        notes = {f"note {i}": "x" * 1000 for i in range(5)}  # like those of pandas
        for i in range(3):
            table = table.replace_schema_metadata({**notes, "file": str(i)})
            folder = write(f"{columns}-{groups}/f{i}.parquet", table, row_group_size=1)
        source = open_source(f"{folder}/{columns}-{groups}")
        return len(pickle.dumps((source.files, cut_windows(source, 1 << 16, BIG)))) // 3

    assert abs(kept(40, 2) - kept(2, 2)) < 10
    assert kept(2, 300) - kept(2, 2) < 298 * 20  # two integers each
