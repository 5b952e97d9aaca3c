"""Lost work of a job's runs, and the cost of the faults that a user can act on. Error rows are in `build.py`.

Each run is accounted separately: the tokens that its engines computed, minus those in its parts or kept for the next
run. Deliveries of one run thus cannot hide losses of another. Tokens are charged the engines' average time per token.
`docs/cost.md` lists what is charged to each kind of fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.row_stats import Computed
from pipeline.report.record.run_record import ActorRecord, RunRecord, summed

FAULTS = {
    "engine_restarted": "engine restarted",
    "machine_lost": "machine lost",
    "storage_retried": "request to a store retried",
}


@dataclass(frozen=True)
class LostWork:
    """Computed tokens that are missing in the output, and their time."""

    tokens: Computed = field(default_factory=Computed)
    prefill_us: int = 0
    decode_us: int = 0

    @classmethod
    def of_actor(cls, actor: ActorRecord, tokens: Computed) -> "LostWork":
        return cls(tokens, *actor.times_of_us(tokens))

    @property
    def us(self) -> int:
        return self.prefill_us + self.decode_us

    def __add__(self, other: "LostWork") -> "LostWork":
        return LostWork(
            self.tokens + other.tokens, self.prefill_us + other.prefill_us, self.decode_us + other.decode_us
        )


@dataclass(frozen=True)
class FaultCost(JsonRecord):
    """Cost of the faults of one kind, a key of `FAULTS`. tokens: lost with the engines. machine_us: their time, and
    that of restarts. usd: None without a price. nodes: lost machines."""

    kind: str
    count: int = 0
    tokens: Computed = field(default_factory=Computed)
    machine_us: int = 0
    usd: float | None = None
    nodes: tuple[str, ...] = ()

    def plus(self, count: int = 0, lost: LostWork | None = None, more_us: int = 0) -> "FaultCost":
        """Add faults, lost work, and time lost otherwise."""
        lost = lost or LostWork()
        machine_us = self.machine_us + lost.us + more_us
        return replace(self, count=self.count + count, tokens=self.tokens + lost.tokens, machine_us=machine_us)


def unrecorded_tokens(runs: Sequence[RunRecord], delivered_generated: int) -> int:
    """Return the generated tokens in parts that no record covers: a killed run wrote them after its last record."""
    known = sum(a.delivered_tokens.generated + a.resumed_generated_tokens for run in runs for a in run.actors)
    known += sum(run.row_stats.copied.generated_tokens for run in runs)
    return max(0, delivered_generated - known)


def lost_work(runs: Sequence[RunRecord], delivered_generated: int) -> list[list[LostWork]]:
    """Return the lost work of each actor of each run. delivered_generated: generated tokens in the output."""
    unrecorded = unrecorded_tokens(runs, delivered_generated)
    found: list[list[LostWork]] = []
    for run, following in zip_longest(runs, runs[1:]):
        replaced = {actor.replaces for actor in run.actors}
        is_running = run.outcome == "running" and following is None
        found.append([])
        for actor in run.actors:
            has_ended = actor.node_lost or actor.actor in replaced
            tokens = actor.open
            if has_ended or run.outcome not in ("finished", "sampled"):
                written = min(unrecorded, tokens.generated)  # after the last report
                unrecorded -= written
                tokens = _share(tokens, tokens.generated - written)
            if is_running and not has_ended:
                tokens = Computed()  # they may still be delivered
            found[-1].append(LostWork.of_actor(actor, actor.crashed_tokens + tokens))
    return found


def fault_costs(runs: Sequence[RunRecord], lost: Sequence[Sequence[LostWork]]) -> list[FaultCost]:
    """Return the faults that occurred, without prices. lost: from `lost_work`."""
    restarted, machine_lost = FaultCost("engine_restarted"), FaultCost("machine_lost")
    retried = FaultCost("storage_retried", sum(summed([r.storage_retries for r in runs]).values()))
    for run, of_run in zip(runs, lost, strict=True):
        replaced = {actor.replaces for actor in run.actors}
        nodes = {actor.node_id: actor.node for actor in run.actors if actor.node_lost}
        machine_lost = replace(machine_lost.plus(len(nodes)), nodes=(*machine_lost.nodes, *nodes.values()))
        for actor, of_actor in zip(run.actors, of_run, strict=True):
            retried = retried.plus(sum(actor.storage_retries.values()))
            restarted = restarted.plus(actor.restarts, more_us=actor.crashed_us + actor.restart_us)
            if actor.node_lost:
                machine_lost = machine_lost.plus(lost=of_actor)
            elif actor.actor in replaced:
                restarted = restarted.plus(1, of_actor)
            else:
                restarted = restarted.plus(lost=LostWork.of_actor(actor, actor.crashed_tokens))
            if actor.replaces is not None:
                if run.actors[actor.replaces].node_lost:
                    machine_lost = machine_lost.plus(more_us=_start_us(actor))
                else:
                    restarted = restarted.plus(more_us=_start_us(actor))
    return [fault for fault in (restarted, machine_lost, retried) if fault.count]


def _start_us(actor: ActorRecord) -> int:
    return max(0, actor.phases_us["startup"] + actor.phases_us["load"] - actor.restart_us)


def _share(tokens: Computed, generated: int) -> Computed:
    """Return `generated` of the generated tokens, and the same fraction of the prompt tokens."""
    if tokens.generated == 0:
        return tokens
    return Computed(tokens.prompt * generated // tokens.generated, generated)
