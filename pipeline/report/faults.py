"""Estimated cost of faults: lost and repeated work, and the machine time of restarts.

Each run is accounted separately: the tokens that its engines computed, minus those in its parts or kept for the next
run. Deliveries of one run thus cannot hide losses of another. Tokens are charged the engines' average time per token.
`docs/cost.md` lists the tokens and start-up times charged to each kind of fault.
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
    "duplicate_unit": "unit computed twice",
    "part_removed": "parts removed after they were written",
    "row_failed": "rows that failed in the engine",
    "storage_retried": "request to a store retried",
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
    """Prefill and decode time of one run that was spent on tokens missing in the output."""

    prefill_us: int = 0
    decode_us: int = 0

    def __add__(self, other: tuple[int, ...]) -> "LostTime":
        return LostTime(self.prefill_us + other[0], self.decode_us + other[1])


@dataclass
class FaultCost(JsonRecord):
    """Cost of the faults of one kind.

    tokens: computed and not delivered, or computed twice. work_us: time of these tokens. machine_us: work_us plus the
    time of restarts. usd: None without a price. is_lower_bound: work after a killed run's last record is unknown.
    nodes: lost machines.
    """

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
        """Add lost work and restart time, at the price of `run`."""
        self.tokens += tokens
        self.work_us += work_us
        self.machine_us += work_us + start_us
        self.work_usd = (self.work_usd or 0.0) + run.usd(work_us)
        self.usd = (self.usd or 0.0) + run.usd(work_us + start_us)


def unrecorded_tokens(runs: Sequence[RunRecord], delivered_generated: int) -> int:
    """Return the generated tokens in parts that no record covers: a killed run wrote them after its last record."""
    return max(0, delivered_generated - _known_tokens(runs))


def _known_tokens(runs: Sequence[RunRecord]) -> int:
    return sum(a.delivered_tokens.generated + a.resumed_generated_tokens for run in runs for a in run.actors)


def fault_costs(runs: Sequence[RunRecord], delivered_generated: int) -> tuple[list[FaultCost], list[LostTime]]:
    """Return the cost of the faults that occurred, in the order of `FAULTS` and at the prices of the runs, and the lost
    time of each run. delivered_generated: generated tokens in the output."""
    sums = {kind: FaultCost(kind, title, is_lower_bound=kind == "run_killed") for kind, title in FAULTS.items()}
    lost_times: list[LostTime] = []
    unrecorded = unrecorded_tokens(runs, delivered_generated)
    # During a run, its actors may know of parts that are not counted in the output yet.
    complete = bool(runs) and runs[-1].outcome == "finished"
    removed = max(0, _known_tokens(runs) - delivered_generated) if complete else 0
    for run, following in zip_longest(runs, runs[1:]):
        end = _KIND_OF_END[run.outcome]
        replaced = {actor.replaces for actor in run.actors}
        is_running = run.outcome == "running" and following is None
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
            recomputed = Computed(actor.stats.get("recomputed_tokens", 0))
            sums["preempted"].add(run, recomputed, actor.stats.get("preempted_us", 0))
            sums["storage_retried"].count += sum(actor.storage_retries.values())
            if actor.replaces is not None:
                kind = "node_lost" if run.actors[actor.replaces].node_lost else "actor_replaced"
                sums[kind].count += kind == "actor_replaced"
                sums[kind].add(run, Computed(), 0, _start_us(actor))
            has_ended = actor.node_lost or actor.actor in replaced
            tokens, kind = actor.open, "node_lost" if actor.node_lost else "actor_replaced" if has_ended else end
            if kind != "row_failed":  # part of it was written after the last report
                written = min(unrecorded, tokens.generated)
                unrecorded -= written
                tokens = _share(tokens, tokens.generated - written)
            if has_ended or not is_running:
                lost_time += lose(kind, actor, tokens)
        lost_times.append(lost_time)
        sums["duplicate_unit"].count += run.duplicate_units
        sums["storage_retried"].count += sum(run.storage_retries.values())
        if end != "row_failed" and not is_running:
            sums[end].count += 1
            if following is not None:
                started_us = sum(_start_us(actor) for actor in following.actors if actor.replaces is None)
                sums[end].add(following, Computed(), 0, started_us)
    return [fault for fault in sums.values() if fault.count or fault.tokens.all], lost_times


def _start_us(actor: ActorRecord) -> int:
    return max(0, actor.phases_us["startup"] + actor.phases_us["load"] - actor.restart_us)


def _share(tokens: Computed, generated: int) -> Computed:
    """Return `generated` of the generated tokens, and the same fraction of the prompt tokens."""
    if tokens.generated == 0:
        return tokens
    return Computed(tokens.prompt * generated // tokens.generated, generated)
