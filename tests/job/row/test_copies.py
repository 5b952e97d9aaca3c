"""Equal greedy rows of a unit: computed once, delivered each, and accounted for once."""

from collections import Counter

import pytest

from pipeline.data.output.parts import PartStore
from pipeline.data.prompts import PromptSpec
from pipeline.data.row_adapters import RowAdapters
from pipeline.data.row_texts import RowTexts
from pipeline.data.units import UnitSpec
from pipeline.engine.completion import Completion
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import RowError
from pipeline.job.actor.copies import first_equal_rows
from pipeline.job.actor.worker import Worker
from pipeline.job.output.audit import audit
from pipeline.job.planning.actor_specs import flow_spec
from pipeline.job.planning.plan import make_plan
from pipeline.job.process.supervisor import Supervisor
from pipeline.job.running.sample import read_sample
from pipeline.machine.host import now_us
from pipeline.report.render import text
from tests.job.actor.test_units import complete, tokenizing, unit_of
from tests.job.conftest import FAKES, run, runs, stop_in_a_unit

pytestmark = pytest.mark.usefixtures("without_ray")
REPEATED: list[str | None] = ["a b", "c", "a b", None, "a b", "d", "c", "e"]  # 4 different prompts, 3 copies


def by_text(job, texts: list[str | None]) -> dict[str, list[dict]]:
    """Return the completed rows of each text. Each input row is in the output once."""
    rows = sorted(job.table().to_pylist(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(len(texts)))
    found: dict[str, list[dict]] = {}
    for row, prompt in zip(rows, texts, strict=True):
        if prompt is None:
            assert row["error"] == "null_prompt"
        else:
            found.setdefault(prompt, []).append(row)
    return found


def test_equal_rows_are_computed_once_and_counts_and_cost_balance(job):
    report, _ = run(job.rows(REPEATED), cost={"hourly_usd": 3.6})
    rows = by_text(job, REPEATED)
    for prompt, some in rows.items():
        assert len({row["generated_text"] for row in some}) == 1
        assert Counter(row["num_cached_tokens"] for row in some) == Counter(
            [0, *[len(f"Say {prompt}")] * (len(some) - 1)]
        )
    copied = sum(some[0]["num_generated_tokens"] * (len(some) - 1) for some in rows.values())
    (record,) = runs(job)
    stats, (actor,) = record["row_stats"], record["actors"]
    assert stats["copied"] == {"rows": 3, "generated_tokens": copied}
    assert (report.rows.copied, report.tokens.copied) == (3, copied)
    assert actor["stats"]["prompt_tokens"] == sum(len(f"Say {prompt}") for prompt in rows) == report.tokens.computed
    assert actor["stats"]["generated_tokens"] == report.tokens.decoded == report.tokens.generated - copied
    assert actor["delivered_tokens"] == {"prompt": report.tokens.computed, "generated": report.tokens.decoded}
    work = report.work
    assert (work.wasted_generated_tokens, work.wasted_prompt_tokens, work.unrecorded_tokens) == (0, 0, 0)
    assert report.latency["row_us"].rows == 4
    cost = report.cost
    assert cost.per_1m_generated_usd == pytest.approx((cost.generated_usd or 0) * 1e6 / report.tokens.decoded)
    assert f"3 rows equal to computed ones, with {copied:,} of the tokens out" in text(report)
    assert audit(PartStore(str(job.output)), deep=True, log=lambda _: None).sound


@pytest.mark.parametrize("sections", [{"run": {"copy_equal_rows": False}}, {"sampling": {"temperature": 0.5}}])
def test_rows_that_are_sampled_or_must_not_be_copied_are_each_computed(job, sections):
    report, _ = run(job.rows(REPEATED), **sections)
    job.check(REPEATED)  # the fake answers by each row's seed
    assert report.rows.copied == 0
    assert report.work.computed_generated_tokens == report.tokens.generated


SPEC = {
    "params": UnitSpec(PromptSpec(column="p"), sampling_columns={"max_tokens": "x"}),
    "adapter": UnitSpec(PromptSpec(column="p"), adapters=RowAdapters(("a", "b"), "x")),
    "labels": UnitSpec(PromptSpec(column="p"), texts=RowTexts("task.labels", labels="x")),
}


@pytest.mark.parametrize(
    ("spec", "values"),
    [("params", [4, 5, 4, 5]), ("adapter", ["a", "b", "a", None]), ("labels", [["y"], ["n"], ["y"], ["y", "n"]])],
)
def test_rows_with_other_parameters_adapters_or_texts_stay_apart(spec, values):
    unit = unit_of({"p": ["same"] * 4, "x": values}, SPEC[spec])
    requests, failed = tokenizing()(unit)
    assert not failed
    row_of = unit.own("source_row").to_pylist()
    found = {frozenset((row_of[row], row_of[first])) for row, first in first_equal_rows(unit, requests, {}).items()}
    assert found == {frozenset((a, b)) for a in range(4) for b in range(a) if values[a] == values[b]}


def test_servers_decide_by_the_temperature_that_is_sent():
    unit = unit_of({"p": ["same"] * 2})
    for temperature, extra_body, num_copies in (
        (0.0, {}, 1),
        (0.5, {}, 0),
        (0.0, {"temperature": 0.5}, 0),
        (0.0, {"temperature": None}, 0),  # the field is removed
        (0.5, {"temperature": 0}, 1),
    ):
        requests, _ = tokenizing(params=SamplingParams(temperature=temperature))(unit)
        assert len(first_equal_rows(unit, requests, extra_body)) == num_copies


def test_rows_of_a_quality_watch_are_computed_themselves():
    unit = unit_of({"p": ["same"] * 40})
    requests, _ = tokenizing(quality_sample=0.5)(unit)
    compared = {request.row_id for request in requests if request.quality is not None}
    first = first_equal_rows(unit, requests, {})
    assert 0 < len(compared) < 40
    assert len(first) == 40 - len(compared) - 1
    assert not compared & {*first, *first.values()}


def test_a_stopped_unit_keeps_what_was_computed_and_the_next_run_copies_it(job):
    texts: list[str | None] = [f"text {i % 8}" for i in range(16)]
    job.fake(step_s=0.1, max_num_seqs=2).rows(texts)
    kept = stop_in_a_unit(job)
    report, _ = run(job, output={"rows_per_file": 16})
    assert len(kept) < 8
    assert report.work.resumed_rows == len(kept)
    rows = by_text(job, texts)
    assert all(first["generated_text"] == second["generated_text"] for first, second in rows.values())
    assert report.rows.copied == 8
    lost = report.work.wasted_generated_tokens
    assert report.work.computed_generated_tokens == report.tokens.decoded + lost
    assert report.work.unrecorded_tokens == 0


def test_a_sample_shows_copies_and_the_full_run_reuses_the_row(job):
    job.rows(["same"] * 6)
    run(job, sample=6)
    shown = list(read_sample(PartStore(str(job.output)), runs(job)[-1]["run_id"]))
    assert len({str(row.text) for row in shown}) == 1 < len(shown)
    report, _ = run(job)
    assert (report.work.resumed_rows, report.rows.copied) == (1, 5)
    assert report.work.computed_generated_tokens == report.tokens.decoded


def test_the_remaining_time_is_that_of_the_tokens_left_to_compute(job, one_unit_in_flight):
    """Three units of eight equal rows each: at most two of three computed rows are left."""
    texts: list[str | None] = [f"text {i // 8}" for i in range(24)]
    report, statuses = run(job.fake(step_s=0.3).rows(texts), run={"window_rows": 24})
    left = [s.eta_s * (s.input_tokens_per_s + s.generated_tokens_per_s) for s in statuses if s.eta_s is not None]
    assert report.rows.copied == 21
    assert left
    assert max(left) < report.tokens.computed + report.tokens.decoded


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("error", [RowError.ENGINE_FAILURE, RowError.PROMPT_TOO_LONG])
def test_an_error_of_the_first_row_is_not_copied(job, monkeypatch, error, drained):
    batches: list[list[int]] = []

    def generate(self, requests):
        batches.append([request.row_id for request in requests])
        if len(batches) > 1:
            return [] if drained else complete(requests)
        first, *others = complete(requests)
        return [Completion(first.row_id, [], "", "error", 4, error=error), *others]

    monkeypatch.setattr(Supervisor, "generate", generate)
    PartStore(str(job.output)).folder.probe()
    worker = Worker(flow_spec(make_plan(job.rows(["x"]).config(), "cpu"), (), FAKES, "0001-run").work, 0, now_us())
    try:
        summary = worker.process(unit_of({"p": ["same", "same", "same", "other", "other"]}).to_bytes())
    finally:
        worker.close()
    assert [len(rows) for rows in batches] == [2, 2]
    if drained:
        assert summary is None
        return
    assert summary is not None
    assert dict(summary.totals.error_rows) == {str(error): 1}
    assert summary.row_stats.copied.rows == 1
