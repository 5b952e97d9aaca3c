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


@dataclass
class _Entry:
    """What the ledger knows of one actor. Times are since the run began."""

    handle: bytes
    where: Whereabouts
    started_us: int
    heard_us: int
    replaces: int | None = None
    replaced: bool = False
    left: bool = False  # it was told to leave and has no open units
    state: ActorState | None = None


class Ledger:
    """The actors' last reports. All times are of this process's monotonic clock: clocks of two hosts are never
    compared."""

    def __init__(self, actors: int, most: int | None = None, drain_s: float = 0.0) -> None:
        """`actors` run from the run's start on; an elastic pool may have up to `most` at once. Those whose
        machine is to leave the cluster have drain_s to finish what is open."""
        self._num_actors = actors
        self._is_elastic = most is not None and most > actors
        self._max_actors = (most or actors) * (1 + MAX_REPLACED)
        self._run_began_us: int | None = None
        self._entries: list[_Entry] = []  # by actor number
        self._num_moved = 0  # replacements that came up on another machine
        self._order = Order.GO_ON
        self._drain_s = drain_s
        self._draining_us: dict[str, int] = {}  # when a machine was first said to leave, by its node id

    def begin(self, run_us: int) -> None:
        """Start the clock: the run began `run_us` ago."""
        self._run_began_us = now_us() - run_us

    def register(self, actor: bytes, where: Whereabouts = Whereabouts()) -> tuple[int, int, bool] | None:
        """Return a new actor's number, how long its time has run already, and whether there were too many before it.
        None before `begin`.

        The first ones' time began with the run, a replacement's when its predecessor was last heard; on another machine
        not before its own process: until then that machine was not this run's. Those are not counted as too many
        either: machines may come and go for as long as they like.
        """
        if self._run_began_us is None:
            return None
        number, now = len(self._entries), self._now_us()
        entry = _Entry(actor, where, started_us=0, heard_us=now)
        silent = [
            (each.heard_us, number)
            for number, each in enumerate(self._entries)
            if not each.replaced and (each.left or now - each.heard_us > 2e6 * REPORT_S)
        ]
        if silent:
            _, entry.replaces = min(silent)
            predecessor = self._entries[entry.replaces]
            predecessor.replaced = True
            entry.started_us = predecessor.heard_us
            if where.node_id != predecessor.where.node_id:
                self._num_moved += 1
                entry.started_us = max(entry.started_us, now - where.age_us)
        elif number >= self._num_actors:  # the pool grows
            entry.started_us = max(0, now - where.age_us)
        self._entries.append(entry)
        return number, now - entry.started_us, number - self._num_moved >= self._max_actors

    def report(self, state: ActorState) -> Order:
        """Record an actor's state and return the run's order."""
        entry = self._entries[state.record.actor]
        if entry.state is None or entry.state.told <= state.told:
            entry.state = state
        entry.heard_us = now = self._now_us()
        since = self._draining_us.get(entry.where.node_id)
        if since is None or self._order > Order.GO_ON:
            return self._order
        if not state.record.units_in_progress:
            entry.left = True
            return Order.LEAVE
        return Order.LEAVE if now - since > self._drain_s * 1e6 else Order.ADMIT_NO_MORE

    def give(self, order: Order) -> None:
        """Set the order for every actor that reports from now on."""
        self._order = order

    def drain(self, nodes: Collection[str]) -> None:
        """Mark these machines as about to leave the cluster, and no others."""
        self._draining_us = {node: self._draining_us.get(node, self._now_us()) for node in nodes}

    def is_up(self) -> bool:
        return True

    def actors(self) -> list[bytes]:
        """The packed handles that the actors registered with."""
        return [entry.handle for entry in self._entries]

    def states(self, end: bool = False, lost_nodes: Collection[str] = ()) -> list[ActorState]:
        """Return all actors' last states; one that has reported nothing yet is starting up since its birth.

        With `end` the time since the last report is added, to the phase each was at rest in: an actor holds its machine
        until the run ends, unless another took its place, the machine is one of `lost_nodes`, or the pool is elastic
        and Ray gave the actor back. While the run goes on, those that have not even registered are starting up too, or
        a run that is killed early would seem to have used no machine.
        """
        now = self._now_us()
        states = [self._state(number, now, end, lost_nodes) for number in range(len(self._entries))]
        if not end:
            missing = range(len(states), self._num_actors)
            states += [ActorState(ActorRecord(number, no_phases() | {"startup": max(0, now)})) for number in missing]
        return states

    def _state(self, number: int, now: int, end: bool, lost_nodes: Collection[str]) -> ActorState:
        entry = self._entries[number]
        is_lost = entry.where.node_id in lost_nodes
        state = entry.state
        if state is None:
            until = entry.heard_us if is_lost or entry.replaced else now
            phases = {**no_phases(), "startup": max(0, until - entry.started_us)}
            state = ActorState(ActorRecord(number, phases))
        is_silent = now - entry.heard_us > SILENT_S * 1e6
        released = self._is_elastic and is_silent and not (is_lost or entry.replaced or state.record.units_in_progress)
        rest = max(0, now - entry.started_us - state.record.machine_us)
        if not end or is_lost or released or entry.replaced or entry.left:
            rest = 0
        record = replace(
            state.record,
            phases_us={**state.record.phases_us, state.at_rest: state.record.phases_us[state.at_rest] + rest},
            tail_us=state.record.tail_us + (rest if state.at_rest == "idle" else 0),
            replaces=entry.replaces,
            host=entry.where.host,
            node_id=entry.where.node_id,
            node_lost=is_lost,
            started_us=entry.started_us,
            released=released,
        )
        return replace(state, record=record)

    def _now_us(self) -> int:
        """Since the run began."""
        assert self._run_began_us is not None
        return now_us() - self._run_began_us
