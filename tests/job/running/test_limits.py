"""cost.budget_usd and run.max_runtime: a run ends itself inside them, and the next one does the rest."""

import math

import pytest

from pipeline.config.sections.limits import CostSection, TokenPricesSection
from pipeline.config.sections.run import RunSection
from pipeline.errors import LimitReached
from pipeline.job.running.limits import BUDGET, MAX_RUNTIME, Limit, RunLimits, must_drain
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.report.record.run_record import ActorRecord, RunRecord, no_phases
from tests.job.conftest import TEXTS, Started, run, runs

A_SECOND = 3600.0  # an hour's price at which a machine second costs one dollar
SLOW = {"step_s": 0.1, "max_num_seqs": 2}


@pytest.fixture
def soon(without_ray, monkeypatch):
    """Shorten the time that a fake job reserves for its end."""
    for module in ("limits", "driver"):
        monkeypatch.setattr(f"pipeline.job.running.{module}.RESERVE_S", 1.0)


def state(actor=0, open_units=0, decode_us=0, **record) -> ActorState:
    return ActorState(ActorRecord(actor, no_phases() | {"decode": decode_us}, units_in_progress=open_units, **record))


def driver_log(job, number=-1):
    return job.output / "_pipeline" / "logs" / runs(job)[number]["run_id"] / "driver.log"


@pytest.mark.usefixtures("one_unit_in_flight")
def test_a_run_ends_inside_its_budget_and_a_higher_one_finishes_it_with_each_row_once(job, soon):
    job.fake(**SLOW).rows(TEXTS)
    price = {"hourly_usd": A_SECOND}
    with pytest.raises(LimitReached, match=r"cost.budget_usd reached: another unit would have exceeded it") as error:
        run(job, cost=price | {"budget_usd": 6.0})
    assert error.value.exit_code == 75
    first = runs(job)[0]
    assert (first["outcome"], first["stopped_by"]) == ("interrupted", BUDGET)
    spent = sum(sum(actor["phases_us"].values()) for actor in first["actors"]) / 1e6
    assert 2.0 < spent <= 6.0
    assert 0 < first["rows_written"] < len(TEXTS)
    assert "draining: cost.budget_usd, " in driver_log(job).read_text()
    report, _ = run(job, cost=price | {"budget_usd": 100.0})
    job.check(TEXTS)
    assert report.outcome == "finished"
    assert report.cost.total_usd <= 100.0
    assert runs(job)[1]["stopped_by"] == ""


@pytest.mark.usefixtures("one_unit_in_flight")
def test_the_cost_of_earlier_runs_counts_so_that_a_scheduler_cannot_spend_it_again(job, soon):
    job.fake(**SLOW).rows(TEXTS)
    cost = {"hourly_usd": A_SECOND, "budget_usd": 4.0}
    with pytest.raises(LimitReached):
        run(job, cost=cost)
    started = Started.count
    with pytest.raises(LimitReached, match="rest does not cover the start"):
        run(job, cost=cost | {"budget_usd": 2.0})
    assert Started.count == started
    assert len(runs(job)) == 1
    run(job)  # without a budget
    job.check(TEXTS)
    run(job, cost=cost | {"budget_usd": 2.0})  # nothing is left to pay for


@pytest.mark.usefixtures("one_unit_in_flight")
def test_a_run_ends_inside_its_time(job, soon):
    job.fake(**SLOW).rows(TEXTS)
    with pytest.raises(LimitReached, match=r"run.max_runtime reached: another unit.*The next run continues"):
        run(job, run={"max_runtime": "5 s"})
    assert runs(job)[0]["wall_us"] < 5e6
    assert runs(job)[0]["stopped_by"] == MAX_RUNTIME
    run(job)
    job.check(TEXTS)


def test_a_unit_that_takes_longer_than_expected_is_interrupted_and_its_rows_are_kept(job, soon, monkeypatch):
    """The time is up when some rows have finished, however slow the machine is."""
    nearest, finished = RunLimits.nearest, []
    monkeypatch.setattr(RunLimits, "nearest", lambda *given: nearest(*given[:2], 59.0 if any(finished) else 0.0))
    texts = TEXTS[:8]
    job.fake(step_s=0.5, max_num_seqs=2).rows(texts)
    with pytest.raises(LimitReached, match=r"0 of 8 rows written.* Raise it if the next run ends before any unit too"):
        run(
            job,
            show=lambda status: finished.append(status.rows_done),
            run={"max_runtime": "1 min", "window_rows": 50},
            output={"rows_per_file": 50},
        )
    assert runs(job)[0]["rows_written"] == 0
    report, _ = run(job, run={"window_rows": 50}, output={"rows_per_file": 50})
    job.check(texts)
    assert report.work.resumed_rows > 0


def test_a_budget_counts_every_actor_and_the_runs_before():
    cost, section = CostSection(hourly_usd=A_SECOND, budget_usd=100.0), RunSection(actors=2)
    earlier = [
        RunRecord("1", "", actors=[ActorRecord(0, no_phases() | {"load": 2_000_000}, {"num_steps": 1})], hourly_usd=1.0)
    ]
    limit = RunLimits(cost, section, earlier).nearest([state(0, decode_us=10**7), state(1, decode_us=2 * 10**7)], 15.0)
    assert (limit.key, limit.left_s) == (BUDGET, pytest.approx((100 - 30) / 2, abs=0.01))
    lost = [state(0, decode_us=10**7, node_lost=True), state(1, decode_us=2 * 10**7)]
    assert RunLimits(cost, section, ()).nearest(lost, 15.0).left_s == pytest.approx(70)
    with pytest.raises(LimitReached):  # two engines take two seconds each to load, and three dollars are left
        RunLimits(CostSection(hourly_usd=A_SECOND, budget_usd=3.0), section, earlier)


HOSTED = {"input": 1.0, "output": 4.0}


def hosted(actor=0, open_units=1, needed_usd=0.0, **tokens) -> ActorState:
    return state(actor, open_units, stats={**tokens, "needed_nanousd": int(needed_usd * 1e9)})


def hosted_limits(budget_usd=100.0, earlier=(), **cost) -> RunLimits:
    prices = TokenPricesSection(**HOSTED)
    return RunLimits(CostSection(usd_per_million=prices, budget_usd=budget_usd, **cost), RunSection(), earlier)


def test_a_budget_counts_a_servers_tokens_and_requests_of_unknown_usage_at_their_bound():
    used = hosted(prompt_tokens=2_000_000, generated_tokens=2_000_000, unmetered_generated_tokens=250_000)
    limit = hosted_limits().nearest([used], 10.0)
    assert (limit.key, limit.left_s, limit.share) == (BUDGET, math.inf, pytest.approx(0.11))
    killed = hosted(prompt_tokens=2_000_000, open_prompt_tokens=1_000_000)
    earlier = [RunRecord("1", "", actors=[killed.record], usd_per_million=CostSection(
        usd_per_million=TokenPricesSection(**HOSTED)).prices.usd_per_million)]  # fmt: skip
    assert hosted_limits(earlier=earlier).nearest([used], 10.0).share == pytest.approx(0.14)


def test_one_engine_is_granted_what_the_budget_leaves():
    limits = hosted_limits(hourly_usd=A_SECOND)
    assert limits.grants([hosted()]) == {0: pytest.approx(100)}
    assert limits.grants([state(0, 1, decode_us=10**7)]) == {0: pytest.approx(100)}  # a grant never falls
    own = CostSection(budget_usd=5.0, hourly_usd=1.0)
    assert RunLimits(own, RunSection(), ()).grants([hosted()]) is None
    assert RunLimits(CostSection(usd_per_million=TokenPricesSection(**HOSTED)), RunSection(), ()).grants([]) is None


def test_grants_of_several_engines_never_exceed_the_budget_and_strand_little():
    """Three engines spend at different rates up to their grants; the second dies in the middle."""
    limits, spent, dead = hosted_limits(budget_usd=1.0), [0, 0, 0], False
    for tick in range(4000):
        granted = limits.grants([]) or {}
        actors = []
        for number, rate in enumerate((5000, 2000, 300)):
            lost = dead and number == 1
            room = int((granted.get(number, 0.0) - spent[number] / 1e6) * 1e6)
            step = 0 if lost else min(rate, max(0, room) // 10 * 10)  # a request takes 10 tokens
            spent[number] += step
            needed = 10e-6 if step == 0 and not lost else 0.0
            actors.append(hosted(number, 1, needed, prompt_tokens=spent[number]))
            if lost:
                actors[-1] = state(number, 0, node_lost=True, stats={"prompt_tokens": spent[number]})
        dead = dead or tick == 40
        assert sum(spent) <= 1_000_000
        limits.grants(actors)
        if limits.nearest(actors, 1.0).left_s == 0.0:
            break
    assert 990_000 <= sum(spent) <= 1_000_000
    assert tick < 3990


def test_a_run_on_a_server_ends_when_nothing_is_open_and_the_next_request_does_not_fit():
    limits = hosted_limits(budget_usd=1.0)
    limits.grants([hosted()])
    waits = hosted(needed_usd=0.2, prompt_tokens=900_000)
    assert limits.nearest([waits], 1.0).left_s == 0.0
    assert limits.nearest([hosted(needed_usd=0.05, prompt_tokens=900_000)], 1.0).left_s == math.inf
    computes = hosted(1, prompt_tokens=0)
    assert limits.nearest([waits, computes], 1.0).left_s == math.inf  # the other one has open requests
    assert limits.nearest([hosted(open_units=0)], 1.0).left_s == math.inf


def test_there_is_one_warning_when_a_large_share_of_a_limit_is_used():
    limits = RunLimits(CostSection(), RunSection(max_runtime="100 s"), ())
    assert limits.warning(limits.nearest([], 79.0)) is None
    assert "run.max_runtime: 81 s of 1 min 40 s used" in limits.warning(limits.nearest([], 81.0))
    assert limits.warning(limits.nearest([], 90.0)) is None


@pytest.mark.parametrize(
    ("left_s", "open_units", "done", "running_s", "drains"),
    [
        (100.0, 4, 0, 90.0, False),  # none has ended: it takes 90 s at least
        (92.0, 4, 0, 90.0, True),
        (43.1, 4, 10, 100.0, False),  # a unit ends every 10 s, four are open
        (42.9, 4, 10, 100.0, True),
        (3.1, 0, 0, 0.0, False),  # still loading
        (2.9, 0, 0, 0.0, True),
    ],
)
def test_no_unit_is_begun_that_would_not_end_in_time(left_s, open_units, done, running_s, drains):
    actors = [state(0, open_units=open_units - 1), state(1, open_units=1)] if open_units else []
    assert must_drain(Limit(BUDGET, "", left_s, 0.0), actors, done, running_s) is drains
