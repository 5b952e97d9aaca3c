"""Decide when a run must accept no more work, so that it ends within `cost.budget_usd` and `run.max_runtime`.

Open work takes about as long to finish as a unit takes in total: the number of open units over the units that end per
second (Little's law). If that estimate is too short, the run stops midway through units at the limit and saves their
finished rows for the next run, so that only rows in progress are lost.

Cost is the actors' machine time at `cost.hourly_usd`, and a server's tokens at `cost.usd_per_million`. It includes the
job's earlier runs: a job that a scheduler restarts with its budget spent ends before an engine starts.

A server's tokens are paid once a request is sent. So each engine gets a grant, and sends a request only if the grant
covers it at its maximum output, together with all that it has spent and sent (`EndpointEngine.grant`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.config.sections.limits import CostSection
from pipeline.config.sections.run import RunSection
from pipeline.errors import LimitReached
from pipeline.formatting import duration
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.report.record.run_record import RunRecord

RESERVE_S = 3.0  # from the order to stop midway through units until every actor is idle
WARN_SHARE = 0.8
BUDGET, MAX_RUNTIME = "cost.budget_usd", "run.max_runtime"


@dataclass(frozen=True)
class Limit:
    """The limit that is reached first. left_s: remaining time of the run until then. share: the used share of it."""

    key: str
    used: str  # as text
    left_s: float
    share: float


class RunLimits:
    """Limits of one run. Used by the driver's main thread."""

    def __init__(self, cost: CostSection, run: RunSection, earlier: Sequence[RunRecord]) -> None:
        """Raises LimitReached if the earlier runs leave no money to start an engine."""
        self._prices, self._budget, self._max_runtime = cost.prices, cost.budget_usd, run.max_runtime
        # Machine time without a price is charged at today's price: the budget must hold anyway.
        priced = [replace(r, hourly_usd=cost.hourly_usd if r.hourly_usd is None else r.hourly_usd) for r in earlier]
        self._before_usd = sum(r.usd + r.prices.unmetered_usd(r.unmetered) for r in priced)
        self._warned = False
        self._granted_usd: dict[int, float] = {}  # by actor
        if self._budget is not None and self._before_usd + self._start_usd(earlier, run.pool[0]) >= self._budget:
            raise LimitReached(
                f"{BUDGET} {self._budget:g}: the earlier runs cost {self._before_usd:.4g} US dollars, and the "
                "rest does not cover the start of the engines. Raise the budget to continue."
            )

    def _start_usd(self, earlier: Sequence[RunRecord], num_actors: int) -> float:
        """Return the cost of start-up and load, as the last run with both measured it."""
        for run in reversed(earlier):
            loaded = [a.phases_us["startup"] + a.phases_us["load"] for a in run.actors if a.stats.get("num_steps")]
            if loaded:
                return self._prices.machine_usd(num_actors * sum(loaded) / len(loaded))
        return 0.0

    def nearest(self, actors: Sequence[ActorState], wall_s: float) -> Limit | None:
        """Return the nearest limit, or None without limits. actors: last reported states; wall_s: time since the run
        began."""
        limits: list[Limit] = []
        if self._budget is not None:
            spent = self._machine_usd(actors) + sum(self._committed_usd(actor) for actor in actors)
            usd_per_s = self._prices.machine_usd(1e6) * max(1, len(_billed(actors)))
            left_s = (self._budget - spent) / usd_per_s if usd_per_s else math.inf
            if self._cannot_send(actors):
                left_s = 0.0
            limits.append(Limit(BUDGET, f"{spent:.4g} of {self._budget:g} US dollars", left_s, spent / self._budget))
        if self._max_runtime is not None:
            used = f"{duration(round(wall_s))} of {duration(self._max_runtime)}"
            limits.append(Limit(MAX_RUNTIME, used, self._max_runtime - wall_s, wall_s / self._max_runtime))
        return min(limits, key=lambda limit: limit.left_s, default=None)

    def grants(self, actors: Sequence[ActorState]) -> Mapping[int, float] | None:
        """Return the costs in US dollars up to which engines may send requests to servers, by actor; None without a
        budget for tokens. They never sum to more than the budget leaves, and never fall.

        One engine gets everything. Several get a share of one half of the rest, again and again, so that an engine that
        ends strands little; one whose next request does not fit gets its cost.
        """
        if self._budget is None or not self._prices.usd_per_million:
            return None
        live = _billed(actors)
        for actor in live:
            number, committed = actor.record.actor, self._committed_usd(actor)
            free = self._free_usd(actors)
            share = free if len(live) == 1 else free / (2 * len(live))
            headroom = self._granted_usd.get(number, 0.0) - committed
            lacking = _needed_usd(actor) - headroom
            if len(live) == 1 or headroom < share or 0 < lacking <= free:
                more = max(0.0, share, lacking if lacking <= free else 0.0)
                self._granted_usd[number] = max(committed, self._granted_usd.get(number, 0.0)) + more
        return self._granted_usd

    def _free_usd(self, actors: Sequence[ActorState]) -> float:
        """Return the part of the budget that is neither spent nor granted."""
        assert self._budget is not None
        live = {actor.record.actor for actor in _billed(actors)}
        used = self._machine_usd(actors)
        for actor in actors:
            granted = self._granted_usd.get(actor.record.actor, 0.0) if actor.record.actor in live else 0.0
            used += max(granted, self._committed_usd(actor))
        return self._budget - used

    def _cannot_send(self, actors: Sequence[ActorState]) -> bool:
        """Return whether no engine with units has an open request, and the budget covers none of the next ones."""
        working = [actor for actor in _billed(actors) if actor.record.units_in_progress]
        if self._budget is None or not self._prices.usd_per_million or not working:
            return False
        free = self._free_usd(actors)
        return all(
            (needed := _needed_usd(actor)) > 0
            and needed > self._granted_usd.get(actor.record.actor, 0.0) - self._committed_usd(actor) + max(0.0, free)
            for actor in working
        )

    def _committed_usd(self, actor: ActorState) -> float:
        return self._prices.committed_usd(actor.record.stats)

    def _machine_usd(self, actors: Sequence[ActorState]) -> float:
        """Return the cost of machine time so far, and of earlier runs."""
        machine_us = sum(actor.record.machine_us for actor in actors)
        return self._before_usd + self._prices.machine_usd(machine_us)

    def warning(self, limit: Limit | None) -> str | None:
        """Return a warning, once, when most of a limit is used."""
        if limit is None or self._warned or limit.share < WARN_SHARE:
            return None
        self._warned = True
        return f"{limit.key}: {limit.used} used; the run stops when there is no time for another unit"


def must_drain(limit: Limit, actors: Sequence[ActorState], units_done: int, running_s: float) -> bool:
    """Return whether newly started units would exceed the limit. running_s: time since the first step."""
    open_units = sum(actor.record.units_in_progress for actor in actors)
    # Until the first unit ends, a unit takes at least the time so far.
    finish_s = running_s if not units_done else open_units * running_s / units_done
    return limit.left_s <= finish_s + RESERVE_S


def _needed_usd(actor: ActorState) -> float:
    """Return the cost at which an engine without open requests could send its next one; 0 if it waits for nothing."""
    return actor.record.stats.get("needed_nanousd", 0) / 1e9


def _billed(actors: Sequence[ActorState]) -> list[ActorState]:
    """Return the actors that still cost money."""
    replaced = {actor.record.replaces for actor in actors}
    return [a for a in actors if not a.record.node_lost and not a.record.released and a.record.actor not in replaced]
