"""Simulated pools against runs that can be worked out by hand, where a step takes a second."""

from dataclasses import dataclass, replace

import pytest

from pipeline.bench.cluster import pools
from pipeline.bench.cluster.engine import EngineSpeed
from pipeline.bench.cluster.pools import bench_cluster
from pipeline.bench.cluster.simulation import PoolSpec, simulate
from pipeline.bench.cluster.workload import SimulatedUnit, Skewed, Workload
from pipeline.job.dataflow.spec import READER_ROWS_PER_S, units_in_flight

TWO_AT_ONCE = EngineSpeed([0.0, 1.0, 1.0], 0.0)


@dataclass
class Given:
    """One window of units whose rows generate these tokens."""

    outputs: list[list[int]]

    @property
    def rows(self):
        return sum(map(len, self.outputs))

    window_rows, num_windows = 1 << 20, 1

    def windows(self):
        yield [SimulatedUnit(0, i, [1] * len(unit), unit) for i, unit in enumerate(self.outputs)]


def run(outputs, actors=1, in_flight=2, speed=TWO_AT_ONCE, **pool):
    """A pool's run without the time in which the window is read, where nothing else is done meanwhile."""
    work = Given(outputs)
    found = simulate(work, PoolSpec(actors, in_flight, **{"cold_start_s": 0.0} | pool), speed)
    return found, work.rows / READER_ROWS_PER_S


def test_a_batch_takes_as_long_as_its_rows_one_after_the_other():
    found, read_s = run([[3, 5], [4]])
    # 3 and 5 run; at 3 the row of 4 begins, and ends at 7
    assert found.wall_s == pytest.approx(7 + read_s)
    assert (found.rows, found.units, found.idle_tail_s) == (3, 2, 0)
    assert found.useful_s == pytest.approx((3 + 5 + 4) / 2)


def test_prompts_are_computed_before_rows_go_on():
    found, read_s = run([[3, 5]], speed=EngineSpeed([0.0, 1.0, 1.0], 0.25))
    assert found.wall_s == pytest.approx(5.5 + read_s)


def test_two_machines_take_half_as_long_and_the_model_is_loaded_beside_the_reading():
    one, read_s = run([[10]] * 8, in_flight=1)
    two, _ = run([[10]] * 8, actors=2, in_flight=1)
    assert (one.wall_s, two.wall_s) == pytest.approx((80 + read_s, 40 + read_s))
    late, _ = run([[10]] * 8, actors=2, in_flight=1, cold_start_s=30.0)
    assert late.wall_s == pytest.approx(70)


def test_the_longest_row_makes_the_tail():
    found, read_s = run([[100]] + [[10]] * 4, actors=2, in_flight=1)
    assert found.wall_s == pytest.approx(100 + read_s)
    assert found.idle_tail_s == pytest.approx(60)
    assert found.elastic_s == pytest.approx(140 + 2 * read_s)
    assert found.static_s == pytest.approx(200 + 2 * read_s)
    assert found.imbalance == pytest.approx((100 + read_s) / (70 + read_s) - 1)


def test_a_machine_that_comes_late_is_paid_from_then_on_and_a_slow_one_pulls_less():
    found, read_s = run([[10]] * 4, actors=2, in_flight=1, join_s=20.0)
    assert found.wall_s == pytest.approx(30 + read_s)
    assert found.static_s == pytest.approx(30 + 10 + 2 * read_s)
    slow, _ = run([[10]] * 6, actors=2, in_flight=1, slow_share=0.5)
    assert slow.wall_s == pytest.approx(40 + read_s * 1.5)


@pytest.mark.parametrize("notice", [True, False])
def test_lost_machines_lose_no_row_and_repeat_what_was_open(notice):
    work = [[10, 60]] * 40
    # a loss each minute of each machine, and half a minute to load the model
    trouble = {"losses_per_hour": 60.0, "cold_start_s": 30.0, "seed": 3}
    found, _ = run(work, actors=4, notice=notice, **trouble)
    assert found.rows == 80
    assert found.lost_machines > 5
    most = 60 + (0 if notice else 10 + 70)  # tokens of one machine's open units
    assert 0 < found.repeated_tokens <= found.lost_machines * 2 * most
    again, _ = run(work, actors=4, notice=notice, **trouble)
    assert again == found
    quiet, _ = run(work, actors=4, **trouble | {"losses_per_hour": 0.0})
    assert quiet.wall_s < found.wall_s
    assert quiet.elastic_s < found.elastic_s


def test_a_notice_saves_the_rows_that_had_ended():
    lost = {"losses_per_hour": 60.0, "cold_start_s": 5.0, "seed": 3}
    noticed, killed = (run([[10, 60]] * 40, actors=4, notice=notice, **lost)[0] for notice in (True, False))
    a_loss = [found.repeated_tokens / found.lost_machines for found in (noticed, killed)]
    assert a_loss[0] < a_loss[1]


def test_units_are_cut_by_the_jobs_own_rule_and_every_row_is_in_one():
    work = Workload(1500, Skewed(50, 400), Skewed(20, 100), window_rows=600, unit_tokens=5000)
    windows = list(work.windows())
    assert [sum(unit.num_rows for unit in units) for units in windows] == [600, 600, 300]
    for unit in (unit for units in windows for unit in units):
        assert sum(unit.prompts) + 100 * unit.num_rows <= 5000
    longest = [max(unit.prompts) for unit in windows[0]]
    assert longest[0] > 2 * longest[-1]


def test_as_many_units_are_open_as_fill_the_batch():
    assert units_in_flight(64, 512, 100_000, 96) == 4
    assert units_in_flight(512, 512, 100_000, 1024) == -(-4 * 512 // 97)
    assert units_in_flight(512, 512, 100_000, 8192) == 48
    assert units_in_flight(512, 512, 100_000, 200_000) == 48


def test_more_units_in_flight_fill_the_batch_and_64_machines_end_together(monkeypatch):
    """The aims: 3 % imbalance and 2 % idle at the tail. Pools in trouble, of which nothing is asked here, have fewer
    rows."""

    def simulate_less(work, pool, speed):
        in_trouble = pool.join_s or pool.slow_share or pool.losses_per_hour
        return simulate(replace(work, rows=work.rows // 32) if in_trouble else work, pool, speed)

    monkeypatch.setattr(pools, "simulate", simulate_less)
    found = bench_cluster(actors=(64,), rows_per_actor=8192)
    by_name = dict(found.runs)
    ours, few = found.runs[0][1], by_name["4 units in flight"]
    assert (ours.imbalance < 0.03, ours.idle_share < 0.02) == (True, True)
    assert ours.wall_s < 0.75 * few.wall_s
    told = found.to_json()["runs"][0]
    assert told["static_usd"] == pytest.approx(told["static_s"] / 3600 * 2.5)
    assert told["store"]["gets"] == ours.units
    assert "64" in found.to_text()
