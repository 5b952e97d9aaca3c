"""`report --by`: kept columns may hold any value of the input."""

import pyarrow as pa
import pytest

from pipeline.report.by_column import by_column
from tests.report.records import delivering, report, run

NOT_UTF8 = pa.array([b"\xff", b"a", b"a", None], pa.binary())
DAYS = pa.array([10**8, 0, 0, None], pa.int32())  # days from 1970 on


@pytest.mark.parametrize(("column", "names"), [
    (pa.StringArray.from_buffers(4, *NOT_UTF8.buffers()[1:], NOT_UTF8.buffers()[0]), ["\ufffd", "a", "(null)"]),
    (NOT_UTF8, ["\ufffd", "a", "(null)"]),
    (DAYS.cast(pa.date32()), ["<value out of range: 100000000>", "1970-01-01", "(null)"]),
])  # fmt: skip
def test_values_out_of_pythons_range_are_named_too(column: pa.Array, names: list[str]) -> None:
    count = pa.array([1] * 4, pa.int32())
    tokens = {f"num_{kind}_tokens": count for kind in ("input", "cached", "generated")}
    part = pa.table({"c": column, "error": pa.nulls(4, pa.string()), **tokens})
    found = by_column(report(delivering(run())), "c", [part], max_groups=9)
    assert {group.value: group.rows for group in found.groups} == dict(zip(names, [1, 2, 1]))
