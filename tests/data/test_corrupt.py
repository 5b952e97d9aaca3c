"""Damaged files are refused by name, or skipped and reported under `input.on_corrupt: skip`, and never read as good
ones; a failing disk or store is never mistaken for damage."""

import random
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from pipeline.data.files.footer import DamagedFile
from pipeline.data.prompts import PromptSpec
from pipeline.data.source import cut_windows, open_source, read_window
from pipeline.data.units import UnitSpec, make_units
from pipeline.errors import EnvironmentFailed, InputError
from tests.data.conftest import StoreSaidNo, in_memory
from tests.data.test_source import BIG, rows_of, texts


def footer(file: bytes) -> int:
    """Return the number of bytes of a file's footer, with its length and magic."""
    return int.from_bytes(file[-8:-4], "little") + 8


BROKEN = [
    pytest.param(lambda good: b"", "0 bytes", id="fault_24_zero_bytes"),
    pytest.param(lambda good: good[: len(good) // 2], "not a Parquet file, or a truncated one", id="fault_25_half"),
    pytest.param(lambda good: b"PAR1" + good[-footer(good) :], "truncated", id="fault_25_no_data"),
    pytest.param(lambda good: good[:-8] + b"\xff\xff\xff\x0fPAR1", "truncated", id="fault_25_no_footer"),
    pytest.param(lambda good: b"PAR1", "not a Parquet file", id="nothing_but_magic"),
    pytest.param(lambda good: b"id,text\n1,hello world\n", "not a Parquet file", id="csv"),
    pytest.param(
        lambda good: good[: -footer(good)] + bytes(9) + good[-footer(good) + 9 :], "damaged", id="fault_26_footer"
    ),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_to_26_a_broken_file_is_refused_by_name_or_skipped(write, content, message):
    write("c/good.parquet", texts(2, 5))
    folder = write("a.parquet", texts(3))
    good = Path(folder, "a.parquet").read_bytes()
    Path(folder, "broken.parquet").write_bytes(content(good))
    with pytest.raises(InputError, match=rf"broken\.parquet.*{message}.*; repair or remove .* input\.on_corrupt: skip"):
        open_source(folder)
    source = open_source(folder, on_corrupt="skip")
    assert [f.relative for f in source.files] == ["a.parquet", "c/good.parquet"]
    ((skipped),) = source.skipped
    assert (skipped.relative, skipped.size) == ("broken.parquet", len(content(good)))
    assert message in skipped.reason
    assert folder not in skipped.reason
    assert len(rows_of(source, cut_windows(source, 10, BIG))) == 5


def test_an_encrypted_file_is_not_a_damaged_one(write):
    folder = write("a.parquet", texts(3))
    path = Path(folder, "b.parquet")
    path.write_bytes(Path(folder, "a.parquet").read_bytes()[:-4] + b"PARE")
    for mode in ("fail", "skip"):
        with pytest.raises(InputError, match=r"b\.parquet: encrypted Parquet is not supported"):
            open_source(folder, on_corrupt=mode)


def test_nothing_left_after_skipping_is_refused(write, tmp_path):
    folder = tmp_path / "in"
    (folder / "a.parquet").write_bytes(b"")
    (folder / "b.parquet").write_bytes(b"text")
    with pytest.raises(InputError, match=r"none of its 2 files can be read.*in/a\.parquet: the file is empty"):
        open_source(str(folder), on_corrupt="skip")


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    path.write_bytes(data)


def test_bit_flips_are_found(write):
    """Every bit flip in the data is either reported or changes nothing: the file has page checksums."""
    folder = write("a.parquet", {"text": [f"{i * 7919 % 10007} and more" for i in range(300)]}, compression="none")
    source = open_source(folder)
    windows = cut_windows(source, 1000, BIG)
    path = Path(folder, "a.parquet")
    good, expected, found = path.read_bytes(), rows_of(source, windows), 0
    end = len(good) - footer(good)
    positions = range(4, end, (end - 4) // 60)
    for position in positions:
        flip(path, position)
        try:
            got = rows_of(source, windows)
        except InputError as e:
            found += "a.parquet: row group 0: damaged" in str(e)
        else:
            assert got == expected
        path.write_bytes(good)
    assert found > 0.9 * len(positions)


def test_a_footer_with_wrong_bytes_never_ends_the_process(write):
    """The file is skipped or readable, and the file next to it is readable. pyarrow aborts on some of these footers."""
    columns = {
        "text": ["a", None] * 30,
        "list": [["x"] * (i % 3) for i in range(60)],
        "n": [i * 0.5 for i in range(60)],
    }
    folder = write("a.parquet", columns, row_group_size=20)
    write("b.parquet", columns, row_group_size=20)
    path, rng, skipped = Path(folder, "a.parquet"), random.Random(1), 0
    good = path.read_bytes()
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(len(good) - footer(good), len(good))] = rng.randrange(256)
        path.write_bytes(bad)
        source = open_source(folder, on_corrupt="skip")
        skipped += len(source.skipped)
        assert source.files[-1].relative == "b.parquet"
    assert 200 < skipped < 400


def damaged(write) -> tuple[Path, int]:
    """Write 6 row groups of 10 rows with a flipped bit in the third one. Return the file and that byte's position."""
    rng = random.Random(0)
    table = {"text": [f"{i} {rng.random()}" for i in range(60)], "id": list(range(60))}
    path = Path(write("b.parquet", table, row_group_size=10, compression="none", use_dictionary=False), "b.parquet")
    position = path.read_bytes().index(b"25 0.")
    flip(path, position)
    return path, position


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("max_rows", [1000, 10, 7])
def test_under_skip_the_damaged_row_group_is_null_and_the_rest_unharmed(write, max_rows, remote):
    write("a.parquet", {"text": ["first"], "id": [-1]})
    folder = str(damaged(write)[0].parent)
    if remote:
        for name in ("a.parquet", "b.parquet"):
            url = in_memory(f"{folder}/{name}", "damaged")
        folder = url
    source = open_source(folder, on_corrupt="skip")
    windows = cut_windows(source, max_rows, BIG)
    tables = [read_window(source, w, ["text", "id"]) for w in windows]
    rows = [row for table in tables for row in table.to_pylist()]
    assert [(r["source_file"], r["source_row"]) for r in rows] == [
        ("a.parquet", 0),
        *(("b.parquet", i) for i in range(60)),
    ]
    lost = {r["source_row"] for r in rows if r["source_file"] == "b.parquet" and r["text"] is None}
    assert lost == {r["source_row"] for r in rows if r["id"] is None}
    # a row group too large for a window is skipped slice by slice
    assert lost == set(range(20, 30)) or (max_rows == 7 and lost <= set(range(20, 30)) and 25 in lost)
    assert rows[0]["text"] == "first"
    again = [read_window(source, w, ["text", "id"]) for w in windows]
    assert [t.schema.metadata for t in again] == [t.schema.metadata for t in tables]
    assert again == tables

    units = [u for t in tables for u in make_units(t, UnitSpec(PromptSpec(template="Say {text}"), ("id",)))]
    done = {(r["source_file"], r["source_row"]): r for u in units for r in u.table.to_pylist()}
    assert len(done) == 61
    for (file, row), r in done.items():
        if file == "b.parquet" and row in lost:
            assert (r["_error"], r["_prompt"], r["id"]) == ("corrupt_input", None, None)
            assert r["_error_message"].startswith("row group 2: damaged: ")
        else:
            assert (r["_error"], r["id"]) == (None, row if file == "b.parquet" else -1)

    strict = open_source(folder)
    with pytest.raises(InputError, match=r"b\.parquet: row group 2: damaged.*input\.on_corrupt: skip"):
        rows_of(strict, cut_windows(strict, max_rows, BIG))


def test_damage_in_an_unused_column_is_ignored(write):
    damaged(write)
    source = open_source(write("c.parquet", {"text": ["x"], "id": [1]}))
    windows = cut_windows(source, 1000, BIG)
    assert [row[2] for row in rows_of(source, windows, "id")] == [*range(60), 1]


@pytest.mark.parametrize("mode", ["fail", "skip"])
def test_damage_in_transit_is_read_again(write, monkeypatch, mode):
    """An answer that arrives damaged once is not a damaged file."""
    path, position = damaged(write)
    flip(path, position)  # repaired
    source = open_source(in_memory(path, "way"), on_corrupt=mode)
    memory, left, size = fsspec.get_filesystem_class("memory"), [1], path.stat().st_size
    cat_file = memory.cat_file

    def once_damaged(self, name, start=None, end=None, **options):
        data = cat_file(self, name, start, end, **options)
        if left[0] and start is not None and end is not None and start <= position < end < size:  # not the footer
            left[0] -= 1
            return data[: position - start] + b"\xff" + data[position - start + 1 :]
        return data

    monkeypatch.setattr(memory, "cat_file", once_damaged)
    rows = rows_of(source, cut_windows(source, 1000, BIG))
    assert left == [0]
    assert [text.split()[0] for _, _, text in rows] == [str(i) for i in range(60)]


@pytest.mark.parametrize("error", [StoreSaidNo("no credentials"), OSError("no errno"), PermissionError("Forbidden")])
@pytest.mark.parametrize("whole", [True, False])
def test_a_failing_store_is_never_mistaken_for_damage(write, monkeypatch, error, whole):
    path, position = damaged(write)
    source = open_source(in_memory(path, "fails"), on_corrupt="skip")
    memory, size = fsspec.get_filesystem_class("memory"), path.stat().st_size
    cat_file = memory.cat_file

    def fail(self, name, start=None, end=None, **options):
        if end is not None and position < end < size:  # the data; the footer can be read
            raise error
        return cat_file(self, name, start, end, **options)

    monkeypatch.setattr(memory, "cat_file", fail)
    expected = InputError if isinstance(error, PermissionError) else EnvironmentFailed
    with pytest.raises(expected, match=str(error)) as raised:
        rows_of(source, cut_windows(source, 1000 if whole else 7, BIG))
    assert not isinstance(raised.value, DamagedFile)


@pytest.mark.parametrize("mode", ["fail", "skip"])
def test_a_file_changed_since_planning_is_refused_in_both_modes(write, mode):
    folder = write("a.parquet", texts(3))
    source = open_source(folder, on_corrupt=mode)
    windows = cut_windows(source, 10, BIG)
    good = Path(folder, "a.parquet").read_bytes()
    write("a.parquet", {"text": ["row 0", "row 1", "row X"]})
    for content in (Path(folder, "a.parquet").read_bytes(), good[:-1], b"", bytes(len(good))):
        Path(folder, "a.parquet").write_bytes(content)
        with pytest.raises(InputError, match=r"a\.parquet: the file has changed") as raised:
            rows_of(source, windows)
        assert not isinstance(raised.value, DamagedFile)
    Path(folder, "a.parquet").unlink()
    with pytest.raises(InputError, match=r"a\.parquet: does not exist"):
        rows_of(source, windows)


def test_running_out_of_memory_is_not_damage(write, monkeypatch):
    import pyarrow.parquet as pq

    source = open_source(write("a.parquet", texts(3)), on_corrupt="skip")

    def out_of_memory(*args, **options):
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", out_of_memory)
    with pytest.raises(EnvironmentFailed, match=r"a\.parquet: row group 0: not enough memory .*malloc"):
        rows_of(source, cut_windows(source, 10, BIG))
