"""Results and cost of features that only some jobs use: drafts, loops and reasoning, the quality watch.

Counts are those of the engines (`EngineStats`, `SpeculationCounts`) and of the rows, summed over actors and runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.engine.speculation.counts import BucketLine, SpeculationCounts
from pipeline.engine.stats import EngineStats
from pipeline.formatting import percent
from pipeline.report.record.quality_stats import QualityStats
from pipeline.report.record.run_record import RunRecord, split_exactly


@dataclass(frozen=True)
class Speculation:
    """steps: all of the engines, draft_steps those of them that computed drafts. The `_by_position` are counted after
    the known tokens, the last one all from there on. saved_us: what plain steps would have taken for the same tokens
    less what was taken, estimated by the measured costs of steps; below 0 when it cost. batches: by the number of
    sequences that ran at once; empty where drafts were forced.
    """

    steps: int
    draft_steps: int
    draft_tokens_by_position: tuple[int, ...]
    accepted_tokens_by_position: tuple[int, ...]
    saved_us: int
    batches: tuple[BucketLine, ...] = ()

    @classmethod
    def from_runs(cls, runs: Sequence[RunRecord]) -> "Speculation | None":
        """None where there was none."""
        names = {name for run in runs for actor in run.actors for name in actor.stats}
        totals = {name: sum(run.stat(name) for run in runs) for name in names}
        stats, counts = EngineStats.from_flat(totals), SpeculationCounts.from_flat(totals)
        batches = tuple(counts.lines())
        if not stats.num_draft_steps and not batches:
            return None
        used = sum(map(bool, stats.drafted_by_position))  # positions in which anything was drafted
        return cls(
            steps=stats.num_steps,
            draft_steps=stats.num_draft_steps,
            draft_tokens_by_position=tuple(stats.drafted_by_position[:used]),
            accepted_tokens_by_position=tuple(stats.accepted_by_position[:used]),
            saved_us=round(counts.saved_s * 1e6),
            batches=batches,
        )

    @property
    def rejected_tokens(self) -> int:
        return sum(self.draft_tokens_by_position) - sum(self.accepted_tokens_by_position)


@dataclass(frozen=True)
class TokensCost:
    """Some of the generated tokens of completed rows, their share of all, and the machine time and price that they are
    charged. usd: None where the job is unpriced."""

    rows: int
    tokens: int
    share: float
    machine_us: int
    usd: float | None

    @classmethod
    def charge(
        cls,
        rows: int,
        tokens: int,
        *,
        machine_us: int,
        phases_us: Mapping[str, int],
        generated_tokens: int,
        generated_usd: float | None,
    ) -> "TokensCost | None":
        """None without rows. generated_tokens: of all completed rows, which `generated_usd` was charged to."""
        if not rows:
            return None
        _, for_generated_us = split_exactly(machine_us, [phases_us["prefill"], phases_us["decode"]])
        whole = max(tokens, generated_tokens)
        usd = None if generated_usd is None else generated_usd * tokens / whole
        return cls(rows, tokens, tokens / whole, for_generated_us * tokens // whole, usd)


@dataclass(frozen=True)
class QualityReport:
    """Difference between the output and a reference model (`quality.sample`). kl_nats_per_token is a mean; the
    `_correct_share` are of the rows with an expected answer, None without any. drops: what has certainly dropped by
    more than max_drop, and by how much. machine_us: time of the comparison, without loading the reference."""

    sums: QualityStats
    token_agreement: float | None
    token_agreement_error: float
    kl_nats_per_token: float | None
    same_text_share: float | None
    served_correct_share: float | None
    reference_correct_share: float | None
    max_drop: float
    drops: Mapping[str, float]
    machine_us: int

    @classmethod
    def from_sums(cls, sums: QualityStats, machine_us: int, settings: Mapping[str, Any]) -> "QualityReport | None":
        """None where no row was to be compared. settings: the job file's section, as a run recorded it."""
        if not sums.rows and not sums.unmeasured:
            return None
        max_drop, expected = settings.get("max_drop", 1.0), sums.expected_rows
        return cls(
            sums=sums,
            token_agreement=sums.agreement,
            token_agreement_error=sums.agreement_error,
            kl_nats_per_token=sums.kl_nanonats / 1e9 / sums.tokens if sums.tokens else None,
            same_text_share=sums.same_texts / sums.rows if sums.rows else None,
            served_correct_share=sums.served_right / expected if expected else None,
            reference_correct_share=sums.reference_right / expected if expected else None,
            max_drop=max_drop,
            drops=sums.drops(max_drop),
            machine_us=machine_us,
        )

    def to_text(self) -> str:
        """Return figures, what could not be compared, and the alarm."""
        parts = [self.sums.to_text()] if self.sums.rows else []
        if self.sums.unmeasured:
            why = ", ".join(f"{reason} {count:,}" for reason, count in self.sums.unmeasured.items())
            parts.append(f"rows that could not be compared: {why}")
        alarms = [f"ALARM: {drop_text(what, drop, self.max_drop)}" for what, drop in self.drops.items()]
        return "; ".join([*parts, *alarms])


def drop_text(what: str, drop: float, max_drop: float) -> str:
    label = {"agreement": "token agreement", "right_answers": "the share of right answers"}[what]
    return f"{label} has dropped by {percent(drop)}, and quality.max_drop is {percent(max_drop)}"
