"""Records of a run: whole numbers, exact sums, and a round trip through JSON."""

import json

from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.record.data_warnings import ControlTokenRows
from pipeline.report.record.row_stats import Computed, ErrorExample, Histogram, Latency, LengthBucket, RowStats
from pipeline.report.record.run_record import ActorRecord, RunRecord, no_phases, split_exactly


@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**12), min_size=1, max_size=8))
def test_a_split_sums_exactly_and_is_fair(total: int, weights: list[int]):
    parts = split_exactly(total, weights)
    assert sum(parts) == total
    whole = sum(weights)
    for part, weight in zip(parts, weights, strict=True):
        assert part >= 0
        if whole:
            assert abs(part - total * weight / whole) <= 1 + total * 1e-12


def test_records_survive_json():
    actor = ActorRecord(
        3, no_phases() | {"decode": 5}, {"num_steps": 2}, units=1, rows=4, error_rows=1, restarts=1,
        restart_reasons=["exit code 1"], delivered_tokens=Computed(1, 2), crashed_tokens=Computed(3, 4), replaces=2,
    )  # fmt: skip
    stats = RowStats(
        Latency(Histogram.from_values([5])), {64: LengthBucket(1, 2, 3, 4)}, {"x": (ErrorExample("a", 1, "m"),)},
        control_tokens=ControlTokenRows(2, 1, "<s>", "a"),
    )  # fmt: skip
    run = RunRecord(
        "run-1", "2026-01-01T00:00:00+00:00", "finished", wall_us=9, driver_us={"planning_us": 1}, actors=[actor],
        versions={"torch": "2"}, settings={"run": {"actors": 1}}, hourly_usd=0.5, resolved={"device": "cpu"},
        row_stats=stats, storage_retries={"timeout": 1},
    )  # fmt: skip
    assert RunRecord.from_json(json.loads(json.dumps(run.to_json()))) == run
    assert run.machine_us == 5
    assert run.phase_us("decode") == 5
    assert run.stat("num_steps") == 2
    assert run.stat("absent") == 0
