"""Totals of the output as far as a run knows them, and the check of `run.max_error_rate`."""

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import DoneUnits, PartStore
from pipeline.errors import TooManyRowErrors
from pipeline.job.telemetry.run_log import RunLog


class OutputTotals:
    """Parts that existed at the start, plus those that the run has reported since.

    `before`: approximate totals of the parts `existing` at the start. `existing` is None if `before` is exact.
    """

    def __init__(
        self, store: PartStore, log: RunLog, before: PartTotals, existing: DoneUnits | None, num_rows: int, limit: float
    ) -> None:
        """num_rows: rows of the input. limit: `run.max_error_rate`."""
        self._store, self._log, self._existing = store, log, existing
        self._num_rows, self._limit = num_rows, limit
        self.before = before
        self._counted: PartTotals | None = None

    def now(self) -> PartTotals:
        return self._counted or self.before + self._log.written + self._log.lost

    def set_counted(self, totals: PartTotals) -> None:
        """Set the totals after every part was read."""
        self._counted = totals

    def check_error_rate(self, counted: PartTotals | None = None) -> None:
        """Raise TooManyRowErrors as soon as the limit must be exceeded in the end. `counted`: totals of the output
        after every part was read."""
        failed = (counted or self.now()).num_error_rows
        if counted is None and self._existing is not None and self._too_many(failed):
            # `before` is only what runs recorded: read the parts, once
            self.before, self._existing = self._store.totals(self._existing), None
            failed = self.now().num_error_rows
        if self._too_many(failed):
            first = "".join(f"\n  {line}" for line in self._log.first_errors)
            raise TooManyRowErrors(
                f"{failed} error rows of {self._num_rows} rows exceed run.max_error_rate {self._limit:g}."
                f"{' The first ones:' + first if first else ' See the error column of the parts.'}\n"
                "Fix the input or raise the limit."
            )

    def _too_many(self, failed: int) -> bool:
        return bool(failed) and failed / self._num_rows > self._limit
