"""Units of a window, as sent to actors: each row once, error rows too, with its own sampling values."""

import json
import pickle

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.prompts import PromptSpec
from pipeline.data.units import Unit, UnitSpec, make_units


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
    assert [(u.window, u.index, u.num_units) for u in units] == [(3, i, len(units)) for i in range(len(units))]
    rows = by_row(units)
    assert list(rows) == list(range(len(texts)))
    for i, text in enumerate(texts):
        assert rows[i]["id"] == str(i)
        good = text is not None and text.strip() != ""
        assert (rows[i]["_prompt"], rows[i]["_error"] is None) == ((text, True) if good else (None, False))


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
    assert rows[3]["_error_message"] == "sampling.max_tokens: nan in column 'budget', expected a finite number"
    assert rows[3]["_prompt"] is None
    # an invalid value makes an error row; other rows are unchanged
    rows = by_row(make_units(window_of(columns), spec(sampling_columns={"seed": "when"})))
    assert [r["_error"] for r in rows.values()] == ["invalid_sampling", None, None, None, "null_prompt"]
    rows = by_row(make_units(window_of(columns | {"stop": [["x", None], ["x"], *[None] * 3]}), s))
    assert [r["_error"] for r in rows.values()][:2] == ["invalid_sampling", None]
    assert rows[0]["_error_message"] == "sampling.stop: a null among the values of column 'stop'"


def test_budgets_decide_the_size_of_units():
    columns = {"text": ["x"] * 8, "id": list(range(8)), "budget": [100.0, 1, 1, 1, 100, 1, 1, 1e30]}
    units = make_units(window_of(columns), spec(sampling_columns={"max_tokens": "budget"}, unit_tokens=110))
    # one row counts for at most 2**20; the long budgets come first, each nearly a unit
    assert [u.table.column("id").to_pylist() for u in units] == [[7], [0], [4, 1, 2, 3, 5], [6]]
    assert len(make_units(window_of(columns), spec(default_max_tokens=54, unit_tokens=110))) == 4


def test_kept_columns_with_names_of_ours():
    columns = {"text": ["a", "b"], "source_file": ["mine", "mine"], "_prompt": ["p", "q"], "_error": [1, 2]}
    kept = ("source_file", "_prompt", "_error")
    unit = Unit.from_bytes(make_units(window_of(columns), spec(kept=kept))[0].to_bytes())
    assert unit.kept().to_pydict() == {name: columns[name] for name in kept}
    assert unit.own("source_file").to_pylist() == ["f.parquet"] * 2
    assert unit.own("_prompt").to_pylist() == ["a", "b"]


def test_invalid_text_in_a_kept_column_passes_through():
    _, offsets, data = pa.array([b"\xff", b"ok"]).buffers()
    note = pa.StringArray.from_buffers(2, offsets, data)
    unit = Unit.from_bytes(make_units(window_of({"text": note, "id": note}), spec())[0].to_bytes())
    rows = dict(zip(unit.own("source_row").to_pylist(), unit.kept().column("id").cast(pa.binary()).to_pylist()))
    assert rows == {0: b"\xff", 1: b"ok"}
    assert sorted(unit.own("_error").to_pylist(), key=str) == [None, "invalid_utf8"]


def test_many_identical_rows():
    """No step may compare rows with each other, or recurse once per row."""
    n = 20_000
    for text in ("same", "x" * 600):
        columns = {"text": pa.repeat(pa.scalar(text), n), "id": pa.repeat(pa.scalar(1), n)}
        units = make_units(window_of(columns), spec(unit_tokens=1 << 40))
        assert {units.num_rows_of(i) for i in range(len(units) - 1)} == {512}
        found = [row for u in units for row in u.own("source_row").to_pylist()]
        assert sorted(found) == list(range(n))
