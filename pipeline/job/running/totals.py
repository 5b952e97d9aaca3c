"""What the output holds as far as a run knows, and whether `run.max_error_rate` can still be kept."""

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import DoneUnits, PartStore
from pipeline.errors import TooManyRowErrors
from pipeline.job.telemetry.run_log import RunLog


class OutputTotals:
    """The parts that stood at the start, and what the run has told of since.

    `before`: about what the parts hold that stood, whose names are `stood`; None where `before` is exact.
    """

    def __init__(
        self, store: PartStore, log: RunLog, before: PartTotals, stood: DoneUnits | None, num_rows: int, limit: float
    ) -> None:
        """num_rows: of the input. limit: `run.max_error_rate`."""
        self._store, self._log, self._stood = store, log, stood
        self._num_rows, self._limit = num_rows, limit
        self.before = before
        self._counted: PartTotals | None = None

    def now(self) -> PartTotals:
        return self._counted or self.before + self._log.written + self._log.lost

    def set_counted(self, totals: PartTotals) -> None:
        """Every part was looked at: from now on this is what the output holds."""
        self._counted = totals

    def check_error_rate(self, counted: PartTotals | None = None) -> None:
        """Raise TooManyRowErrors as soon as the limit cannot be kept any more, however the rest goes. `counted`: what
        the output holds, if every part was looked at."""
        failed = (counted or self.now()).num_error_rows
        if counted is None and self._stood is not None and self._too_many(failed):
            # `before` is only what runs have recorded: now look, once
            self.before, self._stood = self._store.totals(self._stood), None
            failed = self.now().num_error_rows
        if self._too_many(failed):
            first = "".join(f"\n  {line}" for line in self._log.first_errors)
            raise TooManyRowErrors(
                f"{failed} error rows of {self._num_rows} rows are more than run.max_error_rate {self._limit:g} allows."
                f"{' The first ones:' + first if first else ' See the error column of the parts.'}\n"
                "Mend the input or raise the limit."
            )

    def _too_many(self, failed: int) -> bool:
        return bool(failed) and failed / self._num_rows > self._limit
