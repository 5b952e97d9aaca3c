"""The report: phases sum exactly, every dollar goes somewhere once, and no price is never zero."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cost import RunReport, Tokens, allocate, build_report
from pipeline.metrics import PHASES, ActorRecord, RunRecord, no_phases
from pipeline.report import bar, money, seconds

HOUR = 3_600_000_000
TOTALS = {
    "rows": 180,
    "units": 3,
    "error_rows": {"prompt_too_long": 2, "null_prompt": 0},
    "num_input_tokens": 2_000_000,
    "num_cached_tokens": 500,
    "num_generated_tokens": 500_000,
}


def run(usd: float | None = 1.0, outcome="finished", **phases: int) -> RunRecord:
    actor = ActorRecord(
        0, no_phases() | phases, {"generated_tokens": 300_000, "num_steps": 4, "batch_sum": 10}
    )
    return RunRecord("run-1", "2026-01-01T00:00:00+00:00", outcome, 5_000_000, actors=[actor], hourly_usd=usd)


def report(*runs: RunRecord, **totals) -> RunReport:
    return build_report("job", "1a2b3c4d", runs, TOTALS | totals, 200)


def test_the_cost_of_an_hour_by_hand():
    """One hour at $1: 15 min prefill, 30 min decode, 15 min of the rest, which follows 1 : 2."""
    cost = report(run(prefill=HOUR // 4, decode=HOUR // 2, load=HOUR // 8, tail=HOUR // 8)).cost
    assert cost.total_usd == pytest.approx(1.0)
    assert cost.prompt_usd == pytest.approx(1 / 3)
    assert cost.generated_usd == pytest.approx(2 / 3)
    assert cost.per_1m_prompt_usd == pytest.approx(1 / 3 / 2)
    assert cost.per_1m_generated_usd == pytest.approx(2 / 3 * 2)
    assert cost.per_1m_blended_usd == pytest.approx(1 / 2.5)
    assert cost.per_row_usd == pytest.approx(1 / 180)


def test_each_run_has_its_own_price_and_actors_add_up():
    two_actors = replace(run(2.0, decode=HOUR), actors=run(2.0, decode=HOUR).actors * 2)
    cost = report(two_actors, run(0.5, prefill=HOUR)).cost
    assert cost.total_usd == pytest.approx(4.5)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 100), st.lists(st.integers(0, 10**13), min_size=7, max_size=7)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
)
def test_every_microsecond_and_every_dollar_once(runs, tokens_in: int, tokens_out: int):
    records = [run(usd, **dict(zip(PHASES, times, strict=True))) for usd, times in runs]
    built = report(*records, num_input_tokens=tokens_in, num_generated_tokens=tokens_out)
    assert sum(built.phases_us.values()) == built.machine_us == sum(sum(times) for _, times in runs)
    cost = built.cost
    assert cost.total_usd == pytest.approx(sum(usd * sum(times) / HOUR for usd, times in runs))
    if cost.prompt_usd is not None:
        assert cost.prompt_usd + cost.generated_usd == pytest.approx(cost.total_usd)


def test_no_price_is_null_and_said():
    built = report(run(None, decode=5))
    assert built.cost.total_usd is None
    assert built.to_json()["cost"]["per_row_usd"] is None
    assert "unpriced" in built.to_text()
    assert "$" not in built.to_text()
    assert "Unpriced" in built.to_markdown()


def test_one_unpriced_run_leaves_the_job_unpriced_unless_it_used_nothing():
    assert report(run(1.0, decode=5), run(None, decode=5)).cost.unpriced_runs == 1
    assert report(run(1.0, decode=5), run(None, decode=5)).cost.total_usd is None
    assert report(run(1.0, decode=HOUR), run(None)).cost.total_usd == pytest.approx(1.0)


def test_nothing_to_divide_by_is_not_a_price_of_zero():
    cost = allocate([run(1.0, load=HOUR)], Tokens(0, 0, 0), rows=0)
    assert cost.total_usd == pytest.approx(1.0)
    assert (cost.prompt_usd, cost.per_1m_prompt_usd, cost.per_1m_blended_usd, cost.per_row_usd) == (None,) * 4
    assert report(run(1.0, load=HOUR), rows=0, num_input_tokens=0).to_text()


def test_rows_errors_and_lost_work():
    built = report(run(outcome="killed", decode=5), run(decode=5))
    assert (built.rows.input, built.rows.written, built.rows.completed, built.rows.errors) == (
        200,
        180,
        178,
        2,
    )
    assert built.rows.errors_by_code == {"prompt_too_long": 2}
    assert built.outcome == "finished"
    assert built.work.wasted_generated_tokens == 100_000
    assert built.work.wasted_is_lower_bound
    assert built.work.mean_batch == 2.5
    assert not report(run(decode=5), run(decode=5)).work.wasted_is_lower_bound
    # the output holds more than the records know of: a killed run wrote parts after its last record
    assert report(run(decode=5)).work.wasted_generated_tokens == 0
    assert report(run(decode=5)).work.wasted_is_lower_bound


def test_a_job_without_runs():
    built = build_report("job", "00000000", [], TOTALS | {"rows": 0, "error_rows": {}}, 0)
    assert built.machine_us == 0
    assert built.cost.total_usd is None
    assert built.to_text()
    assert built.to_markdown()


def test_json_comes_back():
    built = report(run(prefill=3, decode=5), run(2.0, decode=7))
    raw = json.loads(json.dumps(built.to_json()))
    assert RunReport.from_json(raw) == built
    assert raw["rows"]["completed"] == 178
    assert raw["runs"][0]["machine_us"] == 8


def test_what_people_read():
    built = report(run(outcome="killed", prefill=HOUR // 4, decode=HOUR * 3 // 4), run(decode=HOUR))
    shown, page = built.to_text(), built.to_markdown()
    for text in (shown, page):
        assert "180 of 200: 178 completed, 2 errors" in text
        assert "2,000,000 in (500 from cache), 500,000 out" in text
        assert "prompt_too_long" in text
        assert "87.5 %" in text
        assert "█" * 26 in text
        assert "killed" in text
    assert "| **all** | machine time of all actors | 2 h 00 m |" in page
    assert built.cost.method in page
    assert all(len(line) <= 100 for line in shown.splitlines()), "fits a terminal"


def test_a_job_name_cannot_break_the_page():
    built = replace(report(run()), job="a|b\n# c")
    assert built.to_markdown().splitlines()[0] == "# a\\|b # c"


def test_number_formats():
    assert [seconds(us) for us in (0, 850_000, 12_340_000, 99_960_000, 245_000_000, 7_620_000_000)] == [
        "0 ms", "850 ms", "12.3 s", "1 m 40 s", "4 m 05 s", "2 h 07 m",
    ]  # fmt: skip
    assert [money(usd) for usd in (None, 0.0, 1234.5, 0.1, 0.0000292, 1.5e-12)] == [
        "unpriced", "$0.00", "$1,234.50", "$0.10", "$0.0000292", "$0.00000000000150",
    ]  # fmt: skip
    assert (bar(0.0004), bar(0.0006), bar(1)) == ("", "█", "█" * 30)
