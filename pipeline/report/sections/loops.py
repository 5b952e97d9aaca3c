"""What rows cost that repeated themselves (`sampling.repetition_detection`)."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.report.record.row_stats import LoopedRows
from pipeline.report.record.run_record import split_exactly


@dataclass(frozen=True)
class LoopCost:
    """Completed rows that ended as loops, their generated tokens, and the share of machine time and price that these
    are charged. usd: None where the job is unpriced."""

    rows: int
    generated_tokens: int
    machine_us: int
    usd: float | None

    @classmethod
    def of(
        cls, looped: LoopedRows, machine_us: int, phases_us: Mapping[str, int], generated: int, usd: float | None
    ) -> "LoopCost | None":
        """None where no row looped. generated: tokens of all completed rows, which `usd` was charged to."""
        if not looped.rows:
            return None
        tokens = looped.generated_tokens
        return cls(looped.rows, tokens, *charged(tokens, machine_us, phases_us, generated, usd))


def charged(
    tokens: int, machine_us: int, phases_us: Mapping[str, int], generated: int, usd: float | None
) -> tuple[int, float | None]:
    """The machine time and price of some of the generated tokens of completed rows, as `LoopCost.of` has them."""
    _, for_generated_us = split_exactly(machine_us, [phases_us["prefill"], phases_us["decode"]])
    generated = max(tokens, generated)
    return for_generated_us * tokens // generated, None if usd is None else usd * tokens / generated
