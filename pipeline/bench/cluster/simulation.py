"""A job on a pool of simulated engines: machines come, load the model, pull units, are lost, and are given back."""

import heapq
from collections import deque
from dataclasses import dataclass
from itertools import count

import numpy as np

from pipeline.bench.cluster.engine import EngineSpeed, SimulatedEngine
from pipeline.bench.cluster.workload import SimulatedUnit, Workload
from pipeline.job.dataflow.spec import ACTORS_PER_READER, NUM_READERS, READER_ROWS_PER_S


@dataclass(frozen=True)
class PoolSpec:
    """join_s: within which machines come, one after the other. losses_per_hour: of each machine. A machine that is lost
    is replaced at once, and the replacement loads the model; with `notice` the rows that had ended are kept.
    slow_share of the machines take slow_by times as long."""

    actors: int
    units_in_flight: int
    cold_start_s: float = 60.0
    join_s: float = 0.0
    losses_per_hour: float = 0.0
    notice: bool = True
    slow_share: float = 0.0
    slow_by: float = 2.0
    seed: int = 1


@dataclass(frozen=True)
class PoolRun:
    """machine_s: seconds that are paid for, with `elastic` up to each machine's last unit, with `static` up to the end
    of the job. idle_tail_s: from each machine's last unit to the end. thin_s: in which a machine ran less than half a
    batch and no unit was left to pull. imbalance: how much later than the mean the last machine ended, by the mean's
    time from the job's beginning. useful_s: what all rows take of engines whose batches are full."""

    actors: int
    rows: int
    units: int
    wall_s: float
    static_s: float
    elastic_s: float
    idle_tail_s: float
    thin_s: float
    imbalance: float
    useful_s: float
    lost_machines: int
    repeated_tokens: int

    @property
    def idle_share(self) -> float:
        return self.idle_tail_s / self.static_s

    @property
    def thin_share(self) -> float:
        return self.thin_s / self.static_s

    @property
    def useful_share(self) -> float:
        """Of the elastic pool's paid time."""
        return self.useful_s / self.elastic_s


def simulate(work: Workload, pool: PoolSpec, speed: EngineSpeed) -> PoolRun:
    """Run a job to its end. The same arguments give the same run."""
    return _Simulation(work, pool, speed).run()


@dataclass
class _Machine:
    """`life` and `plan` count: an event of an earlier machine in this place, or of a plan that changed, is void."""

    speed: EngineSpeed
    came_s: float
    engine: SimulatedEngine | None = None  # None while the model is loaded
    life: int = 0
    plan: int = 0
    ended_s: float = 0.0  # its last unit, or the model's load
    looked_s: float = 0.0
    thin_s: float = 0.0
    lost_s: float = 0.0  # paid for machines that were here and lost


class _Simulation:
    def __init__(self, work: Workload, pool: PoolSpec, speed: EngineSpeed) -> None:
        self._work, self._pool, self._speed = work, pool, speed
        self._rng = np.random.default_rng((pool.seed, 2))
        self._order = count()  # of events at one time
        self._events: list[tuple[float, int, str, int, int]] = []  # when, order, what, machine, its life or plan
        self._queue: deque[SimulatedUnit] = deque()
        self._coming = work.windows()
        self._unread = self._reading = 0
        self._rows = self._units = self._lost = self._repeated = 0
        self._useful_s = 0.0
        slow = EngineSpeed([s * pool.slow_by for s in speed.step_s], speed.prefill_s * pool.slow_by)
        num_slow = round(pool.slow_share * pool.actors)
        arrivals = np.linspace(0.0, pool.join_s, pool.actors).tolist()
        self._machines = [_Machine(slow if i < num_slow else speed, at) for i, at in enumerate(arrivals)]

    def run(self) -> PoolRun:
        for i in range(self._pool.actors):
            self._come(i)
        self._unread = self._work.num_windows
        for _ in range(min(max(NUM_READERS, -(-self._pool.actors // ACTORS_PER_READER)), self._pool.actors)):
            self._read(0.0)
        now = 0.0
        while self._rows < self._work.rows:
            now, _, what, i, version = heapq.heappop(self._events)
            machine = self._machines[i]
            if what == "window":
                self._window(now)
            elif what == "row" and version == machine.plan:
                self._go_on(machine, now)
                self._pull(i, now, self._pool.units_in_flight)
            elif what == "ready" and version == machine.life:
                machine.engine, machine.ended_s, machine.looked_s = SimulatedEngine(machine.speed, now), now, now
                self._pull(i, now, self._pool.units_in_flight)
            elif what == "loss" and version == machine.life:
                self._lose(i, now)
        return self._result(now)

    def _at(self, when: float, what: str, i: int = 0, version: int = 0) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, i, version))

    def _come(self, i: int) -> None:
        """A machine is there and loads the model."""
        machine = self._machines[i]
        self._at(machine.came_s + self._pool.cold_start_s, "ready", i, machine.life)
        if self._pool.losses_per_hour:
            lives_s = self._rng.exponential(3600 / self._pool.losses_per_hour)
            self._at(machine.came_s + lives_s, "loss", i, machine.life)

    def _read(self, now: float) -> None:
        """A reader begins the next window, if there is one."""
        if self._unread:
            self._unread -= 1
            self._reading += 1
            self._at(now + min(self._work.window_rows, self._work.rows) / READER_ROWS_PER_S, "window")

    def _window(self, now: float) -> None:
        units = next(self._coming)
        self._reading -= 1
        self._useful_s += sum(map(self._speed.work_s, units))
        self._queue.extend(units)
        self._read(now)
        for in_flight in range(self._pool.units_in_flight):  # the emptiest first, as Ray's pool does
            for i, machine in enumerate(self._machines):
                if self._queue and machine.engine is not None and machine.engine.num_open == in_flight:
                    self._go_on(machine, now)
                    self._pull(i, now, 1)

    def _go_on(self, machine: _Machine, now: float) -> None:
        assert machine.engine is not None
        if not (self._queue or self._unread or self._reading) and machine.engine.is_thin:
            machine.thin_s += now - machine.looked_s
        machine.looked_s = now
        for unit in machine.engine.advance(now):
            self._rows += unit.num_rows
            self._units += 1
            machine.ended_s = now

    def _pull(self, i: int, now: float, most: int) -> None:
        """Take units as there is room, and plan the next row's end."""
        machine = self._machines[i]
        assert machine.engine is not None
        for _ in range(min(most, len(self._queue), self._pool.units_in_flight - machine.engine.num_open)):
            machine.engine.take(self._queue.popleft())
        machine.plan += 1
        if (when := machine.engine.next_s()) < float("inf"):
            self._at(when, "row", i, machine.plan)

    def _lose(self, i: int, now: float) -> None:
        """A machine is gone. Nobody replaces one that has no work left to do."""
        machine = self._machines[i]
        units: list[SimulatedUnit] = []
        if machine.engine is not None:
            self._go_on(machine, now)
            units, tokens = machine.engine.lose(self._pool.notice)
            self._repeated += tokens
            self._rows += sum(unit.num_rows for unit in machine.engine.units) - sum(unit.num_rows for unit in units)
        if not (units or self._queue or self._unread or self._reading):
            return
        self._lost += 1
        self._queue.extendleft(reversed(units))
        machine.lost_s += now - machine.came_s
        machine.came_s = machine.ended_s = now
        machine.engine, machine.life, machine.plan = None, machine.life + 1, machine.plan + 1
        self._come(i)
        for other, beside in enumerate(self._machines):  # those that had nothing left to do
            if self._queue and beside.engine is not None:
                self._go_on(beside, now)
                self._pull(other, now, self._pool.units_in_flight)

    def _result(self, wall_s: float) -> PoolRun:
        there = [m for m in self._machines if m.came_s < wall_s]
        lost_s = sum(m.lost_s for m in self._machines)
        ends = [min(max(m.ended_s, m.came_s), wall_s) for m in there]
        static_s = lost_s + sum(wall_s - m.came_s for m in there)
        idle_s = sum(wall_s - end for end in ends)
        return PoolRun(
            actors=self._pool.actors,
            rows=self._rows,
            units=self._units,
            wall_s=wall_s,
            static_s=static_s,
            elastic_s=static_s - idle_s,
            idle_tail_s=idle_s,
            thin_s=sum(m.thin_s for m in self._machines),
            imbalance=wall_s / (sum(ends) / len(ends)) - 1,
            useful_s=self._useful_s,
            lost_machines=self._lost,
            repeated_tokens=self._repeated,
        )
