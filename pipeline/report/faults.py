"""What faults cost: work lost or done again, and the machine time for starting again. An estimate.

Every run is looked at by itself: what its engines computed, less what became parts of it or was kept for the next run.
So nothing that one run lost is hidden by what another delivered. Tokens are charged the engines' average time for a
token; `docs/cost.md` says which tokens and which start-up time each kind of fault is charged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.row_stats import Computed
from pipeline.report.record.run_record import ActorRecord, Outcome, RunRecord

FAULTS = {
    "run_killed": "run killed",
    "run_interrupted": "run stopped by a signal",
    "run_failed": "run failed or stopped by run.max_error_rate",
    "actor_replaced": "engine actor replaced",
    "node_lost": "machine lost",
    "engine_restarted": "engine process restarted",
    "preempted": "sequence preempted",
    "duplicate_unit": "unit computed whose part already existed",
    "part_removed": "parts removed after they were written",
    "row_failed": "rows that failed in the engine",
    "storage_retried": "request to a store tried again",
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


class LostTime(NamedTuple):
    """Of one run: the time of prefill and of decode that went into tokens which the output does not hold."""

    prefill_us: int = 0
    decode_us: int = 0

    def __add__(self, other: tuple[int, ...]) -> "LostTime":
        return LostTime(self.prefill_us + other[0], self.decode_us + other[1])


@dataclass
class FaultCost(JsonRecord):
    """Faults of one kind. tokens: computed and not delivered, or computed twice; `work_us` is the time of these,
    `machine_us` that and the time of starting again. `usd`: None where there is no price. is_lower_bound: what happened
    after the last record of a run that was killed is not known. nodes: lost machines."""

    kind: str
    title: str
    count: int = 0
    tokens: Computed = field(default_factory=Computed)
    work_us: int = 0
    machine_us: int = 0
    work_usd: float | None = 0.0
    usd: float | None = 0.0
    is_lower_bound: bool = False
    nodes: list[str] = field(default_factory=list)

    def add(self, run: RunRecord, tokens: Computed, work_us: int, start_us: int = 0) -> None:
        """Charge `run` with work and with starting again."""
        self.tokens += tokens
        self.work_us += work_us
        self.machine_us += work_us + start_us
        self.work_usd = (self.work_usd or 0.0) + run.usd(work_us)
        self.usd = (self.usd or 0.0) + run.usd(work_us + start_us)


def unrecorded_tokens(runs: Sequence[RunRecord], delivered_generated: int) -> int:
    """Return generated tokens of parts that are in no record: a run that was killed wrote them after its last one."""
    return max(0, delivered_generated - _known_tokens(runs))


def _known_tokens(runs: Sequence[RunRecord]) -> int:
    return sum(a.delivered_tokens.generated + a.resumed_generated_tokens for run in runs for a in run.actors)


def fault_costs(runs: Sequence[RunRecord], delivered_generated: int) -> tuple[list[FaultCost], list[LostTime]]:
    """Return all kinds that happened, in the order of `FAULTS`, at the prices of the runs; and the time of each run
    that went into lost tokens. `delivered_generated`: tokens that the output holds."""
    sums = {kind: FaultCost(kind, title, is_lower_bound=kind == "run_killed") for kind, title in FAULTS.items()}
    lost_times: list[LostTime] = []
    unrecorded = unrecorded_tokens(runs, delivered_generated)
    # While a run goes on its actors may know of parts that are not counted in the output yet.
    complete = bool(runs) and runs[-1].outcome == "finished"
    removed = max(0, _known_tokens(runs) - delivered_generated) if complete else 0
    for run, following in zip_longest(runs, runs[1:]):
        end = _KIND_OF_END[run.outcome]
        replaced = {actor.replaces for actor in run.actors}
        goes_on = run.outcome == "running" and following is None
        lost_nodes = {actor.node_id: actor.node for actor in run.actors if actor.node_lost}
        lost_time = LostTime()

        def lose(kind: str, actor: ActorRecord, tokens: Computed, more_us: int = 0, start_us: int = 0) -> LostTime:
            times = LostTime(*actor.times_of_us(tokens))
            sums[kind].add(run, tokens, sum(times) + more_us, start_us)  # noqa: B023  # called in this round
            return times

        sums["node_lost"].nodes += lost_nodes.values()
        sums["node_lost"].count += len(lost_nodes)
        for actor in run.actors:
            sums["engine_restarted"].count += actor.restarts
            lost_time += lose("engine_restarted", actor, actor.crashed_tokens, actor.crashed_us, actor.restart_us)
            lost_time += lose("duplicate_unit", actor, actor.duplicate_tokens)
            gone = Computed(0, min(removed, actor.delivered_tokens.generated))
            removed -= gone.generated
            lost_time += lose("part_removed", actor, gone)
            sums["preempted"].count += actor.stats.get("num_preemptions", 0)
            again = Computed(actor.stats.get("recomputed_tokens", 0))
            sums["preempted"].add(run, again, actor.stats.get("preempted_us", 0))
            sums["storage_retried"].count += sum(actor.storage_retries.values())
            if actor.replaces is not None:
                kind = "node_lost" if run.actors[actor.replaces].node_lost else "actor_replaced"
                sums[kind].count += kind == "actor_replaced"
                sums[kind].add(run, Computed(), 0, _start_us(actor))
            is_gone = actor.node_lost or actor.actor in replaced
            tokens, kind = actor.open, "node_lost" if actor.node_lost else "actor_replaced" if is_gone else end
            if kind != "row_failed":  # some of it was written after the last report
                written = min(unrecorded, tokens.generated)
                unrecorded -= written
                tokens = _share(tokens, tokens.generated - written)
            if is_gone or not goes_on:
                lost_time += lose(kind, actor, tokens)
        lost_times.append(lost_time)
        sums["duplicate_unit"].count += run.duplicate_units
        sums["storage_retried"].count += sum(run.storage_retries.values())
        if end != "row_failed" and not goes_on:
            sums[end].count += 1
            if following is not None:
                started_us = sum(_start_us(actor) for actor in following.actors if actor.replaces is None)
                sums[end].add(following, Computed(), 0, started_us)
    return [fault for fault in sums.values() if fault.count or fault.tokens.all], lost_times


def _start_us(actor: ActorRecord) -> int:
    return max(0, actor.phases_us["startup"] + actor.phases_us["load"] - actor.restart_us)


def _share(tokens: Computed, generated: int) -> Computed:
    """Return `generated` of the generated tokens, and as large a part of the prompts'."""
    if tokens.generated == 0:
        return tokens
    return Computed(tokens.prompt * generated // tokens.generated, generated)
