"""Current speed of a run, and the remaining time at that speed.

Measured in computed tokens: cached tokens and rejected rows take no time.
"""

from collections import deque

from pipeline.data.output.part_totals import PartTotals
from pipeline.report.record.row_stats import Computed

WINDOW_S = 30.0


class Pace:
    """Tokens that a run's engines computed over the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Computed]] = deque()

    def add(self, now_s: float, computed: Computed) -> None:
        """Add the run's total at `now_s`. Time before the first token is loading and does not count."""
        if not computed.all:
            self._seen.clear()
        self._seen.append((now_s, computed))
        while len(self._seen) > 2 and self._seen[0][0] < now_s - WINDOW_S:
            self._seen.popleft()

    def per_s(self) -> tuple[float, float]:
        """Return prompt tokens and generated tokens computed per second."""
        (then_s, before), (now_s, now) = self._seen[0], self._seen[-1]
        grown, span_s = now.less(before), now_s - then_s
        return (grown.prompt / span_s, grown.generated / span_s) if span_s > 0 else (0.0, 0.0)

    def eta_s(self, num_rows: int, held: PartTotals, before: PartTotals) -> float | None:
        """Return the seconds until all rows are computed, from the mean tokens of the rows in the output (`held`;
        `before`: those of earlier runs). Tends to be too long, since long rows come first. None before the first unit
        and after the last."""
        tokens_per_s = sum(self.per_s())
        if not 0 < held.rows < num_rows or tokens_per_s <= 0:
            return None
        expected = held.num_computed_tokens / held.rows * num_rows
        return max(0.0, expected - before.num_computed_tokens - self._seen[-1][1].all) / tokens_per_s
