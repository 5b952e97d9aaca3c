"""The rate and the remaining time: from tokens that engines compute, without refused and cached ones."""

from pipeline.data.output.part_totals import PartTotals
from pipeline.job.telemetry.pace import Pace
from pipeline.report.record.row_stats import Computed

NOTHING = PartTotals()


def pace_of(*seen: tuple[float, int, int]) -> Pace:
    pace = Pace()
    for now_s, prompt, generated in seen:
        pace.add(now_s, Computed(prompt, generated))
    return pace


def test_a_refused_prompt_of_200032_tokens_takes_no_time():
    """Ten of 100 rows are written, one of them refused: 90 tokens computed of each of the others, 100 a second."""
    held = PartTotals(10, 1, {"prompt_too_long": 1}, 1000, 280, 90, 200_032)
    pace = pace_of((5.0, 0, 0), (13.1, 720, 90))
    assert pace.eta_s(100, held, NOTHING) == (8100 - 810) / 100


def test_the_rate_is_of_the_last_half_minute_without_loading_and_never_negative():
    assert pace_of((0.0, 0, 0), (1.0, 0, 0), (60.0, 0, 0), (61.0, 300, 100)).per_s() == (300.0, 100.0)
    seen = [(float(s), 10 * s if s < 50 else 490 + 100 * (s - 49), 0) for s in range(100)]
    assert pace_of(*seen).per_s() == (100.0, 0.0)
    assert pace_of((0.0, 5, 5), (1.0, 0, 6)).per_s() == (0.0, 1.0), "an engine that restarts"


def test_rows_of_earlier_runs_are_not_left():
    before = PartTotals(50, 5, {}, 5000, 0, 500)
    held = before + PartTotals(10, 1, {}, 1000, 0, 100)
    pace = pace_of((0.0, 0, 0), (10.0, 1000, 100))
    assert pace.eta_s(100, held, before) == (11_000 - 5500 - 1100) / 110


def test_there_is_no_eta_before_a_unit_is_written_nor_when_all_are():
    pace = pace_of((0.0, 0, 0), (1.0, 10, 10))
    held = PartTotals(10, 1, {}, 100, 0, 100)
    assert pace.eta_s(100, NOTHING, NOTHING) is None
    assert pace.eta_s(10, held, NOTHING) is None
    assert pace_of((0.0, 0, 0)).eta_s(100, held, NOTHING) is None
