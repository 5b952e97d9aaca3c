"""Savings: each estimate computed by hand, and continuous batching compared with real static batches."""

import random
from dataclasses import replace

import pytest

from pipeline.formatting import duration, money
from pipeline.report.features import Speculation
from pipeline.report.record.row_stats import Histogram, RowStats
from pipeline.report.record.run_record import no_phases
from pipeline.report.render import markdown, text
from pipeline.report.savings import continuous_batching_us, find_savings, prefix_sharing_us
from tests.report.records import delivering, report, run


def test_a_shared_prompt_token_saves_the_time_of_a_computed_one():
    assert prefix_sharing_us(cached_tokens=300, prefill_us=1000, computed_prompt_tokens=100) == 3000
    assert prefix_sharing_us(300, 1000, 0) == 0


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_static_batches_take_as_long_as_their_longest_rows(batch: int):
    """The test cuts 10,000 rows into batches in their order; the time is the sum of the longest outputs."""
    draw = random.Random(batch)
    lengths = [draw.choice([3, 7, 20, 31]) for _ in range(10_000)]
    static = sum(batch * max(lengths[i : i + batch]) for i in range(0, len(lengths), batch))
    continuous = sum(lengths)
    outputs = [Histogram.from_values(lengths[:5000]), Histogram.from_values(lengths[5000:])]
    found = continuous_batching_us(outputs, batch, decode_us=10**6)
    assert found / 10**6 == pytest.approx(static / continuous - 1, abs=0.02)


def test_outputs_of_one_length_gain_nothing_from_continuous_batching():
    assert continuous_batching_us([Histogram.from_values([9] * 50)], 8, 10**6) == 0
    assert continuous_batching_us([], 8, 10**6) == 0
    few = [Histogram.from_values([1, 31])]  # a batch has no more rows than the job
    assert continuous_batching_us(few, 64, 10**6) == continuous_batching_us(few, 2, 10**6) > 0


def test_each_saving_has_its_price_and_zero_savings_are_left_out():
    stats = {"prompt_tokens": 1500, "cached_tokens": 500}
    ran = replace(run(), actors=[replace(run().actors[0], stats=stats)], resolved={"max_num_seqs": 4})
    phases = no_phases() | {"prefill": 1000, "decode": 4000}
    slow = Speculation(10, 5, (), (), -250)
    outputs = [Histogram.from_values([8, 8])]
    found = find_savings([ran], outputs=outputs, phases_us=phases, speculation=slow, usd_per_us=0.01)
    assert [(s.name, s.saved_us, s.usd, s.basis) for s in found] == [
        ("prefix_sharing", 500, 5.0, "measured"),
        ("speculation", -250, -2.5, "measured"),
    ]
    assert find_savings([], outputs=[], phases_us=phases, speculation=None, usd_per_us=None) == ()


def test_the_report_shows_them():
    record = replace(
        delivering(run(prefill=10**6, decode=3 * 10**6)),
        row_stats=RowStats(outputs={64: Histogram.from_values([1] * 9 + [20])}),
        resolved={"max_num_seqs": 10},
    )
    built = report(record, num_generated_tokens=300_000)
    (saving,) = built.savings
    row = (saving.title, duration(saving.saved_us / 1e6), money(saving.usd), "static batches of 10 rows (modelled)")
    assert " ".join(row) in " ".join(text(built).split())
    assert f"| {' | '.join(row)} |" in markdown(built)
