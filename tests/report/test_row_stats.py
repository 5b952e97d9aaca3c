"""Figures of rows add up in any order, and percentiles of a histogram are within its documented error."""

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.record.data_warnings import MAX_FEW_ROWS, ControlTokenRows
from pipeline.report.record.row_stats import (
    HISTOGRAM_ERROR,
    MAX_EXAMPLES,
    ErrorExample,
    Histogram,
    Latency,
    LengthBucket,
    RowStats,
    Timing,
    latency_of,
    length_bucket,
)

BORDERS = st.sampled_from([0, 1, 31, 32, 33, 34, 63, 64, 65, 1023, 1024, 2**40 - 1, 2**40])
VALUES = st.lists(BORDERS | st.integers(0, 10**13), min_size=1, max_size=60)


@given(VALUES, st.sampled_from([1, 50, 95, 99, 100]))
def test_a_percentile_is_the_exact_one_within_the_documented_error(values: list[int], percent: int):
    exact = sorted(values)[max(1, ceil(len(values) * percent / 100)) - 1]
    found = Histogram.from_values(values).percentile(percent)
    assert abs(found - exact) <= exact * HISTOGRAM_ERROR
    assert Histogram().percentile(percent) is None


@given(VALUES, VALUES)
def test_histograms_of_two_parts_add_up(a: list[int], b: list[int]):
    both = Histogram.from_values(a) + Histogram.from_values(b)
    assert both == Histogram.from_values(b) + Histogram.from_values(a)
    assert dict(both.counts) == dict(Histogram.from_values(a + b).counts)
    assert both.count == len(a) + len(b)


def test_latency_by_hand():
    """The first row is queued at 10, with its first token at 25 and its last of 4 at 31. A row with one token has no
    time between tokens, and a row without tokens has no latency."""
    latency = latency_of([Timing(10, 25, 31, 4), Timing(10, 14, 14, 1), Timing(5, 0, 0, 0)])
    assert latency.first_token_us == Histogram.from_values([15, 4])
    assert latency.per_token_us == Histogram.from_values([2])
    assert latency.row_us == Histogram.from_values([21, 4])


def test_length_buckets_are_powers_of_two():
    assert [length_bucket(n) for n in (0, 1, 64, 65, 128, 129, 5000)] == [64, 64, 64, 128, 128, 256, 8192]


def stats(code: str, first_row: int, n: int = 2) -> RowStats:
    return RowStats(
        Latency(row_us=Histogram.from_values([first_row, 10_000])),
        {64: LengthBucket(1, 50, 10, 5), first_row * 128: LengthBucket(2, 200, 0, 7)},
        {code: tuple(ErrorExample("a.parquet", first_row + i, "why") for i in range(n))},
    )


def test_row_stats_add_up_and_keep_the_first_examples():
    total = stats("null_prompt", 1) + stats("null_prompt", 2) + stats("engine_failure", 4)
    assert total.lengths[64] == LengthBucket(3, 150, 30, 15)
    assert list(total.lengths) == [64, 128, 256, 512]
    assert [e.row for e in total.errors["null_prompt"]] == [1, 2, 2]
    assert len(total.errors["null_prompt"]) == MAX_EXAMPLES
    assert len(total.errors["engine_failure"]) == 2
    assert total.latency.row_us.count == 6


def test_rows_with_control_tokens_add_up_and_a_few_cause_no_warning():
    one = RowStats(control_tokens=ControlTokenRows(in_values=MAX_FEW_ROWS, value_example="first"))
    two = RowStats(control_tokens=ControlTokenRows(2, 1, "<s>", "second"))
    assert one.control_tokens.warnings() == []
    found = (one + two).control_tokens
    assert found == ControlTokenRows(2, MAX_FEW_ROWS + 1, "<s>", "first")
    assert [(w.kind, w.count, w.example) for w in found.warnings()] == [
        ("control_tokens_in_template", 2, "<s>"),
        ("control_tokens_in_rows", MAX_FEW_ROWS + 1, "first"),
    ]
    assert (RowStats() + one).control_tokens == one.control_tokens
