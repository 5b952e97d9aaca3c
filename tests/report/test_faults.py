"""Cost of faults: lost and repeated work, and its price."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.record.row_stats import Computed
from pipeline.report.record.run_record import RunRecord, no_phases
from pipeline.report.render import markdown, text
from tests.report.records import actor, ended, report


def faults(*runs: RunRecord, delivered: int) -> dict:
    return {f.kind: f for f in report(*runs, num_generated_tokens=delivered).faults}


def test_tokens_that_other_runs_delivered_do_not_hide_those_that_a_killed_run_lost():
    """The first run has 700 of its 1,000 tokens in parts, the second all of its 500: 300 are lost."""
    killed = ended("killed", actor(generated=1000, delivered_tokens=Computed(0, 700)))
    finished = ended("finished", actor(generated=500, delivered_tokens=Computed(0, 500)))
    work = report(killed, finished, num_generated_tokens=1200).work
    assert (work.wasted_generated_tokens, work.wasted_is_lower_bound, work.unrecorded_tokens) == (300, True, 0)


def test_tokens_that_a_killed_run_delivered_after_its_last_record_are_not_lost():
    killed = ended("killed", actor(generated=1000, prompt=100, delivered_tokens=Computed(40, 700)))
    finished = ended("finished", actor(generated=500, delivered_tokens=Computed(0, 500)))
    work = report(killed, finished, num_generated_tokens=1300).work
    assert work.unrecorded_tokens == 100
    assert (work.wasted_generated_tokens, work.wasted_prompt_tokens) == (200, 60 * 200 // 300)
    assert report(killed, finished, num_generated_tokens=9000).work.wasted_generated_tokens == 0


def test_the_cost_of_a_kill_is_the_lost_work_and_the_next_start():
    """The run lost 400 of 1,000 tokens (100 s of decoding), and 250 of 500 prompt tokens (10 s)."""
    killed = ended(
        "killed",
        actor(generated=1000, prompt=500, delivered_tokens=Computed(250, 600), units_in_progress=2,
              phases={"prefill": 10_000_000, "decode": 100_000_000}),
    )  # fmt: skip
    following = ended(
        "finished",
        actor(generated=400, delivered_tokens=Computed(0, 400), phases={"startup": 3_000_000, "load": 4_000_000}),
    )
    built = report(killed, following, num_generated_tokens=1000)
    (fault,) = built.faults
    assert (fault.kind, fault.count, fault.is_lower_bound) == ("run_killed", 1, True)
    assert fault.tokens == Computed(250, 400)
    assert (fault.work_us, fault.machine_us) == (45_000_000, 52_000_000)
    assert fault.usd == pytest.approx(0.052)
    assert built.work.wasted_us == 45_000_000
    assert built.work.wasted_usd == pytest.approx(0.045)
    assert built.work.units_restarted == 2


def test_rows_kept_by_a_stopped_run_are_not_lost():
    stopped = ended(
        "interrupted", actor(generated=100, prompt=50, delivered_tokens=Computed(20, 60), kept_tokens=Computed(30, 30))
    )
    following = ended(
        "finished", actor(generated=10, delivered_tokens=Computed(0, 10), resumed_rows=3, resumed_generated_tokens=30)
    )
    built = report(stopped, following, num_generated_tokens=100)
    assert (built.work.wasted_generated_tokens, built.work.wasted_prompt_tokens) == (10, 0)
    assert not built.work.wasted_is_lower_bound
    assert built.work.resumed_rows == 3
    assert built.faults[0].kind == "run_interrupted"


def test_each_fault_inside_a_run_has_its_own_figures():
    lost = actor(0, generated=100, delivered_tokens=Computed(0, 60), phases={"decode": 1000})
    replacement = actor(
        1, generated=1000, prompt=200, replaces=0, restarts=2, restart_us=50, crashed_us=30, poison_rows=1,
        restart_reasons=["signal SIGKILL", "signal SIGKILL"], delivered_tokens=Computed(150, 700),
        crashed_tokens=Computed(50, 200), duplicate_tokens=Computed(0, 100), storage_retries={"throttled": 4},
        stats={"num_preemptions": 5, "recomputed_tokens": 70, "preempted_us": 60},
        phases={"startup": 20, "load": 60, "prefill": 400, "decode": 2000, "wasted": 60 + 30},
    )  # fmt: skip
    run = ended("finished", lost, replacement, duplicate_units=1, storage_retries={"timeout": 1})
    built = report(run, num_generated_tokens=760)
    found = {f.kind: (f.count, f.tokens, f.work_us, f.machine_us) for f in built.faults}
    assert found == {
        "actor_replaced": (1, Computed(0, 40), 400, 400 + 20 + 60 - 50),
        "engine_restarted": (2, Computed(50, 200), 100 + 400 + 30, 100 + 400 + 30 + 50),
        "preempted": (5, Computed(70, 0), 60, 60),
        "duplicate_unit": (1, Computed(0, 100), 200, 200),
        "storage_retried": (5, Computed(), 0, 0),
    }
    assert built.work.wasted_generated_tokens == 40 + 200 + 100
    lost_decode_us = 400 + 400 + 200  # the lost actor, the failed rows, the unit that ran twice
    assert built.phases_us == no_phases() | {
        "startup": 20, "load": 60, "prefill": 400 - 100, "decode": 3000 - lost_decode_us,
        "wasted": 60 + 30 + 100 + lost_decode_us,
    }  # fmt: skip
    assert built.work.storage_retries == {"timeout": 1, "throttled": 4}
    assert built.work.restart_reasons == {"signal SIGKILL": 2}
    assert (built.work.actors_replaced, built.work.poison_rows) == (1, 1)
    for page in (text(built), markdown(built)):
        assert "engine restarts 2, rows that crashed an engine 1, actors replaced 1, preemptions 5" in " ".join(
            page.split()
        )
        assert "(throttled 4, timeout 1)" in page
        assert "_pipeline/logs holds the output of the engine processes" in page
        assert "unit computed twice" in page
    assert "| signal SIGKILL | 2 |" in markdown(built)


def test_parts_removed_by_hand_are_lost_work():
    first = ended("finished", actor(generated=100, delivered_tokens=Computed(0, 100), phases={"decode": 1000}))
    again = ended("finished", actor(generated=30, delivered_tokens=Computed(0, 30), phases={"decode": 300}))
    (fault,) = report(first, again, num_generated_tokens=100).faults
    assert (fault.kind, fault.tokens, fault.machine_us) == ("part_removed", Computed(0, 30), 300)
    live = replace(again, outcome="running")
    assert faults(first, live, delivered=100) == {}  # its last part is not counted yet


def test_a_live_run_has_lost_nothing_yet():
    live = ended("running", actor(generated=100, delivered_tokens=Computed(0, 40), units_in_progress=2))
    assert faults(live, delivered=40) == {}
    assert report(live).work.units_restarted == 0
    after = faults(live, ended("finished", actor()), delivered=40)
    assert after["run_killed"].tokens == Computed(0, 60)  # another run followed, so this one was killed


def test_faults_of_unpriced_runs_have_no_price():
    killed = ended("killed", actor(generated=10, phases={"decode": 5}), usd=None)
    (fault,) = report(killed).faults
    assert (fault.usd, fault.work_usd, report(killed).work.wasted_usd) == (None, None, None)


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 5), min_size=1, max_size=4), st.integers(0, 5000))
def test_lost_work_is_never_negative_nor_more_than_was_computed(actors, delivered: int):
    records = [
        actor(
            i, generated=g, delivered_tokens=Computed(0, d), kept_tokens=Computed(0, k),
            crashed_tokens=Computed(0, x), duplicate_tokens=Computed(0, o),
        )
        for i, (g, d, k, x, o) in enumerate(actors)
    ]  # fmt: skip
    for record in records:
        assert 0 <= record.open.generated <= record.computed.generated
        assert sum(record.times_of_us(Computed(10**6, 10**6))) <= record.machine_us
    built = report(ended("killed", *records), num_generated_tokens=delivered)
    assert sum(built.phases_us.values()) == built.machine_us
    assert min(built.phases_us.values()) >= 0
    known_lost = sum(r.crashed_tokens.generated + r.duplicate_tokens.generated for r in records)
    assert known_lost <= built.work.wasted_generated_tokens <= known_lost + sum(r.open.generated for r in records)
