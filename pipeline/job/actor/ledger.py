"""The last state that each engine actor reported, kept in a process that outlives the actors.

A plain class; `dataflow/graph.py` makes it a small actor of its own. It imports next to nothing, as its process has
to be up before anything else can start.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum

from pipeline.job.telemetry.actor_state import ActorState
from pipeline.machine.host import now_us
from pipeline.report.record.run_record import ActorRecord, no_phases

REPORT_S = 1.0  # between two reports of an actor
SILENT_S = 5.0  # an actor of an elastic pool that has no open units and is silent for longer was given back
MAX_REPLACED = 3  # replacements for each actor of the pool; Ray itself would replace lost ones without end


class Order(IntEnum):
    """What the driver tells its actors to do; each order includes those above it."""

    GO_ON = 0
    ADMIT_NO_MORE = 1  # finish the units that are open, take no other
    GIVE_UP = 2  # stop computing; keep the finished rows of the open units
    LEAVE = 3  # end the process


@dataclass(frozen=True)
class Whereabouts:
    """On which machine an actor's process runs, and for how long already. `node_id` is Ray's name for the machine."""

    host: str = ""
    node_id: str = ""
    age_us: int = 0


class Ledger:
    """The actors' last reports. All times are of this process's monotonic clock: clocks of two hosts are never
    compared."""

    def __init__(self, actors: int, most: int | None = None, drain_s: float = 0.0) -> None:
        """`actors` are there from the run's start on; an elastic pool may have up to `most` at once. Those whose
        machine is to leave the cluster have drain_s to finish what is open."""
        self._num_actors = actors
        self._is_elastic = most is not None and most > actors
        self._max_actors = (most or actors) * (1 + MAX_REPLACED)
        self._run_began_us: int | None = None
        self._births_us: dict[int, int] = {}  # from the run's start, by actor number
        self._heard_us: dict[int, int] = {}
        self._states: dict[int, ActorState] = {}
        self._replaced: dict[int, int] = {}  # from an actor to its replacement
        self._where: dict[int, Whereabouts] = {}
        self._num_moved = 0  # replacements that came up on another machine
        self._handles: list[bytes] = []
        self._order = Order.GO_ON
        self._drain_s = drain_s
        self._draining_us: dict[str, int] = {}  # when a machine was first said to leave, by its node id
        self._left: set[int] = set()  # actors that were told to leave and have no open units

    def begin(self, run_us: int) -> None:
        """Start the clock: the run began `run_us` ago."""
        self._run_began_us = now_us() - run_us

    def register(self, actor: bytes, where: Whereabouts = Whereabouts()) -> tuple[int, int, bool] | None:
        """A new actor's number, how long its time has run already, and whether there were too many before it. None
        before `begin`.

        The first ones' time began with the run, a replacement's when its predecessor was last heard; on another machine
        not before its own process: until then that machine was not this run's. Those are not counted as too many
        either: machines may come and go for as long as they like.
        """
        if self._run_began_us is None:
            return None
        self._handles.append(actor)
        number, now = len(self._births_us), self._now_us()
        born = 0
        silent = [
            n
            for n in self._births_us
            if n not in self._replaced and (n in self._left or now - self._heard_us[n] > 2e6 * REPORT_S)
        ]
        if silent:
            predecessor = min(silent, key=lambda n: self._heard_us[n])
            self._replaced[predecessor] = number
            born = self._heard_us[predecessor]
            if where.node_id != self._where[predecessor].node_id:
                self._num_moved += 1
                born = max(born, now - where.age_us)
        elif number >= self._num_actors:  # the pool grows
            born = max(0, now - where.age_us)
        self._births_us[number] = born
        self._heard_us[number] = now
        self._where[number] = where
        return number, now - born, number - self._num_moved >= self._max_actors

    def report(self, state: ActorState) -> Order:
        """Take an actor's word and give it the run's."""
        known = self._states.get(state.record.actor)
        if known is None or known.told <= state.told:
            self._states[state.record.actor] = state
        self._heard_us[state.record.actor] = now = self._now_us()
        since = self._draining_us.get(self._where[state.record.actor].node_id)
        if since is None or self._order > Order.GO_ON:
            return self._order
        if not state.open_units:
            self._left.add(state.record.actor)
        return Order.LEAVE if not state.open_units or now - since > self._drain_s * 1e6 else Order.ADMIT_NO_MORE

    def give(self, order: Order) -> None:
        """Say to every actor that reports from now on."""
        self._order = order

    def drain(self, nodes: Collection[str]) -> None:
        """These machines are about to leave the cluster; all others are not."""
        self._draining_us = {node: self._draining_us.get(node, self._now_us()) for node in nodes}

    def is_up(self) -> bool:
        return True

    def actors(self) -> list[bytes]:
        """What the actors registered with: their handles, packed."""
        return self._handles

    def states(self, end: bool = False, lost_nodes: Collection[str] = ()) -> list[ActorState]:
        """All actors' last words; one that has said nothing yet is starting up since its birth.

        With `end` the time since the last word is added, to the phase each was at rest in: an actor holds its machine
        until the run ends, unless another took its place, the machine is one of `lost_nodes`, or the pool is elastic
        and Ray gave the actor back. While the run goes on, those that have not even registered are starting up too, or
        a run that is killed early would seem to have used no machine.
        """
        known = len(self._births_us) if end else max(len(self._births_us), self._num_actors)
        states = [self._state(number, lost_nodes) for number in range(known)]
        if not end:
            return states
        now = self._now_us()
        gone = {state.record.actor for state in states if state.record.node_lost or state.record.given_back}
        gone |= self._replaced.keys() | self._left
        return [state if state.record.actor in gone else self._extended(state, now) for state in states]

    def _state(self, number: int, lost_nodes: Collection[str]) -> ActorState:
        state = self._states.get(number)
        where = self._where.get(number, Whereabouts())
        is_lost = where.node_id in lost_nodes
        if state is None:
            until = self._heard_us[number] if is_lost or number in self._replaced else self._now_us()
            phases = {**no_phases(), "startup": max(0, until - self._births_us.get(number, 0))}
            state = ActorState(ActorRecord(number, phases))
        predecessor = next((old for old, new in self._replaced.items() if new == number), None)
        told = replace(
            state.record,
            replaces=predecessor,
            host=where.host,
            node_id=where.node_id,
            node_lost=is_lost,
            began_us=self._births_us.get(number, 0),
            given_back=not is_lost and self._is_given_back(state),
        )
        return replace(state, record=told)

    def _is_given_back(self, state: ActorState) -> bool:
        number = state.record.actor
        if not self._is_elastic or state.record.open_units or number in self._replaced or number not in self._heard_us:
            return False
        return self._now_us() - self._heard_us[number] > SILENT_S * 1e6

    def _now_us(self) -> int:
        """Since the run began."""
        assert self._run_began_us is not None
        return now_us() - self._run_began_us

    def _extended(self, state: ActorState, now: int) -> ActorState:
        record = state.record
        rest = max(0, now - self._births_us[record.actor] - record.machine_us)
        phases = {**record.phases_us, state.at_rest: record.phases_us[state.at_rest] + rest}
        return replace(state, record=replace(record, phases_us=phases))
