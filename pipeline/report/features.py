"""Report figures of optional features: speculation, loops, reasoning, and quality monitoring.

Counts come from engines (`EngineStats`, `SpeculationCounts`) and rows, summed over actors and runs.
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
    """Figures of speculative decoding.

    steps: all engine steps. draft_steps: steps with drafts. The `_by_position` counts start after the known tokens; the
    last one includes all later positions. saved_us: time that plain steps would have taken for the same tokens minus
    the actual time, estimated from measured step costs; negative for a loss. batches: figures by the number of running
    sequences; empty if drafts were forced.
    """

    steps: int
    draft_steps: int
    draft_tokens_by_position: tuple[int, ...]
    accepted_tokens_by_position: tuple[int, ...]
    saved_us: int
    batches: tuple[BucketLine, ...] = ()

    @classmethod
    def from_runs(cls, runs: Sequence[RunRecord]) -> "Speculation | None":
        """Sum the figures of runs; None without speculation."""
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
    """Share of the generated tokens of completed rows, with its machine time and cost. usd: None if the job is
    unpriced."""

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
        """Charge `tokens` their part of machine time and cost; None without rows. generated_tokens: of all completed
        rows, the divisor of `generated_usd`."""
        if not rows:
            return None
        _, for_generated_us = split_exactly(machine_us, [phases_us["prefill"], phases_us["decode"]])
        whole = max(tokens, generated_tokens)
        usd = None if generated_usd is None else generated_usd * tokens / whole
        return cls(rows, tokens, tokens / whole, for_generated_us * tokens // whole, usd)


@dataclass(frozen=True)
class QualityReport:
    """Difference between the output and a reference model (`quality.sample`).

    kl_nats_per_token: a mean. The `_correct_share` fields cover rows with an expected answer; None without any. drops:
    figures that dropped by significantly more than max_drop, with the drop. machine_us: time of the comparison, without
    loading the reference.
    """

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
        """Compute the figures; None if no row was sampled. settings: the job file's section, from a run record."""
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
        """Return the figures, the reasons of rows without a comparison, and alarms."""
        parts = [self.sums.to_text()] if self.sums.rows else []
        if self.sums.unmeasured:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.sums.unmeasured.items())
            parts.append(f"rows that could not be compared: {reasons}")
        alarms = [f"ALARM: {drop_text(figure, drop, self.max_drop)}" for figure, drop in self.drops.items()]
        return "; ".join([*parts, *alarms])


def drop_text(figure: str, drop: float, max_drop: float) -> str:
    label = {"agreement": "token agreement", "right_answers": "the share of right answers"}[figure]
    return f"{label} dropped by {percent(drop)}, more than quality.max_drop ({percent(max_drop)})"
