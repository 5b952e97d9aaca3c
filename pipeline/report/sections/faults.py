"""What faults cost: work lost or done again, and the machine time for starting again. An estimate.

Owns how each figure is made. Every run is looked at by itself: what its engines computed, less what became parts
of it or was kept for the next run. So nothing that one run lost is hidden by what another delivered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from pipeline.report.record.computed import Computed
from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.run_record import ActorRecord, Outcome, RunRecord

# What people read, and how the figure is made. A fault's machine time is priced at its run's rate.
FAULTS = {
    "run_killed": (
        "run killed",
        "the time its engines took, on average, for tokens whose rows were in no part at its last record; and start-up"
        " and load of the run after it",
    ),
    "run_interrupted": ("run stopped by a signal", "as for a killed run; rows kept for the next run are not lost"),
    "run_failed": ("run failed or stopped by run.max_error_rate", "as for a killed run"),
    "actor_replaced": (
        "engine actor replaced",
        "the time for tokens of its rows that were in no part; and start-up and load of the actor in its place",
    ),
    "node_lost": (
        "machine lost",
        "as for a replaced actor; the time until another machine takes its place is not paid for and not in it",
    ),
    "engine_restarted": (
        "engine process restarted",
        "the time for tokens of the rows inside, the time from its last word to its end, and start-up and load again",
    ),
    "preempted": ("sequence preempted", "the phase `preempted`"),
    "unit_doubled": ("unit computed whose part was already there", "the time for its tokens"),
    "part_removed": ("parts removed after they were written", "the time for their generated tokens"),
    "row_failed": ("rows that failed in the engine", "the time for the tokens computed for them until then"),
    "storage_retried": ("request to a store tried again", "a wait beside the engine's work, not machine time"),
}

_KIND_OF_END: dict[Outcome, str] = {
    "killed": "run_killed",
    "running": "run_killed",
    "interrupted": "run_interrupted",
    "failed": "run_failed",
    "stopped": "run_failed",
    "finished": "row_failed",
    "sampled": "row_failed",
}


@dataclass(frozen=True)
class FaultCost(JsonRecord):
    """Of one kind of fault. `work_us` is the part of `machine_us` that went into `tokens`, which were computed and not
    delivered, or computed twice. `work_usd` is its price, `usd` that of `machine_us`; None where there is no price.
    `at_least`: what happened after the last record of a run that was killed is not known."""

    kind: str
    count: int = 0
    tokens: Computed = field(default_factory=Computed)
    work_us: int = 0
    machine_us: int = 0
    usd: float | None = None
    work_usd: float | None = None
    at_least: bool = False
    where: tuple[str, ...] = ()  # of lost machines: their names

    @property
    def title(self) -> str:
        return FAULTS[self.kind][0]

    @property
    def how(self) -> str:
        return FAULTS[self.kind][1]

    def unpriced(self) -> "FaultCost":
        return replace(self, usd=None, work_usd=None)

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"title": self.title, "how": self.how}


class LostTime(NamedTuple):
    """Of one run: the time of reading prompts and of writing that went into tokens which nobody got."""

    prefill_us: int = 0
    decode_us: int = 0

    def plus(self, other: "LostTime") -> "LostTime":
        return LostTime(self.prefill_us + other.prefill_us, self.decode_us + other.decode_us)


class _Sums:
    """One FaultCost in the making."""

    def __init__(self) -> None:
        self.count = self.work_us = self.machine_us = 0
        self.tokens = Computed()
        self.usd = self.work_usd = 0.0
        self.where: list[str] = []

    def add(self, run: RunRecord, tokens: Computed, work_us: int, start_us: int = 0) -> None:
        self.tokens += tokens
        self.work_us += work_us
        self.machine_us += work_us + start_us
        self.usd += run.usd(work_us + start_us)
        self.work_usd += run.usd(work_us)

    def cost(self, kind: str) -> FaultCost:
        at_least, where = kind == "run_killed", tuple(self.where)
        return FaultCost(
            kind, self.count, self.tokens, self.work_us, self.machine_us, self.usd, self.work_usd, at_least, where
        )


def unseen_tokens(runs: Sequence[RunRecord], delivered_generated: int) -> int:
    """Generated tokens of parts that no record knows: a run that was killed wrote them after its last one."""
    return max(0, delivered_generated - _known_tokens(runs))


def _known_tokens(runs: Sequence[RunRecord]) -> int:
    return sum(a.delivered.generated + a.taken_generated_tokens for run in runs for a in run.actors)


def fault_costs(runs: Sequence[RunRecord], delivered_generated: int) -> tuple[tuple[FaultCost, ...], list[LostTime]]:
    """Of all kinds that happened, in the order of `FAULTS`, at the prices of the runs; and the time of each run that
    went into tokens which nobody got. `delivered_generated`: tokens that the output holds."""
    sums = {kind: _Sums() for kind in FAULTS}
    lost_times: list[LostTime] = []
    unseen = unseen_tokens(runs, delivered_generated)
    # While a run goes on its actors may know of parts that are not counted in the output yet.
    complete = bool(runs) and runs[-1].outcome == "finished"
    removed = max(0, _known_tokens(runs) - delivered_generated) if complete else 0
    for run, following in zip_longest(runs, runs[1:]):
        end = _KIND_OF_END[run.outcome]
        replaced = {actor.replaces for actor in run.actors}
        goes_on = run.outcome == "running" and following is None
        lost_nodes = {actor.node_id: actor.node for actor in run.actors if actor.node_lost}
        lost_time = LostTime()
        sums["node_lost"].where += lost_nodes.values()
        sums["node_lost"].count += len(lost_nodes)
        for actor in run.actors:
            _add_actor(sums, run, actor)
            for tokens in (actor.died, actor.doubled):
                lost_time = lost_time.plus(LostTime(*actor.times_of_us(tokens)))
            gone = Computed(0, min(removed, actor.delivered.generated))
            removed -= gone.generated
            sums["part_removed"].add(run, gone, actor.time_of_us(gone))
            lost_time = lost_time.plus(LostTime(*actor.times_of_us(gone)))
            is_gone = actor.node_lost or actor.actor in replaced
            lost, kind = actor.open, "node_lost" if actor.node_lost else "actor_replaced" if is_gone else end
            if kind != "row_failed":  # some of it was written after the last that was heard
                written = min(unseen, lost.generated)
                unseen -= written
                lost = _share(lost, lost.generated - written)
            if is_gone or not goes_on:
                sums[kind].add(run, lost, actor.time_of_us(lost))
                lost_time = lost_time.plus(LostTime(*actor.times_of_us(lost)))
        lost_times.append(lost_time)
        sums["unit_doubled"].count += run.units_lost
        sums["storage_retried"].count += sum(run.storage_retries.values())
        if end != "row_failed" and not goes_on:
            sums[end].count += 1
            if following is not None:
                started_us = sum(_start_us(actor) for actor in following.actors if actor.replaces is None)
                sums[end].add(following, Computed(), 0, started_us)
    happened = [kind for kind in FAULTS if sums[kind].count or sums[kind].tokens.all]
    return tuple(sums[kind].cost(kind) for kind in happened), lost_times


def _add_actor(sums: dict[str, _Sums], run: RunRecord, actor: ActorRecord) -> None:
    died_us = actor.died_us + actor.time_of_us(actor.died)
    sums["engine_restarted"].count += actor.restarts
    sums["engine_restarted"].add(run, actor.died, died_us, actor.restart_us)
    sums["preempted"].count += actor.stats.get("num_preemptions", 0)
    again = Computed(actor.stats.get("recomputed_tokens", 0))
    sums["preempted"].add(run, again, actor.phases_us["preempted"])
    sums["unit_doubled"].add(run, actor.doubled, actor.time_of_us(actor.doubled))
    sums["storage_retried"].count += sum(actor.storage_retries.values())
    if actor.replaces is not None:
        kind = "node_lost" if run.actors[actor.replaces].node_lost else "actor_replaced"
        sums[kind].count += kind == "actor_replaced"
        sums[kind].add(run, Computed(), 0, _start_us(actor))


def _start_us(actor: ActorRecord) -> int:
    return max(0, actor.phases_us["startup"] + actor.phases_us["load"] - actor.restart_us)


def _share(tokens: Computed, generated: int) -> Computed:
    """So many of the generated tokens, and as large a part of the prompts'."""
    if tokens.generated == 0:
        return tokens
    return Computed(tokens.prompt * generated // tokens.generated, generated)
