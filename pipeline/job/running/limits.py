"""When a run has to take no more work, so that it ends inside `cost.budget_usd` and `run.max_runtime`.

What is open at that moment takes about as long to finish as a unit takes from its beginning to its end: the units that
are open, over those that end in a second (Little's law). Where that guess is too short, the run stops in the middle of
units at the limit and keeps their finished rows for the next one, so that only rows that were being written are lost.

Money is the actors' machine time by `cost.hourly_usd`, the job's earlier runs included: a job that is begun again by a
scheduler finds its budget spent, and ends before an engine starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.sections.limits import CostSection
from pipeline.config.sections.run import RunSection
from pipeline.errors import LimitReached
from pipeline.formatting import duration
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.report.record.run_record import MICROSECONDS_PER_HOUR, RunRecord

RESERVE_S = 3.0  # from the order to stop in the middle of units until every actor rests
WARN_SHARE = 0.8
BUDGET, MAX_RUNTIME = "cost.budget_usd", "run.max_runtime"


@dataclass(frozen=True)
class Limit:
    """The one that is reached first. left_s: of the run, until it is passed. share: of it that is used up."""

    key: str
    used: str  # for people
    left_s: float
    share: float


class RunLimits:
    """Of one run. Used by the driver's main thread."""

    def __init__(self, cost: CostSection, run: RunSection, earlier: Sequence[RunRecord]) -> None:
        """Raises LimitReached where the earlier runs leave no money to start an engine with."""
        self._hourly_usd, self._budget, self._max_runtime = cost.hourly_usd or 0.0, cost.budget_usd, run.max_runtime
        # A run without a price of its own is taken at today's: a budget must hold all the same.
        self._before_usd = sum(
            (self._hourly_usd if r.hourly_usd is None else r.hourly_usd) * r.machine_us / MICROSECONDS_PER_HOUR
            for r in earlier
        )
        self._warned = False
        if self._budget is not None and self._before_usd + self._start_usd(earlier, run.pool[0]) >= self._budget:
            raise LimitReached(
                f"{BUDGET} {self._budget:g}: the runs so far cost {self._before_usd:.4g} US dollars, and what is left "
                "does not pay for the start of the engines. Raise the budget to go on."
            )

    def _start_usd(self, earlier: Sequence[RunRecord], num_actors: int) -> float:
        """Of start-up and load, as the last run that had them measured it."""
        for run in reversed(earlier):
            loaded = [a.phases_us["startup"] + a.phases_us["load"] for a in run.actors if a.stats.get("num_steps")]
            if loaded:
                return self._hourly_usd * num_actors * sum(loaded) / len(loaded) / MICROSECONDS_PER_HOUR
        return 0.0

    def nearest(self, actors: Sequence[ActorState], wall_s: float) -> Limit | None:
        """actors: as they last told; wall_s: since the run began. None where nothing is limited."""
        limits: list[Limit] = []
        if self._budget is not None:
            machine_us = sum(actor.record.machine_us for actor in actors)
            spent = self._before_usd + self._hourly_usd * machine_us / MICROSECONDS_PER_HOUR
            a_second = self._hourly_usd / 3600 * max(1, len(_there(actors)))
            used = f"{spent:.4g} of {self._budget:g} US dollars"
            limits.append(Limit(BUDGET, used, (self._budget - spent) / a_second, spent / self._budget))
        if self._max_runtime is not None:
            used = f"{duration(round(wall_s))} of {duration(self._max_runtime)}"
            limits.append(Limit(MAX_RUNTIME, used, self._max_runtime - wall_s, wall_s / self._max_runtime))
        return min(limits, key=lambda limit: limit.left_s, default=None)

    def warning(self, limit: Limit | None) -> str | None:
        """What to say, once, when most of a limit is used."""
        if limit is None or self._warned or limit.share < WARN_SHARE:
            return None
        self._warned = True
        return f"{limit.key}: {limit.used} are used; the run ends itself when there is no time for another unit"


def must_drain(limit: Limit, actors: Sequence[ActorState], units_done: int, running_s: float) -> bool:
    """Whether units that were begun now would pass the limit. running_s: since the first step."""
    open_units = sum(actor.record.units_in_progress for actor in actors)
    # As long as none has ended, a unit takes at least as long as it has taken.
    finish_s = running_s if not units_done else open_units * running_s / units_done
    return limit.left_s <= finish_s + RESERVE_S


def _there(actors: Sequence[ActorState]) -> list[ActorState]:
    """Those that cost money from now on."""
    replaced = {actor.record.replaces for actor in actors}
    return [a for a in actors if not a.record.node_lost and not a.record.released and a.record.actor not in replaced]
