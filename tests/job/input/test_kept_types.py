"""Kept columns come out with the types they went in with, as far as a part can hold them."""

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from pipeline.data.output.compact import compact
from pipeline.data.output.parts import PartStore
from tests.job.conftest import run

pytestmark = pytest.mark.usefixtures("without_ray")

ROWS = 60
TEXT = pa.list_(pa.string())

SAME = {
    "dictionary": pa.array([f"kind {i % 7}" if i % 5 else None for i in range(ROWS)]).dictionary_encode(),
    "dictionary_bytes": pa.array([b"\xff%d" % i for i in range(ROWS)]).dictionary_encode(),
    "large": pa.array(["x", None, "z\0"] * 20, pa.large_string()),
    "large_bytes": pa.array([b"\xff", None, b""] * 20, pa.large_binary()),
    "large_list": pa.array([["x"], [], None] * 20, pa.large_list(pa.large_string())),
    "struct": pa.array([{"a": "x", "b": 1}, None] * 30, pa.struct([("a", pa.large_string()), ("b", pa.int8())])),
    "tags": pa.array([["x"], [], None] * 20, TEXT).cast(pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    "map": pa.array([[("k", 1)], None, []] * 20, pa.map_(pa.large_string(), pa.int64())),
    "uuid": pa.array([b"x" * 16, None] * 30, pa.binary(16)).cast(pa.uuid()),
    "narrow": pa.array(range(ROWS), pa.int8()),
}
CHANGED = {  # a view, a dictionary's order and width, and what must not be null inside
    "view": (pa.array(["x", None] * 30, pa.string_view()), pa.string()),
    "ordered": (
        pa.DictionaryArray.from_arrays(pa.array([1, 0] * 30, pa.int8()), ["low", "high"], ordered=True),
        pa.dictionary(pa.int32(), pa.string()),
    ),
    "never_null": (
        pa.array([["x"], None] * 30, pa.list_(pa.field("item", pa.string(), nullable=False))),
        pa.list_(pa.field("item", pa.string())),
    ),
}


def put(job, name: str, columns: dict, start: int = 0) -> None:
    count = len(next(iter(columns.values())))
    texts = pa.array([f"text {start + i}" for i in range(count)])
    pq.write_table(pa.table({"text": texts, **columns}), job.folder / "in" / name, row_group_size=10)


def kept(job) -> pa.Table:
    table = ds.dataset(job.output, format="parquet").to_table()
    return table.take(pa.array(sorted(range(table.num_rows), key=lambda i: int(table["text"][i].as_py().split()[1]))))


def test_types_that_all_files_share_come_out_as_they_went_in(job):
    put(job, "a.parquet", {name: column.slice(0, 30) for name, column in SAME.items()})
    put(job, "b.parquet", {name: column.slice(30) for name, column in SAME.items()}, 30)
    run(job, input={"columns": None}, run={"window_rows": 25}, output={"rows_per_file": 8})
    table = kept(job)
    for name, column in SAME.items():
        assert table.schema.field(name).type == column.type, name
        assert table[name].to_pylist() == column.to_pylist(), name


def test_types_that_a_part_cannot_hold_are_the_plain_ones(job):
    put(job, "a.parquet", {name: column for name, (column, _) in CHANGED.items()})
    run(job, input={"columns": None})
    table = kept(job)
    for name, (column, becomes) in CHANGED.items():
        assert table.schema.field(name).type == becomes, name
        assert table[name].to_pylist() == column.to_pylist(), name
    assert table.schema.field("never_null").type.value_field.nullable


def test_where_files_differ_the_wider_or_plain_type_holds_all(job):
    put(job, "a.parquet", {"id": pa.array([1], pa.int32()), "kind": pa.array(["x"]).dictionary_encode()})
    put(job, "b.parquet", {"id": pa.array([2], pa.int64()), "kind": pa.array(["y"], pa.large_string())}, 1)
    put(job, "c.parquet", {"id": pa.array([None], pa.null()), "kind": pa.array(["z"]).dictionary_encode()}, 2)
    run(job, input={"columns": ["kind", "text", "id"]})
    table = kept(job)
    assert table.schema.names[:3] == ["kind", "text", "id"], "in the order of the job file"
    assert [table.schema.field(name).type for name in ("id", "kind")] == [pa.int64(), pa.string()]
    assert table.select(["id", "kind"]).to_pydict() == {"id": [1, 2, None], "kind": ["x", "y", "z"]}


def test_a_part_holds_no_more_of_a_dictionary_than_its_rows_need(job):
    values = pa.array([f"{i:04d}" + "v" * 2000 for i in range(ROWS)]).dictionary_encode()
    put(job, "a.parquet", {"kind": values})
    run(job, input={"columns": None}, run={"window_rows": 60}, output={"rows_per_file": 5})
    assert len(job.parts()) == 12
    for part in job.parts():
        assert len(pq.read_table(part)["kind"].combine_chunks().dictionary) == 5


def test_merged_parts_keep_them_too(job, tmp_path):
    put(job, "a.parquet", SAME)
    run(job, input={"columns": None}, run={"window_rows": 25}, output={"rows_per_file": 8})
    compact(PartStore(str(job.output)), PartStore(str(tmp_path / "merged")), "input", 2**14, print)
    table = ds.dataset(tmp_path / "merged", format="parquet").to_table()
    for name, column in SAME.items():
        assert table.schema.field(name).type == column.type, name
        assert table[name].to_pylist() == column.to_pylist(), name
