"""What speculative decoding did in a job, for its report: steps, acceptance, tokens per step, time saved.

The counts are the engines' (`EngineStats`, `SpeculationCounts`), summed over actors and runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.engine.speculation.counts import BucketLine, SpeculationCounts
from pipeline.engine.stats import EngineStats
from pipeline.report.record.run_record import RunRecord


@dataclass(frozen=True)
class Speculated:
    """steps: all of the engines, draft_steps those of them that computed drafts. drafted and accepted: by place after
    the known tokens, the last one all from there on. saved_us: what plain steps would have taken for the same tokens
    less what was taken, estimated by the measured costs of steps; below 0 when it cost. batches: by the number of
    sequences that ran at once; empty where drafts were forced, as nobody decided then.
    """

    steps: int
    draft_steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    saved_us: int
    batches: tuple[BucketLine, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[RunRecord]) -> "Speculated | None":
        """None where there was none."""
        names = {name for run in runs for actor in run.actors for name in actor.stats}
        totals = {name: sum(run.stat(name) for run in runs) for name in names}
        stats, counts = EngineStats.from_flat(totals), SpeculationCounts.from_flat(totals)
        batches = tuple(counts.lines())
        if not stats.num_draft_steps and not batches:
            return None
        return cls(
            steps=stats.num_steps,
            draft_steps=stats.num_draft_steps,
            drafted=_without_end(stats.drafted_by_place, stats.drafted_by_place),
            accepted=_without_end(stats.accepted_by_place, stats.drafted_by_place),
            saved_us=round(counts.saved_s * 1e6),
            batches=batches,
        )

    @property
    def acceptance(self) -> list[float]:
        """Of the drafts in each place, the share that was accepted."""
        return [accepted / drafted for drafted, accepted in zip(self.drafted, self.accepted)]


def _without_end(counts: list[int], drafted: list[int]) -> tuple[int, ...]:
    """Up to the last place that anything was drafted in."""
    return tuple(count for count, drafts in zip(counts, drafted) if drafts)
