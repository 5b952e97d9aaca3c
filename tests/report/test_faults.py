"""Lost work of runs, and the cost of faults."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.record.row_stats import Computed
from pipeline.report.record.run_record import no_phases
from pipeline.report.render import markdown
from tests.report.records import actor, ended, report


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


def test_lost_work_has_its_time_and_price():
    """The run lost 400 of 1,000 tokens (100 s of decoding), and 250 of 500 prompt tokens (10 s)."""
    killed = ended(
        "killed",
        actor(generated=1000, prompt=500, delivered_tokens=Computed(250, 600),
              phases={"prefill": 10_000_000, "decode": 100_000_000}),
    )  # fmt: skip
    following = ended("finished", actor(generated=400, delivered_tokens=Computed(0, 400), phases={"load": 4_000_000}))
    work = report(killed, following, num_generated_tokens=1000).work
    assert (work.wasted_prompt_tokens, work.wasted_generated_tokens, work.wasted_us) == (250, 400, 45_000_000)
    assert work.wasted_usd == pytest.approx(0.045)
    unpriced = ended("killed", actor(generated=10, phases={"decode": 5}), usd=None)
    assert report(unpriced).work.wasted_usd is None


def test_rows_kept_by_a_stopped_run_are_not_lost():
    stopped = ended(
        "interrupted", actor(generated=100, prompt=50, delivered_tokens=Computed(20, 60), kept_tokens=Computed(30, 30))
    )
    following = ended(
        "finished", actor(generated=10, delivered_tokens=Computed(0, 10), resumed_rows=3, resumed_generated_tokens=30)
    )
    work = report(stopped, following, num_generated_tokens=100).work
    assert (work.wasted_generated_tokens, work.wasted_prompt_tokens) == (10, 0)
    assert not work.wasted_is_lower_bound
    assert work.resumed_rows == 3


def test_a_live_run_has_lost_nothing_yet():
    live = ended("running", actor(generated=100, delivered_tokens=Computed(0, 40), units_in_progress=2))
    assert report(live, num_generated_tokens=40).work.wasted_generated_tokens == 0
    after = report(live, ended("finished", actor()), num_generated_tokens=40)
    assert after.work.wasted_generated_tokens == 60, "another run followed, so this one was killed"


def test_each_fault_has_its_own_figures():
    lost = actor(0, generated=100, delivered_tokens=Computed(0, 60), node_lost=True, host="h", node_id="0123456789",
                 phases={"decode": 1000})  # fmt: skip
    replaced = actor(1, generated=10, phases={"decode": 200})
    replacement = actor(
        2, generated=1000, prompt=200, replaces=0, restarts=2, restart_us=50, crashed_us=30,
        restart_reasons=["signal SIGKILL", "signal SIGKILL"], delivered_tokens=Computed(150, 800),
        crashed_tokens=Computed(50, 200), storage_retries={"throttled": 4},
        phases={"startup": 20, "load": 60, "prefill": 400, "decode": 2000, "wasted": 30},
    )  # fmt: skip
    again = actor(3, replaces=1, phases={"startup": 7})
    run = ended("finished", lost, replaced, replacement, again, storage_retries={"timeout": 1})
    built = report(run, num_generated_tokens=860)
    found = {f.kind: (f.count, f.tokens, f.machine_us) for f in built.faults}
    assert found == {
        "engine_restarted": (3, Computed(50, 210), (100 + 400 + 30 + 50) + (200 + 7)),
        "machine_lost": (1, Computed(0, 40), 400 + 20 + 60 - 50),
        "storage_retried": (5, Computed(), 0),
    }
    assert [f.usd for f in built.faults] == pytest.approx([787e-9, 430e-9, 0])
    lost_decode_us = 400 + 200 + 400
    assert built.phases_us == no_phases() | {
        "startup": 27, "load": 60, "prefill": 400 - 100, "decode": 3200 - lost_decode_us,
        "wasted": 30 + 100 + lost_decode_us,
    }  # fmt: skip
    assert built.work.storage_retries == {"timeout": 1, "throttled": 4}
    assert built.work.restart_reasons == {"signal SIGKILL": 2}
    page = markdown(built)
    for line in ("| machine lost | 1 | 40 |", "| request to a store retried | 5 |", "| signal SIGKILL | 2 |",
                 "machine lost: h (Ray node 01234567)", "Retried requests: throttled 4, timeout 1."):  # fmt: skip
        assert line in page


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 4), min_size=1, max_size=4), st.integers(0, 5000))
def test_lost_work_is_never_negative_nor_more_than_was_computed(actors, delivered: int):
    records = [
        actor(
            i, generated=g, delivered_tokens=Computed(0, d), kept_tokens=Computed(0, k), crashed_tokens=Computed(0, x)
        )
        for i, (g, d, k, x) in enumerate(actors)
    ]
    for record in records:
        assert 0 <= record.open.generated <= record.computed.generated
        assert sum(record.times_of_us(Computed(10**6, 10**6))) <= record.machine_us
    built = report(ended("killed", *records), num_generated_tokens=delivered)
    assert sum(built.phases_us.values()) == built.machine_us
    assert min(built.phases_us.values()) >= 0
    known_lost = sum(r.crashed_tokens.generated for r in records)
    assert known_lost <= built.work.wasted_generated_tokens <= known_lost + sum(r.open.generated for r in records)
