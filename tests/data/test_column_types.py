"""Types of Parquet in prompts and as a kept column: the values equal pyarrow's, or the column is refused by name."""

import datetime
import json
import math
import random
import re
from collections import Counter
from decimal import Decimal
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipeline.data.prompts import PromptSpec
from pipeline.data.source import cut_windows, open_source, read_window
from pipeline.data.units import Unit, UnitSpec, window_units
from pipeline.errors import ConfigError, InputError

IDS = [UUID(int=0), None, UUID("ff345678-1234-5678-1234-567812345678")]
UUIDS = pa.array([v and v.bytes for v in IDS], pa.binary(16)).cast(pa.uuid())
BYTES = pa.array([b"four", None, b"\xff\xfe\xfd\xfc"], pa.binary(4))
INSTANT = pa.array([1_700_000_000, None, 0], pa.int64())
NULL, BAD = "null_prompt", "invalid_utf8"


def extension(kind: pa.DataType, values: list) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


# a column of three values and their prompts; None: as Arrow writes them
COLUMNS: dict[str, tuple[pa.Array, list[str] | None]] = {
    **{f"{kind}": (pa.array([1, None, 100], kind), ["1", NULL, "100"]) for kind in map(pa.type_for_alias, (
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"))},
    **{f"{kind}": (pa.array([1.5, None, math.nan], kind), ["1.5", NULL, "nan"])
       for kind in (pa.float16(), pa.float32(), pa.float64())},
    **{f"{kind}": (pa.array([Decimal("1.50"), None, Decimal("-9.99")], kind), ["1.50", NULL, "-9.99"])
       for kind in (pa.decimal32(5, 2), pa.decimal64(9, 2), pa.decimal128(20, 2), pa.decimal256(50, 2))},
    **{f"{kind}": (INSTANT.cast(kind), None)
       for unit in ("s", "ms", "us", "ns")
       for kind in (pa.timestamp(unit), pa.timestamp(unit, "UTC"), pa.timestamp(unit, "Asia/Kolkata"),
                    pa.timestamp(unit, "+02:00"), pa.duration(unit))},
    **{f"{kind}": (pa.array([1, None, 60], pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind), None)
       for kind in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))},
    **{f"{kind}": (pa.array([datetime.date(2026, 1, 31), None, datetime.date(1, 1, 1)], kind),
                   ["2026-01-31", NULL, "0001-01-01"]) for kind in (pa.date32(), pa.date64())},
    **{f"{kind}": (pa.array(["a", None, "é"], kind), ["a", NULL, "é"])
       for kind in (pa.string(), pa.large_string(), pa.string_view())},
    **{f"{kind}": (pa.array([b"a", None, b"\xff"], kind), ["a", NULL, BAD])
       for kind in (pa.binary(), pa.large_binary(), pa.binary_view())},
    "bool": (pa.array([True, None, False]), ["true", NULL, "false"]),
    "null": (pa.nulls(3), [NULL, NULL, NULL]),
    "fixed": (BYTES, ["four", NULL, BAD]),
    "uuid": (UUIDS, [str(IDS[0]), NULL, str(IDS[2])]),
    "bool8": (extension(pa.bool8(), [1, None, 0]), ["true", NULL, "false"]),
    "json": (extension(pa.json_(), ['{"a":1}', None, "[]"]), ['{"a":1}', NULL, "[]"]),
    "opaque": (extension(pa.opaque(pa.binary(4), "x", "y"), [b"four", None, b"\xff..."]), ["four", NULL, BAD]),
    "tensor": (extension(pa.fixed_shape_tensor(pa.int8(), [2]), [[1, 2], None, [3, 4]]), ["[1,2]", NULL, "[3,4]"]),
    **{f"{kind}": (pa.array([["a", None], None, []], kind), ['["a",null]', NULL, "[]"])
       for kind in (pa.list_(pa.string()), pa.large_list(pa.string()), pa.list_view(pa.string()),
                    pa.large_list_view(pa.string_view()))},
    "fixed list": (pa.array([["a", None], None, ["b", "c"]], pa.list_(pa.string(), 2)),
                   ['["a",null]', NULL, '["b","c"]']),
    "map": (pa.array([[("k", "v")], None, []], pa.map_(pa.string(), pa.string())), ['{"k":"v"}', NULL, "{}"]),
    "map of numbers": (pa.array([[(1, 2.5)], None, [(-1, None)]], pa.map_(pa.int8(), pa.float64())),
                       ['{"1":2.5}', NULL, '{"-1":null}']),
    "map of days": (pa.array([[(0, b"x")], None, []], pa.map_(pa.date32(), pa.binary())),
                    ['{"1970-01-01":"x"}', NULL, "{}"]),
    "struct": (pa.StructArray.from_arrays([UUIDS, BYTES], ["u", "b"]),
               [f'{{"u":"{IDS[0]}","b":"four"}}', '{"u":null,"b":null}', BAD]),
    "list of uuids": (pa.ListArray.from_arrays([0, 1, 2, 3], UUIDS), [f'["{IDS[0]}"]', "[null]", f'["{IDS[2]}"]']),
    "maps in structs in lists": (
        pa.array([[{"m": [("a", [("b", 1)])]}], None, [{"m": None}, None]],
                 pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.map_(pa.string(), pa.int8())))]))),
        ['[{"m":{"a":{"b":1}}}]', NULL, '[{"m":null},null]'],
    ),
    "views in maps": (pa.array([[("k", ["x"]), ("l", [])], None, [("k", None)]],
                               pa.map_(pa.string(), pa.list_view(pa.string()))),
                      ['{"k":["x"],"l":[]}', NULL, '{"k":null}']),
    **{f"dictionary of {name}": (values.dictionary_encode(), texts) for name, values, texts in (
        ("texts", pa.array(["a", None, "é"]), ["a", NULL, "é"]),
        ("bytes", BYTES, ["four", NULL, BAD]),
        ("numbers", pa.array([7, None, 8]), ["7", NULL, "8"]),
        ("days", pa.array([0, None, 1], pa.date32()), ["1970-01-01", NULL, "1970-01-02"]),
    )},
}  # fmt: skip


def outcome(folder: str, template: str, kept: list[str]) -> tuple[list[str], pa.Table]:
    """Return each row's prompt or error code, and the kept columns as a part has them. Raise errors like planning."""
    source = open_source(folder)
    spec = UnitSpec(PromptSpec(template=template), tuple(kept), max_bytes=1000).of_input(source.every_column)
    source.check_columns(spec.columns)
    spec.prompt.check(source.schema)
    rows: list[tuple[str, int, str]] = []
    tables = []
    for window in cut_windows(source, 2, 1 << 20):
        for unit in window_units(source, window, spec):
            unit = Unit.from_bytes(unit.to_bytes())
            prompts, errors = (unit.own(name).to_pylist() for name in ("_prompt", "_error"))
            texts = [p if e is None else e for p, e in zip(prompts, errors, strict=True)]
            rows += [(*row_id, text) for row_id, text in zip(unit.row_ids(), texts, strict=True)]
            columns = zip(unit.kept().columns, (source.kept.field(name).type for name in kept), strict=True)
            tables.append(pa.table([c if c.type.equals(t) else c.cast(t) for c, t in columns], names=kept))
    sink = pa.BufferOutputStream()
    order = sorted(range(len(rows)), key=lambda i: rows[i][:2])
    pq.write_table(pa.concat_tables(tables).take(pa.array(order)), sink)
    return [rows[i][2] for i in order], pq.read_table(pa.BufferReader(sink.getvalue()))


@pytest.mark.parametrize("named", [False, True], ids=["", "of a type that is not known here"])
def test_each_type_has_its_text_and_is_kept(write, named):
    notes = {"ARROW:extension:name": "acme.thing", "ARROW:extension:metadata": "x"} if named else None
    for name, (column, expected) in COLUMNS.items():
        if named and isinstance(column.type, pa.BaseExtensionType):
            continue
        schema = pa.schema([pa.field("c", column.type, metadata=notes)])
        folder = write("a.parquet", pa.Table.from_arrays([column], schema=schema))
        if expected is None:
            texts = pq.read_table(folder)["c"].cast(pa.string()).to_pylist()
            expected = [NULL if text is None else text for text in texts]
        prompts, kept = outcome(folder, "{c}", ["c"])
        assert prompts == expected, name
        assert repr(kept["c"].to_pylist()) == repr(pq.read_table(folder)["c"].to_pylist()), name


def test_fields_of_structs_and_values_of_maps(write):
    notes = pa.array([[("a", 1), ("b", 2)], [("a", 3), ("a", 4)], []], pa.map_(pa.string(), pa.int32()))
    more = pa.array([[(1, [("k", {"x": "deep"})])], None, [(2, [])]], pa.map_(pa.int8(), pa.map_(
        pa.string(), pa.struct([("x", pa.string())]))))  # fmt: skip
    folder = write("a.parquet", pa.table({
        "s": pa.StructArray.from_arrays([UUIDS, notes], ["u", "m"]), "m": notes, "n": more, "id": [1, 2, 3],
    }))  # fmt: skip
    for template, expected in {
        "{s.u}": [str(IDS[0]), NULL, str(IDS[2])],
        "{m.a}": ["1", "4", NULL],  # Parquet keeps the last value of a repeated key
        "{m}": ['{"a":1,"b":2}', '{"a":4}', "{}"],
        "{s.m.b}": ["2", NULL, NULL],
        "{m.a:03d}": ["001", "004", NULL],
        "{n.1.k.x}": ["deep", NULL, NULL],
    }.items():
        assert outcome(folder, template, ["id"])[0] == expected, template
    for template, message in {
        "{n.one}": "cannot have the key 'one'",
        "{n.1.k.y}": "no field 'y'",
        "{m.a.b}": "no fields",
    }.items():
        with pytest.raises(ConfigError, match=message):
            outcome(folder, template, [])


def test_an_unknown_zone_is_refused_before_the_job():
    zoned = pa.timestamp("us", "Mars/Crater")
    for kind in (zoned, pa.list_(pa.struct([("t", zoned)]))):
        with pytest.raises(ConfigError, match=rf"column 'x' is {re.escape(str(kind))}, which has no text form"):
            PromptSpec(template="{x}").check(pa.schema([("x", kind)]))


# --- files that store a column in different types


TIMES = [pa.timestamp(u, z) for u in ("s", "ms", "us", "ns") for z in (None, "UTC", "Asia/Kolkata")]
DURATIONS = [pa.duration(u) for u in ("s", "ms", "us", "ns")]
CLOCKS = [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]
DAYS = [pa.date32(), pa.date64()]
NESTED = {"plain": lambda a: a, "list": lambda a: pa.ListArray.from_arrays(list(range(len(a) + 1)), a),
          "struct": lambda a: pa.StructArray.from_arrays([pa.nulls(len(a), pa.int8()), a], ["x", "t"])}  # fmt: skip


@pytest.mark.parametrize("nested", NESTED)
def test_times_in_two_units_are_merged_or_refused_at_planning(write, nested):
    """Every pair of units and zones is tested, with times that all units can hold and times that nanoseconds cannot."""
    last = (2**62, 253_402_214_400)  # 9999-12-31 in seconds, a duration of the same length
    for kinds in (TIMES, DURATIONS, CLOCKS, DAYS):
        for a in kinds:
            for b in kinds:
                for value in (86_000, last[1]) if kinds in (TIMES, DURATIONS) else (0,):
                    _check_pair(write, a, b, value, NESTED[nested])


def _check_pair(write, a, b, seconds, nest) -> None:
    def column(kind, value):
        if pa.types.is_date(kind) or pa.types.is_time(kind):
            return pa.array([value, None], pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
        scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        return pa.array([value * scale, None], pa.int64()).cast(kind)

    def is_too_long(kind):
        return hasattr(kind, "unit") and kind.unit == "ns" and seconds > 2**33

    first, second = ((k, 86_000 if is_too_long(k) else seconds) for k in (a, b))
    tables = [pa.table({"t": nest(column(*each))}) for each in (first, second)]
    for name, table in zip(("a.parquet", "b.parquet"), tables, strict=True):
        folder = write(name, table)
    stored = [pq.read_schema(f"{folder}/{name}.parquet").field("t").type for name in "ab"]
    own_zone = getattr(a, "tz", None) != getattr(b, "tz", None)
    if own_zone or (is_too_long(a) != is_too_long(b)):
        with pytest.raises(InputError, match=r"column 't'.*parquet.*parquet"):
            open_source(folder).check_columns(["t"])
        return
    _, kept = outcome(folder, "{t}", ["t"])
    for at, table in enumerate(tables):
        assert kept["t"].slice(2 * at, 2).to_pylist() == table["t"].cast(kept["t"].type).to_pylist(), (a, b)
    unified = open_source(folder).unified
    assert bool(unified) == (stored[0] != stored[1]), (a, b)
    if unified:
        assert list(unified["t"].stored.values()) == [f"{folder}/a.parquet", f"{folder}/b.parquet"]


def test_times_that_do_not_fit_are_not_damage_without_statistics(write):
    write("a.parquet", {"t": pa.array([datetime.datetime(9999, 12, 31)], pa.timestamp("us"))}, write_statistics=False)
    folder = write("b.parquet", {"t": pa.array([0]).cast(pa.timestamp("ns"))})
    source = open_source(folder, on_corrupt="skip")
    spec = UnitSpec(PromptSpec(template="{t}"))
    with pytest.raises(
        InputError, match=r"a\.parquet: column 't': its type timestamp\[us\] was merged to timestamp\[ns\]"
    ):
        list(window_units(source, cut_windows(source, 10, 1 << 20)[0], spec))


def test_types_widen_only_without_loss_at_every_depth(write):
    for a, b, merged in (
        (pa.int64(), pa.float64(), None),  # 2**53 + 1 would change
        (pa.uint64(), pa.int64(), None),
        (pa.string(), pa.list_(pa.string()), None),
        (pa.string(), pa.binary(), None),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), None),
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.uint8(), pa.int32(), pa.int32()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.decimal128(5, 2), pa.decimal128(9, 4), pa.decimal128(9, 4)),
        (pa.string(), pa.dictionary(pa.int8(), pa.large_string()), pa.string()),
        (pa.null(), pa.string(), pa.string()),
        (pa.uuid(), pa.binary(16), pa.binary()),
        (pa.binary(4), pa.binary(8), pa.binary()),
    ):
        for wrap in (lambda t: t, pa.list_, lambda t: pa.struct([("x", t)]), lambda t: pa.map_(pa.string(), t)):
            write("a.parquet", pa.table({"c": pa.nulls(1, wrap(a))}))
            folder = write("b.parquet", pa.table({"c": pa.nulls(1, wrap(b))}))
            source = open_source(folder)
            if merged is None:
                with pytest.raises(InputError, match=r"column 'c': it is .*b\.parquet, but .*a\.parquet"):
                    source.check_columns(["c"])
            else:
                assert source.schema.field("c").type == wrap(merged), (a, b)
                assert len(outcome(folder, "x{c}", ["c"])[0]) == 2
    struct = [pa.struct([("a", pa.int8())]), pa.struct([("b", pa.string()), ("a", pa.int64())])]
    write("a.parquet", pa.table({"c": pa.array([{"a": 1}], struct[0])}))
    folder = write("b.parquet", pa.table({"c": pa.array([{"b": "x", "a": 2}], struct[1])}))
    assert outcome(folder, "{c}", ["c"])[0] == ['{"a":1,"b":null}', '{"a":2,"b":"x"}']


# --- nested types


LEAVES = [column for column, _ in COLUMNS.values()] + [
    *(pa.array([2 ** (bits - 1) - 1, -(2 ** (bits - 1)), 0], f"int{bits}") for bits in (8, 16, 32, 64)),
    *(pa.array([2**bits - 1, None, 0], f"uint{bits}") for bits in (8, 16, 32, 64)),
    *(pa.array([math.inf, -0.0, 1e-7], kind) for kind in (pa.float16(), pa.float32(), pa.float64())),
    *(pa.array([Decimal(10**n - 1), Decimal(1 - 10**n), None], pa.decimal128(n, 0)) for n in (9, 38)),
    pa.array(["", "é{c0}\0", '{"k": [1]}\u2028🙂'], pa.large_string()),
    pa.array([b"", b"\0", "x" * 300], pa.binary_view()),
]  # fmt: skip
STEPS = pa.array(range(4), pa.int32())
NESTINGS = [
    lambda column: pa.ListArray.from_arrays(STEPS, column),
    lambda column: pa.LargeListArray.from_arrays(STEPS.cast(pa.int64()), column),
    lambda column: pa.ListViewArray.from_arrays(STEPS[:3], pa.array([1, 0, 1], pa.int32()), column),
    lambda column: pa.FixedSizeListArray.from_arrays(column, 1, mask=pa.array([False, True, False])),
    lambda column: pa.StructArray.from_arrays([column, UUIDS], ["a", "b"], mask=pa.array([False, False, True])),
    lambda column: pa.MapArray.from_arrays(STEPS, pa.array([1, 2, 3], pa.int16()), column),
]


def test_nested_types_are_right_or_refused_by_name(write):
    """Kept values in two levels of nesting equal those that pyarrow reads, and texts are JSON."""
    rng, outcomes = random.Random(0), Counter()
    for leaf in LEAVES:
        for column in (nest(rng.choice(NESTINGS)(leaf)) for nest in NESTINGS):
            try:
                folder = write("a.parquet", pa.table({"c": column}))
            except pa.ArrowNotImplementedError:
                continue
            try:
                prompts, kept = outcome(folder, "{c}", ["c"])
            except (ConfigError, InputError) as refused:
                outcomes["refused" if "'c'" in str(refused) else str(refused)] += 1
                continue
            own = pq.read_table(folder)["c"]
            assert repr(kept["c"].to_pylist()) == repr(own.to_pylist()), column.type
            for prompt, value in zip(prompts, own, strict=True):
                assert (prompt == NULL) == (not value.is_valid), column.type
                assert prompt in (NULL, BAD, "invalid_value") or json.loads(prompt) is not None, column.type
            outcomes["right"] += 1
    assert outcomes.keys() <= {"right", "refused"}
    assert outcomes["right"] > 10 * outcomes["refused"]


@pytest.mark.parametrize("nested", NESTED)
def test_times_out_of_pythons_range_are_kept(write, nested):
    for kind in (*TIMES, *DURATIONS):
        raw = pa.array([2**62, None, -(2**62)], pa.int64())
        column = NESTED[nested]((pc.divide(raw, 1000) if kind.unit == "s" else raw).cast(kind))
        folder = write("a.parquet", pa.table({"c": column}))
        kept, own = outcome(folder, "{c}", ["c"])[1]["c"], pq.read_table(folder)["c"]
        assert kept.equals(own.cast(kept.type)), kind


@pytest.mark.parametrize("nested", NESTED)
def test_int96_times_of_any_year_are_right(write, nested):
    years = pa.array([datetime.datetime(y, 12, 31, 23, 59, 59, 999_999) for y in (1, 1600, 9999)], pa.timestamp("us"))
    column = NESTED[nested](years)
    folder = write("a.parquet", pa.table({"c": column}), use_deprecated_int96_timestamps=True)
    for max_rows in (9, 2):  # whole row groups, and slices of them
        source = open_source(folder)
        read = [read_window(source, window, ["c"])["c"] for window in cut_windows(source, max_rows, 2**30)]
        assert [v for part in read for v in part.to_pylist()] == column.to_pylist()
    assert outcome(folder, "{c}", ["c"])[1]["c"].to_pylist() == column.to_pylist()
