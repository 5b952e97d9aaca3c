"""Other settings of a finished job, comparison of two jobs, and the same tokens at a hosted price."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.data.output.part_totals import PartTotals
from pipeline.errors import ConfigError
from pipeline.estimate.prices import load_prices
from pipeline.estimate.what_if import parse_changes, what_if, with_quantization
from pipeline.report.build import build_report
from pipeline.report.comparison import Hosted, compare_reports
from pipeline.report.record.row_stats import LengthBucket, RowStats
from pipeline.report.record.run_record import ActorRecord, RunRecord
from pipeline.report.run_report import RunReport

EXAMPLES = Path("docs/cost.md").read_text().partition("### A worked example")[2]
EXAMPLE = EXAMPLES.rpartition("### A worked example")[2]
WORDS = {"startup": "start-up", "wasted": "wasted work", "quality": "quality watch", "idle": "idle time"}
SECONDS = {"startup": 60, "load": 120, "prefill": 1200, "decode": 3600, "wasted": 60, "quality": 5, "idle": 355}
TAIL_S = 120  # of the idle time
HALF = dict(SECONDS.items()) | {"prefill": 600, "decode": 2040}


def a_report(phases=SECONDS, hourly_usd: float | None = 2.5, **resolved) -> RunReport:
    """Return the report of the job in docs/cost.md."""
    actor = ActorRecord(0, {phase: s * 10**6 for phase, s in phases.items()}, {"num_steps": 1}, tail_us=TAIL_S * 10**6)
    stats = RowStats(lengths={512: LengthBucket(100_000, 30_000_000, 0, 6_000_000)})
    run = RunRecord("1", "", "finished", wall_us=actor.machine_us, actors=[actor], hourly_usd=hourly_usd,
                    units_written=90, row_stats=stats, resolved=resolved,
                    settings={"model": {"path": "demo:target"}})  # fmt: skip
    return build_report("x", "f" * 64, [run], PartTotals(100_000, 90, {}, 30_000_000, 0, 6_000_000), 100_000)


def replace_model(report: RunReport, path: str) -> RunReport:
    runs = tuple(replace(run, settings={"model": {"path": path}}) for run in report.runs)
    return replace(report, runs=runs)


def documented(label: str, text: str = EXAMPLE) -> float:
    (number,) = re.findall(rf"^\| {re.escape(label)} \| ([0-9.,]+)", text, re.M)
    return float(number.replace(",", ""))


def test_the_worked_example_of_a_cost_equals_the_computed_one():
    for phase, seconds in SECONDS.items():
        assert re.search(rf"\b{seconds:,} s\s+of\s+{WORDS.get(phase, phase)}\b", EXAMPLES), phase
    report = a_report()
    assert report.machine_us == documented("machine time", EXAMPLES) * 1e6
    for found, label in (
        (report.cost.total_usd, "total"),
        (report.cost.prompt_usd, "money of prompts"),
        (report.cost.per_1m_prompt_usd, "1M prompt tokens"),
        (report.cost.per_1m_generated_usd, "1M generated tokens"),
        (report.cost.per_1m_blended_usd, "1M tokens, both"),
        (report.batch_efficiency, "batch efficiency"),
    ):
        assert found == pytest.approx(documented(label, EXAMPLES), abs=5e-6), label


def test_the_worked_example_of_a_comparison_equals_the_computed_one():
    before, after = a_report(), a_report(phases=HALF)
    assert after.cost.total_usd == pytest.approx(2.25)
    assert before.cost.per_row_usd == pytest.approx(documented("cost of a row before"))
    worth = compare_reports(("a", "b"), before, after, 5e6, 1500).returns
    assert worth.before_usd == pytest.approx(documented("a month before"))
    assert worth.after_usd == pytest.approx(documented("a month after"))
    assert worth.savings_usd == pytest.approx(documented("savings a month"))
    assert worth.payback_months == pytest.approx(documented("payback"))
    assert Hosted.from_report(before, 0.15, 0.60).total_usd == pytest.approx(documented("hosted, at 0.15 and 0.60"))
    four = what_if(before, {"actors": "4"}, load_prices()).then
    assert four.wall_us / 1e6 == pytest.approx(documented("what if on 4 engines: time"), abs=0.5)
    assert four.machine_us / 1e6 == pytest.approx(documented("what if on 4 engines: machine time"), abs=2)


def test_without_a_change_the_result_is_nearly_the_same():
    found = what_if(a_report(), {"actors": "1"}, load_prices())
    assert found.then.machine_us == found.now.machine_us - 120e6  # a single engine waits for no other at the end
    assert found.now.usd == pytest.approx(3.75)
    doubled = what_if(a_report(), {"actors": "1", "price": "5"}, load_prices())
    assert doubled.then.usd == pytest.approx(2 * found.then.usd)


def test_on_a_card_the_measured_time_is_scaled_and_elsewhere_only_the_model_is_used():
    elsewhere = what_if(a_report(device="cpu"), {"hardware": "h100"}, load_prices())
    assert "by the cost model alone, without a measurement on a card" in elsewhere.then.basis
    on_l4 = a_report(device_name="NVIDIA L4")
    same, faster = (what_if(on_l4, {"hardware": card}, load_prices()).then for card in ("l4", "h100"))
    assert "1.00 times the measured time on L4, by the cost model" in same.basis
    assert same.machine_us == pytest.approx(5280e6)
    assert faster.machine_us < same.machine_us
    assert same.usd == pytest.approx(5280 / 3600 * load_prices().price_of("L4").on_demand_usd)
    packed = what_if(on_l4, {"quantization": "awq"}, load_prices()).then
    assert packed.machine_us != same.machine_us
    assert packed.usd == pytest.approx(packed.machine_us * 2.5 / 3.6e9)  # the same machine costs the same


def test_an_engine_of_several_cards_stays_one_and_pays_for_each():
    on_two = a_report(device="cuda:0", device_name="NVIDIA L4", tensor_parallel_size=2)
    same = what_if(on_two, {"hardware": "l4"}, load_prices()).then
    assert "1.00 times the measured time on L4" in same.basis
    assert same.usd == pytest.approx(2 * same.machine_us / 3.6e9 * load_prices().price_of("L4").on_demand_usd)
    one, two = (a_report(device_name="NVIDIA L4", tensor_parallel_size=size) for size in (1, 2))
    ratios = [what_if(each, {"hardware": "l40s"}, load_prices()).then.machine_us for each in (one, two)]
    assert ratios[0] != ratios[1], "exchanges do not get faster"
    processes = what_if(a_report(device="cpu", tensor_parallel_size=2), {"hardware": "l4"}, load_prices()).then
    assert processes.usd == pytest.approx(what_if(a_report(device="cpu"), {"hardware": "l4"}, load_prices()).then.usd)


def test_quantization_is_compared_with_16_bit_weights_on_a_known_card():
    on_l4 = replace_model(a_report(device_name="NVIDIA L4"), "demo:target-awq")
    (saving,) = with_quantization(on_l4).savings
    assert (saving.name, saving.basis, saving.against) == ("quantization", "modelled", "16-bit weights on L4")
    dense = what_if(on_l4, {"quantization": "none"}, load_prices()).then
    kept = on_l4.phases_us["prefill"] + on_l4.phases_us["decode"]
    ratio = dense.machine_us / what_if(on_l4, {"actors": "1"}, load_prices()).then.machine_us
    assert saving.saved_us / kept == pytest.approx(ratio - 1, abs=0.1)
    assert saving.usd == pytest.approx(saving.saved_us * 2.5 / 3.6e9)
    again = with_quantization(with_quantization(on_l4))
    assert len(again.savings) == 1
    for elsewhere in (a_report(device="cpu"), a_report(device_name="NVIDIA L4")):  # no card; no quantized weights
        assert with_quantization(elsewhere).savings == ()


@pytest.mark.parametrize(("changes", "message"), [
    ({"gpu": "h100"}, "--what-if gpu: expected one of hardware"),
    ({"actors": "0"}, "--what-if actors=0: expected a whole number"),
    ({"price": "-1"}, "--what-if price=-1: expected US dollars"),
    ({"hardware": "h1000"}, "no such card"),
    ({"hardware": "h100", "quantization": "q4"}, "quantization=q4: expected one of awq"),
    ({"hardware": "a100", "quantization": "fp8"}, "has no fp8 products"),
    ({"quantization": "awq"}, "ran on none; add hardware=CARD"),
])  # fmt: skip
def test_unanswerable_changes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        what_if(a_report(device="cpu"), changes, load_prices())


def test_a_job_that_computed_nothing_has_no_what_if():
    empty = build_report("x", "f" * 64, [], PartTotals(), 0)
    with pytest.raises(ConfigError, match="no run of this job"):
        what_if(empty, {"actors": "2"}, load_prices())


def test_changes_are_parsed():
    assert parse_changes(["hardware=h100,actors=4", "price=2"]) == {"hardware": "h100", "actors": "4", "price": "2"}
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        parse_changes(["h100"])


def test_a_change_for_the_worse_is_never_paid_back_and_an_unpriced_job_has_no_return():
    worth = compare_reports(("a", "b"), a_report(phases=HALF), a_report(), 5e6, 10).returns
    assert worth.payback_months is None
    assert "$75.00 more per month" in worth.to_text()
    with pytest.raises(ConfigError, match="b has no cost per row"):
        compare_reports(("a", "b"), a_report(), a_report(hourly_usd=None), 5e6)
    assert compare_reports(("a", "b"), a_report(), a_report(hourly_usd=None)).returns is None


def test_every_figure_of_two_reports_is_compared():
    figures = {figure.what: figure for figure in compare_reports(("a", "b"), a_report(), a_report(phases=HALF)).figures}
    assert figures["machine time"].ratio == pytest.approx(3240 / 5400)
    assert figures["cost"].ratio == pytest.approx(0.6)
    assert figures["error rows"].ratio is None
    assert replace(a_report(), machine_us=0).batch_efficiency == 0


@pytest.fixture
def output(tmp_path) -> Path:
    folder = tmp_path / "out" / "_pipeline"
    (folder / "runs").mkdir(parents=True)
    report = a_report()
    (folder / "runs" / "1.json").write_text(json.dumps(report.runs[0].to_json()))
    (folder / "report.json").write_text(json.dumps(report.to_json()))
    return tmp_path / "out"


@pytest.mark.parametrize(("args", "message"), [
    (["--what-if", "actors=4"], "actors 4"),
    (["--hosted", "0.15,0.6"], "would cost $8.10; this job cost $3.75, 0.46 times that"),
    (["--html", "{}/page.html"], "Machine time by phase"),
    (["{}/out", "--rows-per-month", "1e6"], "At 1,000,000 rows per month"),
])  # fmt: skip
def test_the_command_answers(output, args, message):
    filled = [arg.format(output.parent) for arg in args]
    result = CliRunner().invoke(cli, ["report", str(output), *filled])
    assert result.exit_code == 0, result.output
    assert message in result.stdout
    as_json = CliRunner().invoke(cli, ["report", str(output), *filled, "--json"])
    assert json.loads(as_json.stdout)


@pytest.mark.parametrize(("args", "message"), [
    (["{}", "{}"], "expected one output, or two"),
    (["{}", "--html", "x.html"], "expected one output, got two"),
    (["--rows-per-month", "5"], "expected two outputs"),
    (["--hosted", "cheap"], "expected two prices"),
    (["--html", "/nowhere/x.html"], "--html /nowhere/x.html"),
])  # fmt: skip
def test_wrong_combinations_of_options_are_refused(output, args, message):
    result = CliRunner().invoke(cli, ["report", str(output), *(arg.format(output) for arg in args)])
    assert result.exit_code == 2
    assert message in result.stderr
