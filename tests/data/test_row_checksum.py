"""Checksum of row ids: the same for the same rows in any order and any division, and different for other rows."""

import random

import pyarrow as pa
import pytest

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.row_checksum import MODULUS, range_checksum, rows_checksum


def checksum(row_ids: list[tuple[str | None, int | None]]) -> int:
    files, rows = ([each[i] for each in row_ids] for i in range(2))
    return rows_checksum(pa.chunked_array([files], pa.string()), pa.chunked_array([rows], pa.int64()))


def test_it_is_the_recorded_one():
    """Footers of existing outputs hold these values."""
    assert checksum([("a.parquet", 0)]) == 0x3F1BD7F164AA7EE2
    assert range_checksum("day=1/b.parquet", 10, 1000) == 0x795DEC1E37FBB82D


def test_it_depends_on_the_set_of_rows_alone():
    rows = [*(("a", i) for i in range(300)), *(("b", i) for i in range(40, 90))]
    random.Random(0).shuffle(rows)
    whole = checksum(rows)
    assert (range_checksum("a", 0, 300) + range_checksum("b", 40, 90)) % MODULUS == whole
    assert (checksum(rows[:17]) + checksum(rows[17:])) % MODULUS == whole
    parts = PartTotals(rows_checksum=checksum(rows[:17])) + PartTotals(rows_checksum=checksum(rows[17:]))
    assert parts.rows_checksum == whole
    assert PartTotals.from_json(parts.to_json()) == parts
    assert (parts - PartTotals(rows_checksum=checksum(rows[:17]))).rows_checksum == checksum(rows[17:])


@pytest.mark.parametrize(
    "other", [("a", 6), ("a", 4), ("b", 5), ("a", 5 + 2**32), ("a", None), (None, 5), ("a", -5), ("A", 5)]
)
def test_another_row_changes_it(other):
    before = [("a", 3), ("b", 4)]
    assert checksum([*before, ("a", 5)]) != checksum([*before, other])
    assert checksum([*before, ("a", 5), ("a", 5)]) != checksum([*before, ("a", 5), other])
    assert checksum([]) == 0
