"""What reasoning cost beside the answers (`sampling.reasoning`)."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.report.record.row_stats import ReasonedRows
from pipeline.report.sections.loops import charged


@dataclass(frozen=True)
class ReasoningCost:
    """Completed rows, or samples of them, that reasoned, the tokens of that, their share of all generated ones, and of
    the machine time and price that these are charged. usd: None where the job is unpriced."""

    rows: int
    tokens: int
    share: float
    machine_us: int
    usd: float | None

    @classmethod
    def of(
        cls, reasoned: ReasonedRows, machine_us: int, phases_us: Mapping[str, int], generated: int, usd: float | None
    ) -> "ReasoningCost | None":
        """None where no row reasoned. generated: tokens of all completed rows, which `usd` was charged to."""
        if not reasoned.rows:
            return None
        tokens = reasoned.tokens
        share = tokens / max(tokens, generated)
        return cls(reasoned.rows, tokens, share, *charged(tokens, machine_us, phases_us, generated, usd))
