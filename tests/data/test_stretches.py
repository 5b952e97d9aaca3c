"""Windows whose values are far larger in memory than in the file are read and rendered in stretches: memory is bounded,
and the units are the same each time."""

import pickle
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.prompts import PromptSpec
from pipeline.data.source import DAMAGED_KEY, InputWindow, cut_windows, open_source, read_stretches, read_window
from pipeline.data.units import UnitSpec, make_units, window_units

MIB = 1 << 20
TEXT, ROWS = "x" * 20_000, 600  # 12 MB
NUMBERS = pa.array([0] * ROWS, pa.int32())
SHARED = pa.DictionaryArray.from_arrays(NUMBERS, pa.array([TEXT]))
EACH = pa.array(range(ROWS + 1), pa.int32())
KINDS = {
    "dictionary": SHARED,
    "list": pa.ListArray.from_arrays(EACH, SHARED),
    "struct": pa.StructArray.from_arrays([SHARED], ["k"]),
    "map": pa.MapArray.from_arrays(EACH, pa.DictionaryArray.from_arrays(NUMBERS, pa.array(["key"])), SHARED),
    **{str(kind): kind for kind in (
        pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.json_(), pa.list_(pa.string()),
        pa.list_(pa.string(), 1), pa.large_list(pa.string()))},
}  # fmt: skip


def put(path: str, kind: pa.Array | pa.DataType) -> None:
    """Write a file of one row group and a few kilobytes, without holding all its texts in memory."""
    if isinstance(kind, pa.Array):
        pq.write_table(pa.table({"c": kind, "id": list(range(ROWS))}), path)
        return
    with pq.ParquetWriter(path, pa.schema([("c", kind), ("id", pa.int64())])) as writer:
        for start in range(0, ROWS, 100):
            text = [TEXT] if pa.types.is_nested(kind) else TEXT
            column = pa.array([text] * 100, kind.storage_type if isinstance(kind, pa.JsonType) else kind).cast(kind)
            writer.write_batch(pa.record_batch({"c": column, "id": list(range(start, start + 100))}))


@pytest.mark.parametrize("prompt", ["Say {c}", "{id}"])
def test_memory_is_bounded_by_stretches_if_all_rows_share_a_text(tmp_path, prompt):
    for name, kind in KINDS.items():
        (tmp_path / name).mkdir()
        put(str(tmp_path / name / "a.parquet"), kind)
        source = open_source(str(tmp_path / name))
        spec = UnitSpec(PromptSpec(template=prompt), kept=("c", "id"), unit_tokens=20_000, max_bytes=MIB * 3 // 2)
        (window,) = cut_windows(source, 1 << 16, MIB)
        before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
        pa.set_memory_pool(pool)
        tracemalloc.start()
        try:
            rows = [id for unit in window_units(source, window, spec) for id in unit.kept()["id"].to_pylist()]
            _, python = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            pa.set_memory_pool(before)
        assert sorted(rows) == list(range(ROWS)), name
        assert pool.max_memory() < 8 * MIB, name
        assert python < 5 * MIB, name


def test_stretches_have_each_row_once_and_the_same_units_each_time(write):
    texts = [f"{i} " + "y" * (37 * i % 1000) for i in range(300)]
    folder = write("a.parquet", {"text": texts, "id": list(range(300))}, row_group_size=70)
    source = open_source(folder)
    spec = UnitSpec(PromptSpec(template="{text} {text}"), kept=("id",), unit_rows=9, max_bytes=20_000)
    (window,) = cut_windows(source, 1000, MIB)
    units = window_units(source, window, spec)
    again = window_units(*pickle.loads(pickle.dumps((source, window, spec))))
    data = [unit.to_bytes() for unit in units]
    assert data == [unit.to_bytes() for unit in again]
    assert sorted(id for unit in units for id in unit.kept()["id"].to_pylist()) == list(range(300))
    assert [units.num_rows_of(i) for i in range(len(units))] == [unit.num_rows for unit in units]
    chosen = [3, 4, len(units) - 1]
    assert [unit.to_bytes() for unit in units.some(chosen)] == [data[i] for i in chosen]
    for unit in units:
        assert sum(len(prompt) for prompt in unit.own("_prompt").to_pylist()) <= 20_000
    unbounded = UnitSpec(spec.prompt, kept=("id",), unit_rows=9)
    whole = window_units(source, window, unbounded)
    assert len(whole) < len(units)
    plain = make_units(read_window(source, window, spec.columns), unbounded, 0)
    assert [unit.to_bytes() for unit in whole] == [unit.to_bytes() for unit in plain]


def test_a_stretch_knows_its_damaged_rows(write):
    folder = write("a.parquet", {"text": [f"{i}" * 30 for i in range(40)]}, row_group_size=10, compression="none")
    path = Path(folder, "a.parquet")
    data = bytearray(path.read_bytes())
    at = data.index(b"15" * 20)
    data[at] ^= 1
    path.write_bytes(data)
    source = open_source(folder, on_corrupt="skip")
    spec = UnitSpec(PromptSpec(column="text"), max_bytes=300)
    found = {}
    for unit in window_units(source, InputWindow(0, 0, 40), spec):
        found |= {row: error for (_, row), error in zip(unit.row_ids(), unit.own("_error").to_pylist(), strict=True)}
    assert found == {i: "corrupt_input" if 10 <= i < 20 else None for i in range(40)}
    tables = list(read_stretches(source, InputWindow(0, 0, 40), ["text"], 300))
    assert len(tables) > 4
    assert sum(DAMAGED_KEY in table.schema.metadata for table in tables) >= 1
