"""The report: phases sum exactly, every dollar goes somewhere once, and no price is never zero."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.output.part_totals import PartTotals
from pipeline.report.account import Tokens, accounted, allocate
from pipeline.report.cost import ErrorCost, RunReport, build_report
from pipeline.report.figures import aligned, bar, money, seconds
from pipeline.report.record.computed import Computed
from pipeline.report.record.row_stats import ErrorExample, Histogram, Latency, LengthBucket, RowStats
from pipeline.report.record.run_record import PHASES, ActorRecord, RunRecord, SkippedInput, no_phases
from pipeline.report.render import markdown, text
from pipeline.report.sections.faults import LostTime

HOUR = 3_600_000_000
TOTALS = PartTotals(180, 3, {"prompt_too_long": 2, "null_prompt": 0}, 2_000_000, 500, 500_000)


def run(usd: float | None = 1.0, outcome="finished", **phases: int) -> RunRecord:
    actor = ActorRecord(0, no_phases() | phases, {"generated_tokens": 300_000, "num_steps": 4, "batch_sum": 10})
    return RunRecord("run-1", "2026-01-01T00:00:00+00:00", outcome, 5_000_000, actors=[actor], hourly_usd=usd)


def delivering(run: RunRecord) -> RunRecord:
    """All that its engines generated is in parts."""
    return replace(run, actors=[replace(actor, delivered=actor.computed) for actor in run.actors])


def report(*runs: RunRecord, **totals) -> RunReport:
    return build_report("job", "1a2b3c4d", runs, replace(TOTALS, **totals), 200)


AN_HOUR = delivering(run(prefill=HOUR // 4, decode=HOUR // 2, load=HOUR // 8, tail=HOUR // 8))


def test_the_cost_of_an_hour_by_hand():
    """One hour at $1: 15 min prefill, 30 min decode, 15 min of the rest, which follows 1 : 2."""
    cost = report(AN_HOUR, num_cached_tokens=0).cost
    assert cost.total_usd == pytest.approx(1.0)
    assert cost.prompt_usd == pytest.approx(1 / 3)
    assert cost.generated_usd == pytest.approx(2 / 3)
    assert cost.per_1m_prompt_usd == pytest.approx(1 / 3 / 2)
    assert cost.per_1m_generated_usd == pytest.approx(2 / 3 * 2)
    assert cost.per_1m_blended_usd == pytest.approx(1 / 2.5)
    assert cost.per_row_usd == pytest.approx(1 / 180)


def test_tokens_that_were_refused_or_cached_make_no_token_cheaper():
    """The hour again, in which 2 million of 6 million prompt tokens were computed; 200 million were refused."""
    counts = {"num_input_tokens": 6_000_000, "num_cached_tokens": 4_000_000, "num_error_input_tokens": 200_000_000}
    built = report(AN_HOUR, **counts)
    assert built.cost.per_1m_prompt_usd == pytest.approx(1 / 3 / 2)
    assert built.cost.per_1m_blended_usd == pytest.approx(1 / 2.5)
    assert built.input_tokens_per_s == pytest.approx(2_000_000 / 3600)
    for page in (text(built), markdown(built)):
        words = " ".join(page.split())
        assert "6,000,000 in (2,000,000 computed, 4,000,000 from cache), 500,000 out" in words
        assert "; 200,000,000 more in prompts of error rows, not priced" in words
    raw = json.loads(json.dumps(built.to_json()))
    assert raw["tokens"]["computed"] == 2_000_000
    assert RunReport.from_json(raw) == built


def test_each_run_has_its_own_price_and_actors_add_up():
    two_actors = replace(run(2.0, decode=HOUR), actors=run(2.0, decode=HOUR).actors * 2)
    cost = report(two_actors, run(0.5, prefill=HOUR)).cost
    assert cost.total_usd == pytest.approx(4.5)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 100), st.lists(st.integers(0, 10**13), min_size=len(PHASES), max_size=len(PHASES))),
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
    assert "unpriced" in text(built)
    assert "$" not in text(built)
    assert "Unpriced" in markdown(built)


def test_one_unpriced_run_leaves_the_job_unpriced_unless_it_used_nothing():
    assert report(run(1.0, decode=5), run(None, decode=5)).cost.unpriced_runs == 1
    assert report(run(1.0, decode=5), run(None, decode=5)).cost.total_usd is None
    assert report(run(1.0, decode=HOUR), run(None)).cost.total_usd == pytest.approx(1.0)


def test_nothing_to_divide_by_is_not_a_price_of_zero():
    runs = [run(1.0, load=HOUR)]
    cost = allocate(runs, accounted(runs, [LostTime()]), Tokens(0, 0, 0), rows=0)
    assert cost.total_usd == pytest.approx(1.0)
    assert (cost.prompt_usd, cost.per_1m_prompt_usd, cost.per_1m_blended_usd, cost.per_row_usd) == (None,) * 4
    assert text(report(run(1.0, load=HOUR), rows=0, num_input_tokens=0))


def test_rows_errors_and_lost_work():
    built = report(run(outcome="killed", decode=5), delivering(run(decode=5)))
    assert (built.rows.input, built.rows.written, built.rows.completed, built.rows.errors) == (200, 180, 178, 2)
    assert built.rows.errors_by_code == {"prompt_too_long": 2}
    assert built.outcome == "finished"
    assert built.work.wasted_generated_tokens == 100_000
    assert built.work.wasted_is_lower_bound
    assert built.work.mean_batch == 2.5
    assert not report(delivering(run(decode=5)), delivering(run(decode=5))).work.wasted_is_lower_bound
    # the output holds more than the records know of: a killed run wrote parts after its last record
    assert report(delivering(run(decode=5))).work.wasted_generated_tokens == 0
    assert report(delivering(run(decode=5))).work.wasted_is_lower_bound


def test_a_job_without_runs():
    built = build_report("job", "00000000", [], PartTotals(), 0)
    assert built.machine_us == 0
    assert built.cost.total_usd is None
    assert text(built)
    assert markdown(built)


def test_json_comes_back():
    built = report(run(prefill=3, decode=5), run(2.0, decode=7))
    raw = json.loads(json.dumps(built.to_json()))
    assert RunReport.from_json(raw) == built
    assert raw["rows"]["completed"] == 178
    assert raw["runs"][0]["machine_us"] == 8


def test_what_people_read():
    killed = delivering(run(outcome="killed", prefill=HOUR // 4, decode=HOUR * 3 // 4))
    built = report(killed, delivering(run(decode=HOUR)), num_generated_tokens=600_000)
    shown, page = text(built), markdown(built)
    for told in (shown, page):
        assert "180 of 200: 178 completed, 2 errors" in told
        assert "2,000,000 in (1,999,500 computed, 500 from cache), 600,000 out" in told
        assert "prompt_too_long" in told
        assert "87.5 %" in told
        assert "█" * 26 in told
        assert "killed" in told
    assert "| **all** | machine time of all actors | 2 h 00 m |" in page
    assert built.cost.method in page
    assert all(len(line) <= 100 for line in shown.splitlines()), "fits a terminal"


def test_a_job_name_cannot_break_the_page():
    built = replace(report(run()), job="a|b\n# c")
    assert markdown(built).splitlines()[0] == "# a\\|b # c"


def test_data_is_neither_markdown_nor_html_on_the_page():
    evil = ErrorExample("a|b\\|[x](y)`.parquet", 1, "<img src=x>\x1b[2J\u202e\n# head")
    run_of = replace(
        run(outcome="failed"),
        row_stats=RowStats(errors={"null_prompt": (evil,)}),
        skipped_files=[SkippedInput("<b>.parquet", 1, "<i>")],
        resolved={"device": "<u>"},
        actors=[replace(actor(phases={"prefill": 5}), restart_reasons=["signal <s> [x](y)"], restarts=1)],
    )
    page = markdown(report(run_of, error_rows={"null_prompt": 1}))
    for tag in ("<img", "<b>", "<i>", "<u>", "<s>", "\x1b", "\u202e", " [x](y)"):
        assert tag not in page
    assert "a\\|b\\\\\\|\\[x](y)\\`.parquet row 1: &lt;img src=x&gt;\\\\x1b\\[2J\\\\u202e # head |" in page
    assert "| prefill | reading prompts |" in page


def test_a_long_message_is_wrapped_and_not_cut():
    """It says at its end what would have fit."""
    message = "the prompt has 200032 tokens; with max_model_len = 1024 at most 1023 fit beside one generated token"
    stats = RowStats(errors={"prompt_too_long": (ErrorExample("in/a-long-name.parquet", 7, message),)})
    shown = text(report(replace(run(), row_stats=stats)))
    assert message in " ".join(shown.split())
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_columns_are_as_wide_as_they_must_be():
    rows = [["device", "memory", ""], ["L4", "24", "x"]]
    assert aligned(rows) == ["device  memory", "L4          24  x"]
    assert aligned(rows, 2) == ["device  memory", "L4      24      x"]


def test_number_formats():
    assert [seconds(us) for us in (0, 850_000, 12_340_000, 99_960_000, 245_000_000, 7_620_000_000)] == [
        "0 ms", "850 ms", "12.3 s", "1 m 40 s", "4 m 05 s", "2 h 07 m",
    ]  # fmt: skip
    assert [money(usd) for usd in (None, 0.0, 1234.5, 0.1, 0.0000292, 1.5e-12)] == [
        "unpriced", "$0.00", "$1,234.50", "$0.10", "$0.0000292", "$0.00000000000150",
    ]  # fmt: skip
    assert (bar(0.0004), bar(0.0006), bar(1)) == ("", "█", "█" * 30)


# -- lost work


def actor(number: int = 0, generated: int = 0, prompt: int = 0, **fields) -> ActorRecord:
    stats = {"generated_tokens": generated, "prompt_tokens": prompt + 40, "cached_tokens": 40, "num_preemptions": 0}
    return ActorRecord(number, no_phases() | fields.pop("phases", {}), stats | fields.pop("stats", {}), **fields)


def ended(outcome: str, *actors: ActorRecord, usd: float | None = 3.6, **fields) -> RunRecord:
    """3.6 dollars an hour are a millionth of a dollar for a millisecond."""
    return RunRecord("r", "", outcome, actors=list(actors), hourly_usd=usd, **fields)


def faults(*runs: RunRecord, delivered: int) -> dict:
    return {f.kind: f for f in report(*runs, num_generated_tokens=delivered).faults}


def test_what_a_killed_run_lost_is_not_hidden_by_what_others_delivered():
    """The first run had 700 tokens of its 1,000 in parts. The second delivered 500 and, as it wrote a part after its
    last record, 200 more that no record knows: in sum as much is delivered as was computed in both."""
    killed = ended("killed", actor(generated=1000, delivered=Computed(0, 700)))
    finished = ended("finished", actor(generated=500, delivered=Computed(0, 500)))
    work = report(killed, finished, num_generated_tokens=1200).work
    assert (work.wasted_generated_tokens, work.wasted_is_lower_bound, work.unseen_generated_tokens) == (300, True, 0)


def test_tokens_that_a_killed_run_delivered_unseen_are_not_lost():
    killed = ended("killed", actor(generated=1000, prompt=100, delivered=Computed(40, 700)))
    finished = ended("finished", actor(generated=500, delivered=Computed(0, 500)))
    work = report(killed, finished, num_generated_tokens=1300).work
    assert work.unseen_generated_tokens == 100
    assert (work.wasted_generated_tokens, work.wasted_prompt_tokens) == (200, 60 * 200 // 300)
    assert report(killed, finished, num_generated_tokens=9000).work.wasted_generated_tokens == 0


def test_the_cost_of_a_kill_is_the_lost_work_and_the_next_start():
    """Of 1,000 tokens, 100 s of decoding, 400 were lost; of 500 prompt tokens, 10 s, 250."""
    killed = ended(
        "killed",
        actor(generated=1000, prompt=500, delivered=Computed(250, 600), open_units=2,
              phases={"prefill": 10_000_000, "decode": 100_000_000}),
    )  # fmt: skip
    following = ended(
        "finished", actor(generated=400, delivered=Computed(0, 400), phases={"startup": 3_000_000, "load": 4_000_000})
    )
    built = report(killed, following, num_generated_tokens=1000)
    (fault,) = built.faults
    assert (fault.kind, fault.count, fault.at_least) == ("run_killed", 1, True)
    assert fault.tokens == Computed(250, 400)
    assert (fault.work_us, fault.machine_us) == (45_000_000, 52_000_000)
    assert fault.usd == pytest.approx(0.052)
    assert built.work.wasted_us == 45_000_000
    assert built.work.wasted_usd == pytest.approx(0.045)
    assert built.work.units_begun_again == 2


def test_rows_kept_by_a_stopped_run_are_not_lost():
    stopped = ended("interrupted", actor(generated=100, prompt=50, delivered=Computed(20, 60), kept=Computed(30, 30)))
    following = ended(
        "finished", actor(generated=10, delivered=Computed(0, 10), taken_rows=3, taken_generated_tokens=30)
    )
    built = report(stopped, following, num_generated_tokens=100)
    assert (built.work.wasted_generated_tokens, built.work.wasted_prompt_tokens) == (10, 0)
    assert not built.work.wasted_is_lower_bound
    assert built.work.taken_rows == 3
    assert built.faults[0].kind == "run_interrupted"


def test_each_fault_inside_a_run_has_its_own_figures():
    lost = actor(0, generated=100, delivered=Computed(0, 60), phases={"decode": 1000})
    replacement = actor(
        1, generated=1000, prompt=200, replaces=0, restarts=2, restart_us=50, died_us=30, convicted_rows=1,
        restart_reasons=["signal SIGKILL", "signal SIGKILL"], delivered=Computed(150, 700), died=Computed(50, 200),
        doubled=Computed(0, 100), storage_retries={"throttled": 4},
        stats={"num_preemptions": 5, "recomputed_tokens": 70},
        phases={"startup": 20, "load": 60, "prefill": 400, "decode": 2000, "preempted": 60, "retried": 30},
    )  # fmt: skip
    run = ended("finished", lost, replacement, units_lost=1, storage_retries={"timeout": 1})
    built = report(run, num_generated_tokens=760)
    found = {f.kind: (f.count, f.tokens, f.work_us, f.machine_us) for f in built.faults}
    assert found == {
        "actor_replaced": (1, Computed(0, 40), 400, 400 + 20 + 60 - 50),
        "engine_restarted": (2, Computed(50, 200), 100 + 400 + 30, 100 + 400 + 30 + 50),
        "preempted": (5, Computed(70, 0), 60, 60),
        "unit_doubled": (1, Computed(0, 100), 200, 200),
        "storage_retried": (5, Computed(), 0, 0),
    }
    assert built.work.wasted_generated_tokens == 40 + 200 + 100
    lost_decode_us = 400 + 400 + 200  # of the actor that was lost, of rows that died, of the doubled unit
    assert built.phases_us == no_phases() | {
        "startup": 20, "load": 60, "prefill": 400 - 100, "decode": 3000 - lost_decode_us, "preempted": 60,
        "retried": 30 + 100 + lost_decode_us,
    }  # fmt: skip
    assert built.work.storage_retries == {"timeout": 1, "throttled": 4}
    assert built.work.restart_reasons == {"signal SIGKILL": 2}
    assert (built.work.actors_replaced, built.work.convicted_rows) == (1, 1)
    for page in (text(built), markdown(built)):
        assert "engine restarts 2, rows that ended the engine 1, actors replaced 1, preemptions 5" in page
        assert "(throttled 4, timeout 1)" in page
        assert "_pipeline/logs has what the engines" in page
        assert "unit computed whose part was already there" in page
    assert "- 2 times: signal SIGKILL" in markdown(built)


def test_parts_removed_by_hand_are_lost_work():
    first = ended("finished", actor(generated=100, delivered=Computed(0, 100), phases={"decode": 1000}))
    again = ended("finished", actor(generated=30, delivered=Computed(0, 30), phases={"decode": 300}))
    (fault,) = report(first, again, num_generated_tokens=100).faults
    assert (fault.kind, fault.tokens, fault.machine_us) == ("part_removed", Computed(0, 30), 300)
    goes_on = replace(again, outcome="running")
    assert faults(first, goes_on, delivered=100) == {}  # its last part is not counted yet


def test_a_run_that_goes_on_has_lost_nothing_yet():
    goes_on = ended("running", actor(generated=100, delivered=Computed(0, 40), open_units=2))
    assert faults(goes_on, delivered=40) == {}
    assert report(goes_on).work.units_begun_again == 0
    after = faults(goes_on, ended("finished", actor()), delivered=40)
    assert after["run_killed"].tokens == Computed(0, 60)  # another has run since: it is gone


def test_faults_of_unpriced_runs_have_no_price():
    killed = ended("killed", actor(generated=10, phases={"decode": 5}), usd=None)
    (fault,) = report(killed).faults
    assert (fault.usd, fault.work_usd, report(killed).work.wasted_usd) == (None, None, None)


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 5), min_size=1, max_size=4), st.integers(0, 5000))
def test_lost_work_is_never_negative_nor_more_than_was_computed(actors, delivered: int):
    records = [
        actor(
            i, generated=g, delivered=Computed(0, d), kept=Computed(0, k), died=Computed(0, x), doubled=Computed(0, o)
        )
        for i, (g, d, k, x, o) in enumerate(actors)
    ]
    for record in records:
        assert 0 <= record.open.generated <= record.computed.generated
        assert record.time_of_us(Computed(10**6, 10**6)) <= record.machine_us
    built = report(ended("killed", *records), num_generated_tokens=delivered)
    assert sum(built.phases_us.values()) == built.machine_us
    assert min(built.phases_us.values()) >= 0
    known_lost = sum(r.died.generated + r.doubled.generated for r in records)
    assert known_lost <= built.work.wasted_generated_tokens <= known_lost + sum(r.open.generated for r in records)


# -- what rows were like


def with_stats() -> RunRecord:
    stats = RowStats(
        Latency(Histogram.of([1_500] * 10), Histogram.of([20_000]), Histogram.of([4_000_000])),
        {64: LengthBucket(90, 1000, 100, 300), 128: LengthBucket(80, 9000, 0, 100)},
        {"null_prompt": (ErrorExample("a|b.parquet", 7, "<b>no\nprompt"),)},
    )
    return replace(delivering(run(prefill=100, decode=300, load=1)), row_stats=stats)


def test_time_by_length_is_all_of_the_machine_time():
    """100 us of prefill and 300 of decode divide 401 us 1 : 3, then by tokens 900 : 9000 and 300 : 100."""
    built = report(with_stats())
    assert sum(length.machine_us for length in built.lengths) == built.machine_us == 401
    assert [length.machine_us for length in built.lengths] == [9 + 226, 91 + 75]
    assert [length.longest for length in built.lengths] == [64, 128]


def test_error_rows_cost_what_was_computed_for_them():
    """200 of 1,000 computed prompt tokens and 100 of 500 generated ones; finding the row that killed engines beside."""
    stats = RowStats(lost={"non_finite_logits": Computed(200, 100)})
    worker = actor(0, prompt=1000, generated=500, delivered=Computed(800, 400), restarts=3, restart_us=70,
                   phases={"startup": 40, "load": 60, "prefill": 500, "decode": 5000})  # fmt: skip
    record = replace(ended("finished", worker), row_stats=stats, hourly_usd=1.0)
    built = report(record, error_rows={"non_finite_logits": 2, "engine_failure": 1}, num_generated_tokens=400)
    costs = built.error_costs
    assert costs["non_finite_logits"] == ErrorCost(2, Computed(200, 100), 100 + 1000, pytest.approx(1100 / HOUR))
    assert (costs["engine_failure"].rows, costs["engine_failure"].machine_us) == (1, 70)
    assert built.phases_us["retried"] == 1100
    assert RunReport.from_json(json.loads(json.dumps(built.to_json()))) == built
    assert "non_finite_logits              2               300" in text(built)


def test_latency_lengths_and_examples_are_of_all_runs_and_shown():
    built = report(with_stats(), with_stats(), error_rows={"null_prompt": 5})
    assert built.latency["first_token_us"].rows == 20
    assert built.lengths[0].rows == LengthBucket(180, 2000, 200, 600)
    assert [len(some) for some in built.examples.values()] == [2]
    shown, page = text(built), markdown(built)
    assert "    to the first token      1.50 ms     1.50 ms     1.50 ms" in shown
    assert "a|b.parquet row 7: <b>no prompt" in shown
    assert "| null_prompt | 5 | 0 | 0 ms | $0.00 | a\\|b.parquet row 7: &lt;b&gt;no prompt<br>" in page
    assert "trades it for throughput" in shown
    assert "trades it for throughput" in page
    assert "| up to 64 | 180 | 2,000 | 200 | 600 |" in page
    assert all(len(line) <= 100 for line in shown.splitlines())
    short = markdown(report(with_stats(), rows=400, error_rows={}))
    assert "230 rows that a killed run wrote after its last record are not among them." in short


def test_reports_of_earlier_versions_are_read():
    raw = json.loads(json.dumps(report(with_stats()).to_json()))
    for key in ("latency", "lengths", "examples", "faults"):
        del raw[key]
    for key in list(raw["work"])[11:]:
        del raw["work"][key]
    del raw["tokens"]["error_input"], raw["tokens"]["computed"]
    old = RunReport.from_json(raw)
    assert (old.latency, old.lengths, old.faults) == ({}, (), ())
    assert text(old)
    assert markdown(old)
