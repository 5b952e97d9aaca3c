"""Registry of engine actors with their last reported states, in a process that outlives them.

A plain class; `dataflow/graph.py` runs it as a small actor. It imports little, because its process must be up before
anything else can start.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from pipeline.job.telemetry.actor_state import ActorState
from pipeline.machine.host import now_us
from pipeline.machine.liveness import RELEASED_S, REPORT_S
from pipeline.report.record.run_record import ActorRecord, no_phases

MAX_REPLACED = 3  # replacements per actor of the pool; Ray by itself would replace lost actors forever


class Order(IntEnum):
    """Order of the driver to its actors. Each order includes those above it."""

    CONTINUE = 0
    ADMIT_NO_MORE = 1  # finish open units, accept no others
    DRAIN = 2  # begin no more rows
    GIVE_UP = 3  # stop computing; keep the finished rows of the open units
    LEAVE = 4  # end the process


@dataclass(frozen=True)
class Placement:
    """Machine and age of an actor's process. `node_id` is Ray's id of the machine."""

    host: str = ""
    node_id: str = ""
    age_us: int = 0


@dataclass
class _Entry:
    """Entry of one actor. Times are since the run began."""

    handle: bytes
    placement: Placement
    started_us: int
    heard_us: int
    replaces: int | None = None
    replaced: bool = False
    left: bool = False  # it was ordered to leave and has no open units
    state: ActorState | None = None


class ActorRegistry:
    """Last reports of the actors. All times are on this process's monotonic clock: clocks of two hosts are never
    compared."""

    def __init__(self, actors: int, max_actors: int | None = None, drain_s: float = 0.0) -> None:
        """`actors` start with the run; an elastic pool may have up to `max_actors`. Actors on a machine that is about
        to leave the cluster have drain_s seconds to finish open units."""
        self._num_actors = actors
        self._is_elastic = max_actors is not None and max_actors > actors
        self._max_actors = (max_actors or actors) * (1 + MAX_REPLACED)
        self._run_began_us: int | None = None
        self._entries: list[_Entry] = []  # by actor number
        self._num_moved = 0  # replacements that started on another machine
        self._order = Order.CONTINUE
        self._grants_usd: dict[int, float] = {}  # by actor number
        self._drain_s = drain_s
        self._draining_us: dict[str, int] = {}  # when a machine was first reported as leaving, by node id

    def begin(self, run_us: int) -> None:
        """Start the clock. The run began `run_us` ago."""
        self._run_began_us = now_us() - run_us

    def register(self, actor: bytes, placement: Placement = Placement()) -> tuple[int, int, bool] | None:
        """Return a new actor's number, its age in microseconds, and whether there were too many before it. None before
        `begin`.

        The first actors' time starts with the run, a replacement's when its predecessor last reported. On another
        machine it starts with the process at the earliest, because the machine did not belong to the run before. Such
        replacements do not count as too many either: machines may come and go indefinitely.
        """
        if self._run_began_us is None:
            return None
        number, now = len(self._entries), self._now_us()
        entry = _Entry(actor, placement, started_us=0, heard_us=now)
        silent_actors = [
            (each.heard_us, number)
            for number, each in enumerate(self._entries)
            if not each.replaced and (each.left or now - each.heard_us > 2e6 * REPORT_S)
        ]
        if silent_actors:
            _, entry.replaces = min(silent_actors)
            predecessor = self._entries[entry.replaces]
            predecessor.replaced = True
            entry.started_us = predecessor.heard_us
            if placement.node_id != predecessor.placement.node_id:
                self._num_moved += 1
                entry.started_us = max(entry.started_us, now - placement.age_us)
        elif number >= self._num_actors:  # the pool grows
            entry.started_us = max(0, now - placement.age_us)
        self._entries.append(entry)
        return number, now - entry.started_us, number - self._num_moved >= self._max_actors

    def report(self, state: ActorState) -> tuple[Order, float | None]:
        """Record an actor's state. Return the run's order, and the cost in US dollars up to which the actor may send
        requests to a server; None: no limit."""
        return self._record(state), self._grants_usd.get(state.record.actor)

    def _record(self, state: ActorState) -> Order:
        entry = self._entries[state.record.actor]
        if entry.state is None or entry.state.report_number <= state.report_number:
            entry.state = state
        entry.heard_us = now = self._now_us()
        drain_started_us = self._draining_us.get(entry.placement.node_id)
        if drain_started_us is None or self._order > Order.CONTINUE:
            return self._order
        if not state.record.units_in_progress:
            entry.left = True
            return Order.LEAVE
        return Order.LEAVE if now - drain_started_us > self._drain_s * 1e6 else Order.ADMIT_NO_MORE

    def give(self, order: Order) -> None:
        """Set the order for every actor that reports from now on."""
        self._order = order

    def grant(self, usd: Mapping[int, float]) -> None:
        """Set the costs up to which actors may send requests, by actor number."""
        self._grants_usd = dict(usd)

    def drain(self, nodes: Collection[str]) -> None:
        """Mark these machines, and only these, as about to leave the cluster."""
        self._draining_us = {node: self._draining_us.get(node, self._now_us()) for node in nodes}

    def is_up(self) -> bool:
        return True

    def actors(self) -> list[bytes]:
        """Return the pickled handles of the registered actors."""
        return [entry.handle for entry in self._entries]

    def states(self, end: bool = False, lost_nodes: Collection[str] = ()) -> list[ActorState]:
        """Return all actors' last states. An actor without a report is in start-up since it was created.

        With `end` the time since the last report is added to the phase of each actor: an actor holds its machine until
        the run ends, unless it was replaced, its machine is one of `lost_nodes`, or the pool is elastic and Ray
        released the actor. Without `end`, actors that have not registered yet count as starting up; otherwise a run
        that is killed early would seem to have used no machine.
        """
        now = self._now_us()
        states = [self._state(number, now, end, lost_nodes) for number in range(len(self._entries))]
        if not end:
            missing = range(len(states), self._num_actors)
            states += [ActorState(ActorRecord(number, no_phases() | {"startup": max(0, now)})) for number in missing]
        return states

    def _state(self, number: int, now: int, end: bool, lost_nodes: Collection[str]) -> ActorState:
        entry = self._entries[number]
        is_lost = entry.placement.node_id in lost_nodes
        state = entry.state
        if state is None:
            until = entry.heard_us if is_lost or entry.replaced else now
            phases = {**no_phases(), "startup": max(0, until - entry.started_us)}
            state = ActorState(ActorRecord(number, phases))
        is_silent = now - entry.heard_us > RELEASED_S * 1e6
        released = self._is_elastic and is_silent and not (is_lost or entry.replaced or state.record.units_in_progress)
        rest = max(0, now - entry.started_us - state.record.machine_us)
        if not end or is_lost or released or entry.replaced or entry.left:
            rest = 0
        record = replace(
            state.record,
            phases_us={**state.record.phases_us, state.at_rest: state.record.phases_us[state.at_rest] + rest},
            tail_us=state.record.tail_us + (rest if state.at_rest == "idle" else 0),
            replaces=entry.replaces,
            host=entry.placement.host,
            node_id=entry.placement.node_id,
            node_lost=is_lost,
            started_us=entry.started_us,
            released=released,
        )
        return replace(state, record=record)

    def _now_us(self) -> int:
        """Return the time since the run began."""
        assert self._run_began_us is not None
        return now_us() - self._run_began_us
