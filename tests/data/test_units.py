"""From a window as read to units that travel: each row once, error rows too, with its own sampling values."""

import json
import pickle

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.prompts import PromptSpec
from pipeline.data.source import cut_windows, open_source, read_window
from pipeline.data.units import OWN_FIELDS, Unit, UnitSpec, make_units

OWN = [f.name for f in OWN_FIELDS]


def window_of(columns: dict) -> pa.Table:
    table = pa.table(columns)
    n = table.num_rows
    table = table.append_column("source_file", pa.array(["f.parquet"] * n))
    table = table.append_column("source_row", pa.array(range(n), pa.int64()))
    return table.replace_schema_metadata({b"pipeline.window": b"3"})


def spec(**changes) -> UnitSpec:
    return UnitSpec(**{"prompt": PromptSpec(column="text"), "kept": ("id",), **changes})


def by_row(units: list[Unit]) -> dict[int, dict]:
    rows = [row for u in units for row in u.table.to_pylist()]
    assert len({r["source_row"] for r in rows}) == len(rows)
    return {r["source_row"]: r for r in sorted(rows, key=lambda r: r["source_row"])}


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.one_of(st.none(), st.text(max_size=60)), max_size=40),
    unit_tokens=st.integers(1, 300),
    unit_rows=st.integers(1, 12),
)
def test_every_row_is_in_one_unit(texts, unit_tokens, unit_rows):
    table = window_of({"text": pa.array(texts, pa.string()), "id": pa.array([str(i) for i in range(len(texts))])})
    s = spec(unit_tokens=unit_tokens, unit_rows=unit_rows)
    units = make_units(table, s)
    assert [u.to_bytes() for u in make_units(table, pickle.loads(pickle.dumps(s)))] == [u.to_bytes() for u in units]
    assert [(u.window, u.index, u.of) for u in units] == [(3, i, len(units)) for i in range(len(units))]
    rows = by_row(units)
    assert list(rows) == list(range(len(texts)))
    for i, text in enumerate(texts):
        assert rows[i]["id"] == str(i)
        good = text is not None and text.strip() != ""
        assert (rows[i]["_prompt"], rows[i]["_error"] is None) == ((text, True) if good else (None, False))


def test_units_travel():
    unit = make_units(window_of({"text": ["a", None], "id": [1, 2]}), spec())[0]
    again = Unit.from_bytes(unit.to_bytes())
    assert (again.window, again.index, again.of) == (3, 0, 1)
    assert again.table.equals(unit.table)
    assert again.table.column_names == ["id", *OWN]
    assert [f.type for f in again.table.schema][1:] == [f.type for f in OWN_FIELDS]
    assert again.kept().to_pydict() == {"id": [1, 2]}
    assert again.own("_error").to_pylist() == [None, "null_prompt"]


def test_a_window_of_no_rows_has_no_units():
    assert not make_units(window_of({"text": pa.array([], pa.string()), "id": pa.array([], pa.int64())}), spec())


def test_columns_to_read():
    s = spec(prompt=PromptSpec(template="{text} {id}"), sampling_columns={"max_tokens": "budget", "top_k": "budget"})
    assert s.columns == ("id", "text", "budget")


def test_per_row_sampling():
    columns = {
        "text": ["a", "b", "c", "d", None],
        "id": [0, 1, 2, 3, 4],
        "budget": pa.array([5, None, 64.0, float("nan"), float("inf")]),
        "stop": pa.array([["x", "y"], None, [], ["z"], None]),
        "when": pa.array([b"1", None, None, None, None], pa.binary()),
    }
    s = spec(sampling_columns={"max_tokens": "budget", "stop": "stop"})
    rows = by_row(make_units(window_of(columns), s))
    params = [json.loads(r["_params"]) if r["_params"] else None for r in rows.values()]
    assert params[:3] == [{"max_tokens": 5, "stop": ["x", "y"]}, None, {"max_tokens": 64, "stop": []}]
    assert isinstance(params[2]["max_tokens"], int)
    assert [r["_error"] for r in rows.values()] == [None, None, None, "invalid_sampling", "null_prompt"]
    assert "'budget'" in rows[3]["_error_message"]
    assert rows[3]["_prompt"] is None
    # what a row cannot be asked with makes it an error row; the others stay
    rows = by_row(make_units(window_of(columns), spec(sampling_columns={"seed": "when"})))
    assert [r["_error"] for r in rows.values()] == ["invalid_sampling", None, None, None, "null_prompt"]


def test_a_null_in_a_row_s_list_is_named():
    columns = {"text": ["a", "b"], "id": [1, 2], "stops": [["x", None], ["x"]]}
    rows = by_row(make_units(window_of(columns), spec(sampling_columns={"stop": "stops"})))
    assert rows[0]["_error"] == "invalid_sampling"
    assert rows[0]["_error_message"] == "sampling.stop: a null among the values of column 'stops'"
    assert rows[1]["_error"] is None


def test_budgets_decide_the_size_of_units():
    columns = {"text": ["x"] * 8, "id": range(8), "budget": [100.0, 1, 1, 1, 100, 1, 1, 1e30]}
    units = make_units(
        window_of({k: list(v) for k, v in columns.items()}),
        spec(sampling_columns={"max_tokens": "budget"}, unit_tokens=110),
    )
    # 2**20 is the most that one row counts for; the long budgets come first, each nearly a unit
    assert [u.table.column("id").to_pylist() for u in units] == [[7], [0], [4, 1, 2, 3, 5], [6]]
    assert (
        len(
            make_units(
                window_of({"text": ["x"] * 8, "id": list(range(8))}), spec(default_max_tokens=54, unit_tokens=110)
            )
        )
        == 4
    )


def test_kept_columns_named_like_ours():
    columns = {"text": ["a", "b"], "source_file": ["mine", "mine"], "_prompt": ["p", "q"], "_error": [1, 2]}
    kept = ("source_file", "_prompt", "_error")
    unit = Unit.from_bytes(make_units(window_of(columns), spec(kept=kept))[0].to_bytes())
    assert unit.kept().to_pydict() == {name: columns[name] for name in kept}
    assert unit.own("source_file").to_pylist() == ["f.parquet"] * 2
    assert unit.own("_prompt").to_pylist() == ["a", "b"]


def test_fault_33_invalid_text_in_a_kept_column_passes_through():
    _, offsets, data = pa.array([b"\xff", b"ok"]).buffers()
    note = pa.StringArray.from_buffers(2, offsets, data)
    unit = Unit.from_bytes(make_units(window_of({"text": note, "id": note}), spec())[0].to_bytes())
    rows = dict(zip(unit.own("source_row").to_pylist(), unit.kept().column("id").cast(pa.binary()).to_pylist()))
    assert rows == {0: b"\xff", 1: b"ok"}
    assert sorted(unit.own("_error").to_pylist(), key=str) == [None, "invalid_utf8"]


@pytest.mark.parametrize("max_rows", [1, 7, 100])
def test_from_file_to_units(write, max_rows):
    columns = {"text": [f"text {i}" for i in range(20)], "id": [f"id {i}" for i in range(20)]}
    source = open_source(write("a.parquet", columns, row_group_size=6))
    s = spec(unit_rows=4)
    windows = cut_windows(source, max_rows, 1 << 40)
    units = [u for w in windows for u in make_units(read_window(source, w, s.columns), s)]
    assert {u.window for u in units} == {w.index for w in windows}
    rows = by_row(units)
    assert [(r["id"], r["_prompt"], r["source_file"]) for r in rows.values()] == [
        (f"id {i}", f"text {i}", "a.parquet") for i in range(20)
    ]


def test_fault_34_duplicate_and_missing_ids_are_rows_like_others():
    columns = {"text": ["a", "b", "a", "c"], "id": [1, 1, None, None]}
    rows = by_row(make_units(window_of(columns), spec()))
    assert [(r["_prompt"], r["id"]) for r in rows.values()] == [("a", 1), ("b", 1), ("a", None), ("c", None)]


def test_many_identical_rows():
    """No step may compare rows with each other, nor nest as deep as there are rows."""
    n = 20_000
    for text in ("same", "x" * 600):
        columns = {"text": pa.repeat(pa.scalar(text), n), "id": pa.repeat(pa.scalar(1), n)}
        units = make_units(window_of(columns), spec(unit_tokens=1 << 40))
        assert {units.num_rows_of(i) for i in range(len(units) - 1)} == {512}
        found = [row for u in units for row in u.own("source_row").to_pylist()]
        assert sorted(found) == list(range(n))


def test_units_are_made_one_at_a_time():
    units = make_units(window_of({"text": ["a"] * 10, "id": list(range(10))}), spec(unit_rows=2))
    assert (len(units), units[-1].index, [u.index for u in units.some([1, 2])]) == (5, 4, [1, 2])
    assert units[0].table.equals(units[0].table)
    with pytest.raises(IndexError):
        units[5]


def test_every_kind_of_column_from_file_to_units(write):
    stored = {
        "text": pa.array(["a", "b", None]).dictionary_encode(),
        "large": pa.array(["x", None, "z\0"], pa.large_string()),
        "list": pa.array([["x"], [], None], pa.large_list(pa.large_string())),
        "struct": pa.array([{"k": 1, "v": ["é"]}, None, {"k": None, "v": None}]),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "day": pa.array([0, None, 19_000], pa.date32()),
        "bytes": pa.array([b"\xff", None, b""], pa.large_binary()),
    }
    source = open_source(write("site=3/a.parquet", pa.table(stored)))
    s = spec(prompt=PromptSpec(template="{text} {site} {list} {struct}"), kept=tuple(source.schema.names))
    (window,) = cut_windows(source, 10, 1 << 40)
    (unit,) = make_units(read_window(source, window, s.columns), s)
    again = Unit.from_bytes(unit.to_bytes())
    kept = [{name: row[name] for name in stored} for row in by_row([again]).values()]
    assert kept == pa.table(stored).to_pylist()
    assert again.kept().column("site").to_pylist() == [3, 3, 3]
    prompts = {r["source_row"]: r["_prompt"] or r["_error"] for r in by_row([again]).values()}
    assert prompts == {0: 'a 3 ["x"] {"k":1,"v":["é"]}', 1: "null_prompt", 2: "null_prompt"}
