"""How far what was served is from a reference model (`quality.sample`), for a job's report, and its alarm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.report.record.quality_stats import QualityStats


@dataclass(frozen=True)
class QualityReport:
    """Of a job. agreement: share of tokens; kl_nats: the mean a token; same_texts: share of rows; *_right: share of the
    expected rows, None without any. drops: what has certainly dropped by more than max_drop, and by how much.
    quality_us: machine time that the comparison took, loading the reference left out."""

    sums: QualityStats
    agreement: float | None
    agreement_error: float
    kl_nats: float | None
    same_texts: float | None
    served_right: float | None
    reference_right: float | None
    max_drop: float
    drops: Mapping[str, float]
    quality_us: int

    @classmethod
    def of(cls, sums: QualityStats, quality_us: int, settings: Mapping[str, Any]) -> "QualityReport | None":
        """None where no row was to be compared. settings: the job file's section, as a run recorded it."""
        if not sums.rows and not sums.unmeasured:
            return None
        max_drop, rows, expected = settings.get("max_drop", 1.0), sums.rows, sums.expected_rows
        return cls(
            sums,
            sums.agreement,
            sums.agreement_error,
            sums.kl_nanonats / 1e9 / sums.tokens if sums.tokens else None,
            sums.same_texts / rows if rows else None,
            sums.served_right / expected if expected else None,
            sums.reference_right / expected if expected else None,
            max_drop,
            sums.drops(max_drop),
            quality_us,
        )

    def told(self) -> str:
        """For people: figures, what could not be compared, and the alarm."""
        parts = [self.sums.told()] if self.sums.rows else []
        if self.sums.unmeasured:
            why = ", ".join(f"{reason} {count:,}" for reason, count in self.sums.unmeasured.items())
            parts.append(f"rows that could not be compared: {why}")
        alarms = [f"ALARM: {told_drop(what, drop, self.max_drop)}" for what, drop in self.drops.items()]
        return "; ".join([*parts, *alarms])


def told_drop(what: str, drop: float, max_drop: float) -> str:
    shown = {"agreement": "token agreement", "right_answers": "the share of right answers"}[what]
    return f"{shown} has dropped by {100 * drop:.2f} points, and quality.max_drop is {100 * max_drop:g}"
