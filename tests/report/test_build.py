"""Report of a job: phases sum exactly, every dollar is counted once, and a missing price is not zero."""

import json
from dataclasses import replace
from html import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape as html_escape

from pipeline.data.output.part_totals import PartTotals
from pipeline.report.account import Tokens, accounted, allocate
from pipeline.report.build import build_report
from pipeline.report.faults import LostWork
from pipeline.report.record.row_stats import Computed, ErrorExample, Histogram, Latency, LengthBucket, RowStats
from pipeline.report.record.run_record import PHASES, RunRecord, SkippedInput
from pipeline.report.render import html, markdown, text
from pipeline.report.run_report import ErrorCost, RunReport
from pipeline.report.sections import sections
from tests.report.records import actor, delivering, ended, report, run

HOUR = 3_600_000_000


AN_HOUR = delivering(run(prefill=HOUR // 4, decode=HOUR // 2, load=HOUR // 8, idle=HOUR // 8))


def test_the_cost_of_an_hour_by_hand():
    """One hour at $1 has 15 min of prefill, 30 min of decode, and 15 min of the rest, which divides 1 : 2."""
    cost = report(AN_HOUR, num_cached_tokens=0).cost
    assert cost.total_usd == pytest.approx(1.0)
    assert cost.prompt_usd == pytest.approx(1 / 3)
    assert cost.generated_usd == pytest.approx(2 / 3)
    assert cost.per_1m_prompt_usd == pytest.approx(1 / 3 / 2)
    assert cost.per_1m_generated_usd == pytest.approx(2 / 3 * 2)
    assert cost.per_1m_blended_usd == pytest.approx(1 / 2.5)
    assert cost.per_row_usd == pytest.approx(1 / 180)


def test_refused_or_cached_tokens_make_no_token_cheaper():
    """The same hour computes 2 million of 6 million prompt tokens, and refuses 200 million."""
    counts = {"num_input_tokens": 6_000_000, "num_cached_tokens": 4_000_000, "num_error_input_tokens": 200_000_000}
    built = report(AN_HOUR, **counts)
    assert built.cost.per_1m_prompt_usd == pytest.approx(1 / 3 / 2)
    assert built.cost.per_1m_blended_usd == pytest.approx(1 / 2.5)
    assert built.input_tokens_per_s == pytest.approx(2_000_000 / 3600)
    for page in (text(built), markdown(built)):
        words = " ".join(page.split())
        assert "6,000,000 in (2,000,000 computed, 4,000,000 from cache), 500,000 out" in words
        assert "; another 200,000,000 in prompts of error rows, not priced" in words
    raw = json.loads(json.dumps(built.to_json()))
    assert raw["tokens"]["computed"] == 2_000_000
    assert RunReport.from_json(raw) == built


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


def test_a_missing_price_is_null_and_shown_as_unpriced():
    built = report(run(None, decode=5))
    assert built.cost.total_usd is None
    assert built.to_json()["cost"]["per_row_usd"] is None
    assert "unpriced" in text(built)
    assert "$" not in text(built)
    assert "| total | unpriced |" in markdown(built)


def test_one_unpriced_run_leaves_the_job_unpriced_unless_it_used_nothing():
    assert report(run(1.0, decode=5), run(None, decode=5)).cost.unpriced_runs == 1
    assert report(run(1.0, decode=5), run(None, decode=5)).cost.total_usd is None
    assert report(run(1.0, decode=HOUR), run(None)).cost.total_usd == pytest.approx(1.0)


def test_prices_of_a_servers_tokens_are_charged_to_their_kind_and_add_to_machine_time():
    prices = {"input": 2.0, "cached_input": 0.5, "output": 10.0}
    server = actor(generated=3_000_000, prompt=1_000_000, phases={"decode": HOUR}, stats={"cached_tokens": 400_000})
    hosted = replace(ended("finished", server, usd=None), usd_per_million=prices)
    cost = report(hosted).cost
    prompt = (1_000_040 - 400_000) * 2e-6 + 400_000 * 0.5e-6
    assert (cost.prompt_usd, cost.generated_usd) == (pytest.approx(prompt), pytest.approx(30.0))
    assert cost.total_usd == pytest.approx(prompt + 30.0)
    with_machine = report(replace(hosted, hourly_usd=1.0)).cost
    assert with_machine.total_usd == pytest.approx(prompt + 31.0)
    assert sum(with_machine.phases_usd.values()) == pytest.approx(with_machine.total_usd)
    assert "server's prices for tokens" in text(report(hosted))


def test_the_maximum_cost_of_requests_of_unknown_usage_is_shown_next_to_the_cost():
    """Two answers without usage, and one request that was open when the run was killed."""
    counters = {"prompt_tokens": 10**6, "generated_tokens": 10**6, "num_requests": 9, "num_unmetered": 2,
                "unmetered_prompt_tokens": 300, "unmetered_generated_tokens": 10**6, "num_open": 1,
                "open_prompt_tokens": 100, "open_generated_tokens": 10**6}  # fmt: skip
    prices = {"input": 1.0, "cached_input": 0.5, "output": 4.0}
    hosted = replace(run(None, decode=HOUR), usd_per_million=prices, resolved={"device": "server"})
    hosted = replace(hosted, actors=[replace(hosted.actors[0], stats=counters)])
    built = report(hosted)
    assert built.cost.total_usd == pytest.approx(5.0)
    assert built.cost.unmetered_usd == pytest.approx(8.0, abs=0.001)
    words = " ".join(text(built).split())
    assert "Requests of unknown usage may have cost up to $8.00 more" in words
    assert "3 of unknown usage" in words
    assert "at most 400 prompt and 2,000,000 generated tokens" in words


def test_without_tokens_and_rows_their_price_is_null():
    runs = [run(1.0, load=HOUR)]
    cost = allocate(runs, accounted(runs, [LostWork()]), Tokens(0, 0, 0), rows=0)
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
    assert built.work.mean_batch_size == 2.5
    assert not report(delivering(run(decode=5)), delivering(run(decode=5))).work.wasted_is_lower_bound
    # the output has more than the records: a killed run wrote parts after its last record
    assert report(delivering(run(decode=5))).work.wasted_generated_tokens == 0
    assert report(delivering(run(decode=5))).work.wasted_is_lower_bound


def test_a_job_without_runs():
    built = build_report("job", "00000000", [], PartTotals(), 0)
    assert built.machine_us == 0
    assert built.cost.total_usd is None
    assert text(built)
    assert markdown(built)


def test_a_section_is_declared_once_and_shown_in_every_form():
    killed = replace(with_stats(), outcome="killed", driver_us={"planning_us": 5})
    resolved = {"device": "cpu", "max_num_seqs": 8}
    built = report(killed, replace(with_stats(), resolved=resolved), error_rows={"null_prompt": 3})
    shown, page, web = text(built), markdown(built), html(built)
    titles = [section.title for section in sections(built)]
    assert {"Summary", "Cost", "Latency per row", "Error rows", "Examples of error rows", "Runs"} <= set(titles)
    for section in sections(built):
        _, _, rest = page.partition(f"\n## {section.title}\n\n")
        table = rest.partition("\n\n")[0].splitlines()
        assert len(table) == 2 + len(section.rows)
        assert {line.replace("\\|", "").count("|") for line in table} == {1 + len(section.rows[0])}
        _, _, rest = web.partition(f"<h2>{section.title}</h2>")
        assert rest.partition("</table>")[0].count("<td") == sum(map(len, section.rows))
        assert (f"\n  {section.title}\n" in shown) is section.on_terminal
        for note in section.notes:
            assert escape(note, quote=False) in page
            assert str(html_escape(note)) in web
            assert (f"    {note}" in shown.splitlines()) is section.on_terminal


def test_data_is_escaped_in_markdown():
    evil = ErrorExample("a|b\\|[x](y)`.parquet", 1, "<img src=x>\x1b[2J\u202e\n# head")
    run_of = replace(
        run(outcome="failed"),
        row_stats=RowStats(errors={"null_prompt": (evil,)}),
        skipped_files=[SkippedInput("<b>.parquet", 1, "<i>")],
        resolved={"device": "<u>"},
        actors=[replace(actor(phases={"prefill": 5}), restart_reasons=["signal <s> [x](y)"], restarts=1)],
    )
    page = markdown(replace(report(run_of, error_rows={"null_prompt": 1}), job="a|b\n# c"))
    assert page.splitlines()[0] == "# a\\|b # c"
    for tag in ("<img", "<b>", "<i>", "<u>", "<s>", "\x1b", "\u202e", " [x](y)"):
        assert tag not in page
    row = "a\\|b\\\\\\|\\[x](y)\\`.parquet row 1 | &lt;img src=x&gt;\\\\x1b\\[2J\\\\u202e # head |"
    assert f"| null_prompt | {row}" in page


def test_a_long_message_is_wrapped_and_not_cut():
    """The end of the message names what would have fit."""
    message = "the prompt has 200032 tokens; with max_model_len = 1024 at most 1023 fit with one generated token"
    stats = RowStats(errors={"prompt_too_long": (ErrorExample("in/a-long-name.parquet", 7, message),)})
    built = report(replace(run(), row_stats=stats))
    assert message in " ".join(text(built).split())
    folded = text(built, 80)
    assert all(len(line) <= 80 for line in folded.splitlines())
    assert set(message.split()) <= set(folded.split())


# -- row statistics


def with_stats() -> RunRecord:
    stats = RowStats(
        Latency(
            Histogram.from_values([1_500] * 10), Histogram.from_values([20_000]), Histogram.from_values([4_000_000])
        ),
        {64: LengthBucket(90, 1000, 100, 300), 128: LengthBucket(80, 9000, 0, 100)},
        {"null_prompt": (ErrorExample("a|b.parquet", 7, "<b>no\nprompt"),)},
    )
    return replace(delivering(run(prefill=100, decode=300, load=1)), row_stats=stats)


def test_time_by_length_sums_to_the_machine_time():
    """100 us of prefill and 300 of decode divide 401 us 1 : 3, then by tokens 900 : 9000 and 300 : 100."""
    built = report(with_stats())
    assert sum(length.machine_us for length in built.lengths) == built.machine_us == 401
    assert [length.machine_us for length in built.lengths] == [9 + 226, 91 + 75]
    assert [length.max_prompt_tokens for length in built.lengths] == [64, 128]


def test_error_rows_cost_what_was_computed_for_them():
    """The rows cost 200 of 1,000 computed prompt tokens and 100 of 500 generated ones, and the search for the row that
    killed engines."""
    stats = RowStats(lost={"non_finite_logits": Computed(200, 100)})
    worker = actor(0, prompt=1000, generated=500, delivered_tokens=Computed(800, 400), restarts=3, restart_us=70,
                   phases={"startup": 40, "load": 60, "prefill": 500, "decode": 5000})  # fmt: skip
    record = replace(ended("finished", worker), row_stats=stats, hourly_usd=1.0)
    built = report(record, error_rows={"non_finite_logits": 2, "engine_failure": 1}, num_generated_tokens=400)
    costs = built.error_costs
    assert costs["non_finite_logits"] == ErrorCost(2, Computed(200, 100), 100 + 1000, pytest.approx(1100 / HOUR))
    assert (costs["engine_failure"].rows, costs["engine_failure"].machine_us) == (1, 70)
    assert built.phases_us["wasted"] == 1100
    assert RunReport.from_json(json.loads(json.dumps(built.to_json()))) == built


def test_latency_lengths_and_examples_of_all_runs_are_shown():
    built = report(with_stats(), with_stats(), error_rows={"null_prompt": 5})
    assert built.latency["first_token_us"].rows == 20
    assert built.lengths[0].completed == LengthBucket(180, 2000, 200, 600)
    assert [len(some) for some in built.examples.values()] == [2]
    page = markdown(built)
    assert page.count("| null_prompt | a\\|b.parquet row 7 | &lt;b&gt;no prompt |") == 2
    short = markdown(report(with_stats(), rows=400, error_rows={}))
    assert "Without 230 rows that a killed run wrote after its last record." in short
