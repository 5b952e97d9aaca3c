"""Phases: no gap, no overlap, exact sums; and the registry that extends them to the run's end."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.job.actor.actor_registry import MAX_REPLACED, ActorRegistry, Order, Placement
from pipeline.job.process.timeline import Timeline
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.report.record.run_record import ActorRecord, no_phases

STATS = {"prefill_us": 0, "decode_us": 0}


def stats(prefill: int, decode: int, **others: int) -> dict[str, int]:
    return {"prefill_us": prefill, "decode_us": decode} | others


def test_a_plain_life():
    timeline = Timeline(100)
    timeline.enter("load", 150)
    timeline.enter(None, 250)
    timeline.progress(300, 0, 50, STATS)  # waiting for the first unit
    timeline.progress(500, 150, 0, stats(30, 120))
    timeline.progress(600, 150, 100, stats(30, 120))  # a tail, unless work resumes
    assert timeline.phases(600) == no_phases() | {
        "startup": 50, "load": 100, "prefill": 30, "decode": 120, "idle": 200,
    }  # fmt: skip
    assert timeline.tail_us == 100
    timeline.progress(700, 200, 0, stats(30, 170))
    assert timeline.phases(700)["idle"] == 100 + 100 + 50
    assert timeline.tail_us == 0


def test_time_that_the_engine_did_not_count_is_divided_like_its_work():
    timeline = Timeline(0)
    timeline.enter(None, 0)
    timeline.progress(1000, 1000, 0, stats(300, 600))
    assert {k: v for k, v in timeline.phases(1000).items() if v} == {"prefill": 333, "decode": 667}
    timeline.progress(1100, 1100, 0, stats(300, 600))
    assert timeline.phases(1100)["decode"] == 767


def test_work_lost_with_a_process_is_wasted_and_a_new_one_starts_up():
    timeline = Timeline(0)
    timeline.enter(None, 10)
    timeline.progress(20, 10, 0, stats(0, 10))
    timeline.lost(50, had_rows=True)
    timeline.enter("load", 60)
    timeline.enter(None, 80)
    timeline.progress(90, 10, 0, stats(0, 10))  # counts from zero again
    assert timeline.phases(90) == no_phases() | {"startup": 20, "load": 20, "decode": 20, "wasted": 30}
    assert (timeline.crashed_us, timeline.restart_us(90)) == (30, 30)
    timeline.lost(95, had_rows=False)
    assert (timeline.crashed_us, timeline.restart_us(100)) == (30, 35)


def test_a_step_is_divided_among_all_kinds_of_its_work():
    timeline = Timeline(0)
    timeline.enter(None, 0)
    timeline.progress(100, 100, 0, stats(10, 40, drafts_us=20, preempted_us=20, retried_us=3, quality_us=7))
    assert timeline.phases(100) == no_phases() | {
        "prefill": 10, "decode": 40, "wasted": 43, "quality": 7,
    }  # fmt: skip


def test_an_open_phase_reaches_up_to_now():
    timeline = Timeline(0)
    assert timeline.phases(30)["startup"] == 30
    timeline.enter("load", 40)
    assert timeline.phases(90) == {**no_phases(), "startup": 40, "load": 50}
    assert timeline.at_rest == "load"


EVENTS = st.lists(st.tuples(st.sampled_from(["progress", "idle", "lost", "load", "ready"]), st.integers(0, 1000)))


@settings(deadline=None, max_examples=50)
@given(EVENTS)
def test_phases_always_sum_to_the_time(events):
    now, busy, work = 5, 0, [0, 0, 0, 0, 0]
    timeline = Timeline(now)
    up = False
    for kind, us in events:
        now += us
        if kind == "ready":
            timeline.enter(None, now)
            up, busy, work = True, 0, [0, 0, 0, 0, 0]
        elif kind == "load":
            timeline.enter("load", now)
            up = False
        elif kind == "lost":
            timeline.lost(now, had_rows=us % 2 == 0)
            up = False
        elif up:
            part = us // 2 if kind == "progress" else 0
            busy += part
            work = [each + part // (3 + i) for i, each in enumerate(work)]
            others = dict(zip(("drafts_us", "preempted_us", "retried_us"), work[2:]))
            timeline.progress(now, busy, us - part, stats(*work[:2], **others))
        phases = timeline.phases(now)
        assert sum(phases.values()) == now - 5
        assert min(phases.values()) >= 0
        assert 0 <= timeline.tail_us <= phases["idle"]


@pytest.fixture
def clock(monkeypatch) -> list[int]:
    """Time of the registry in microseconds, as a list of one number."""
    now = [0]
    monkeypatch.setattr("pipeline.job.actor.actor_registry.now_us", lambda: now[0])
    return now


def begun(actors: int, max_actors: int | None = None, run_us: int = 0, **options) -> ActorRegistry:
    registry = ActorRegistry(actors, max_actors, **options)
    registry.begin(run_us)
    return registry


def state(actor: int, us: int, at_rest: str = "idle") -> ActorState:
    return ActorState(ActorRecord(actor, {**no_phases(), "decode": us}), at_rest=at_rest)


def test_the_registry_gives_each_actor_its_time_from_the_runs_start_to_its_end(clock):
    clock[0] = 1_000_000_000
    registry = ActorRegistry(actors=2)
    assert registry.register(b"") is None
    registry.begin(run_us=3_000_000)
    assert registry.register(b"a") == (0, 3_000_000, False)
    clock[0] += 500_000
    assert registry.register(b"b") == (1, 3_500_000, False)
    assert not registry.report(replace(state(0, 3_000_000), report_number=2))[0]
    assert not registry.report(state(1, 3_400_000, at_rest="load"))[0]
    clock[0] += 500_000
    ends = registry.states(end=True)
    assert [s.record.machine_us for s in ends] == [4_000_000, 4_000_000]
    assert (ends[0].record.phases_us["idle"], ends[1].record.phases_us["load"]) == (1_000_000, 600_000)
    assert [s.record.tail_us for s in ends] == [1_000_000, 0]
    registry.report(replace(state(0, 2_000_000), report_number=1))  # a late report changes nothing
    assert registry.states()[0].record.machine_us == 3_000_000
    registry.give(Order.ADMIT_NO_MORE)
    registry.grant({0: 2.5})
    assert registry.report(state(0, 3_000_000)) == (Order.ADMIT_NO_MORE, 2.5)
    assert registry.actors() == [b"a", b"b"]


def test_a_replacement_takes_over_where_its_predecessor_was_last_heard(clock):
    registry = begun(2)
    registry.register(b"a")
    registry.register(b"b")
    clock[0] = 10_000_000
    registry.report(state(0, 10_000_000))
    clock[0] = 14_000_000
    registry.report(state(1, 14_000_000))
    clock[0] = 15_000_000
    assert registry.register(b"c") == (2, 5_000_000, False)
    registry.report(state(2, 5_000_000))
    clock[0] = 20_000_000
    ends = registry.states(end=True)
    assert [s.record.machine_us for s in ends] == [10_000_000, 20_000_000, 10_000_000]
    assert [s.record.replaces for s in ends] == [None, None, 0]


def test_on_another_machine_a_replacement_begins_with_its_own_process(clock):
    registry = begun(1)
    registry.register(b"a", Placement("host", "one", 1_000_000))
    clock[0] = 10_000_000
    registry.report(state(0, 10_000_000))
    clock[0] = 60_000_000
    assert registry.register(b"b", Placement("host", "two", 4_000_000)) == (1, 4_000_000, False)
    clock[0] = 90_000_000
    registry.report(state(1, 34_000_000))
    clock[0] = 95_000_000
    assert registry.register(b"c", Placement("host", "three", 9_000_000)) == (2, 5_000_000, False), "none held both"
    clock[0] = 100_000_000
    ends = registry.states(end=True, lost_nodes={"two", "three"})
    assert [s.record.machine_us for s in ends] == [10_000_000, 34_000_000, 5_000_000]
    assert [s.record.node_lost for s in ends] == [False, True, True]
    assert [(s.record.host, s.record.node_id) for s in ends] == [("host", "one"), ("host", "two"), ("host", "three")]
    assert [s.record.machine_us for s in registry.states(end=True, lost_nodes={"two"})][2] == 10_000_000


def test_machines_may_come_and_go_without_limit(clock):
    registry = begun(1)
    for number in range(20):
        assert registry.register(b"", Placement("host", str(number))) == (number, 0, False)
        clock[0] += 10_000_000
    entries = [registry.register(b"", Placement("host", "19")) for _ in range(1 + MAX_REPLACED)]
    assert [entry[2] for entry in entries if entry] == [False] * MAX_REPLACED + [True]


def test_of_an_elastic_pool_time_begins_with_a_process_and_ends_when_it_is_given_back(clock):
    registry = begun(1, 3)
    assert registry.register(b"a", Placement("host", "one", 1_000_000)) == (0, 0, False)
    clock[0] = 1_500_000
    assert registry.register(b"b", Placement("host", "two", 1_000_000)) == (1, 1_000_000, False)
    clock[0] = 20_000_000
    registry.report(state(1, 19_500_000))
    clock[0] = 24_000_000
    registry.report(state(0, 24_000_000))
    assert not any(s.record.released for s in registry.states())
    clock[0] = 26_000_000
    ends = registry.states(end=True)
    assert [s.record.released for s in ends] == [False, True]
    assert [s.record.started_us for s in ends] == [0, 500_000]
    assert [s.record.machine_us for s in ends] == [26_000_000, 19_500_000]


def test_actors_that_have_reported_nothing_are_starting_up(clock):
    """Otherwise a run that is killed while its engines load would seem to have used no machine."""
    registry = begun(2, run_us=5_000_000)
    assert [s.record.phases_us["startup"] for s in registry.states()] == [5_000_000, 5_000_000]
    assert registry.states(end=True) == []  # none has started: no machine was held
    registry.register(b"a")
    clock[0] = 2_000_000
    assert [s.record.phases_us["startup"] for s in registry.states()] == [7_000_000, 7_000_000]
    assert [s.record.machine_us for s in registry.states(end=True)] == [7_000_000]
    clock[0] = 9_000_000
    registry.register(b"b")  # replaces the first, which is silent
    clock[0] = 10_000_000
    assert [s.record.machine_us for s in registry.states(end=True)] == [5_000_000, 10_000_000]


def test_of_two_states_of_an_actor_the_later_one_counts_whichever_arrives_last(clock):
    """Two of its threads report at once, each after the unit that it has just written."""
    registry = begun(1)
    registry.register(b"")
    registry.report(ActorState(ActorRecord(0, units=18), report_number=6))
    registry.report(ActorState(ActorRecord(0, units=17), report_number=5))
    assert registry.states()[0].record.units == 18


def test_an_actor_whose_machine_is_drained_leaves_and_is_not_paid_for_after_that(clock):
    registry = begun(1, drain_s=30.0)
    number, _, _ = registry.register(b"a", Placement("host", "node-a"))

    def report(report_number, open_units):
        record = ActorRecord(number, {**no_phases(), "decode": clock[0]}, units_in_progress=open_units)
        return registry.report(ActorState(record, report_number=report_number))[0]

    assert report(1, 2) == Order.CONTINUE
    registry.drain({"node-a"})
    assert report(2, 2) == Order.ADMIT_NO_MORE
    clock[0] = 31_000_000
    assert report(3, 1) == Order.LEAVE  # the time is over
    registry.drain({"node-b"})  # it was called off
    assert report(4, 1) == Order.CONTINUE
    registry.drain({"node-a"})
    assert report(5, 0) == Order.LEAVE  # there is nothing left to do
    clock[0] = 31_500_000
    assert registry.register(b"b", Placement("host", "node-b", 100_000))[:2] == (1, 100_000)
    clock[0] = 60_000_000
    left, joined = registry.states(end=True)
    assert (left.record.machine_us, joined.record.replaces) == (31_000_000, number)
