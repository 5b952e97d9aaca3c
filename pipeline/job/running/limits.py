"""Decide when a run must accept no more work, so that it ends within `cost.budget_usd` and `run.max_runtime`.

Open work takes about as long to finish as a unit takes in total: the number of open units over the units that end per
second (Little's law). If that estimate is too short, the run stops midway through units at the limit and saves their
finished rows for the next run, so that only rows in progress are lost.

Cost is the actors' machine time at `cost.hourly_usd`, and a server's tokens at `cost.usd_per_million`. It includes the
job's earlier runs: a job that a scheduler restarts with its budget spent ends before an engine starts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.sections.limits import CostSection
from pipeline.config.sections.run import RunSection
from pipeline.errors import LimitReached
from pipeline.formatting import duration
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.report.record.run_record import MICROSECONDS_PER_HOUR, RunRecord, token_usd

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
        self._hourly_usd, self._budget, self._max_runtime = cost.hourly_usd or 0.0, cost.budget_usd, run.max_runtime
        self._token_prices = cost.token_prices
        # Runs without a price are charged at today's price: the budget must hold anyway.
        self._before_usd = sum(
            (self._hourly_usd if r.hourly_usd is None else r.hourly_usd) * r.machine_us / MICROSECONDS_PER_HOUR
            + sum(r.token_usd())
            for r in earlier
        )
        self._warned = False
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
                return self._hourly_usd * num_actors * sum(loaded) / len(loaded) / MICROSECONDS_PER_HOUR
        return 0.0

    def nearest(self, actors: Sequence[ActorState], wall_s: float) -> Limit | None:
        """Return the nearest limit, or None without limits. actors: last reported states; wall_s: time since the run
        began."""
        limits: list[Limit] = []
        if self._budget is not None:
            machine_us = sum(actor.record.machine_us for actor in actors)
            of_tokens = sum(sum(token_usd(actor.record.stats, self._token_prices)) for actor in actors)
            spent = self._before_usd + self._hourly_usd * machine_us / MICROSECONDS_PER_HOUR + of_tokens
            # Open requests of a server are paid too: its rate so far covers them until they end.
            busy_us = sum(actor.record.phases_us["decode"] + actor.record.phases_us["prefill"] for actor in actors)
            usd_per_s = self._hourly_usd / 3600 * max(1, len(_billed(actors))) + of_tokens / max(1.0, busy_us / 1e6)
            used = f"{spent:.4g} of {self._budget:g} US dollars"
            left_s = (self._budget - spent) / usd_per_s if usd_per_s else math.inf
            limits.append(Limit(BUDGET, used, left_s, spent / self._budget))
        if self._max_runtime is not None:
            used = f"{duration(round(wall_s))} of {duration(self._max_runtime)}"
            limits.append(Limit(MAX_RUNTIME, used, self._max_runtime - wall_s, wall_s / self._max_runtime))
        return min(limits, key=lambda limit: limit.left_s, default=None)

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


def _billed(actors: Sequence[ActorState]) -> list[ActorState]:
    """Return the actors that still cost money."""
    replaced = {actor.record.replaces for actor in actors}
    return [a for a in actors if not a.record.node_lost and not a.record.released and a.record.actor not in replaced]
