"""Progress of a running job on standard error: a live bar on a terminal, a plain line every few seconds elsewhere.

`job` passes a `Status` about every second.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from pipeline.formatting import printable
from pipeline.job.telemetry.status import Status, counts, status_line, work

PLAIN_EVERY_S = 5.0
STILL_EVERY_S = 30.0


class PlainProgress:
    """Prints a line at a change of phase, every few seconds while rows or tokens advance, and less often otherwise."""

    def __init__(
        self,
        stream: TextIO,
        every_s: float = PLAIN_EVERY_S,
        still_every_s: float = STILL_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        with_log: bool = False,
    ) -> None:
        """with_log: log lines are printed too, so status lines are not needed once the run has begun."""
        self._with_log = with_log
        self._stream, self._every_s, self._still_every_s, self._clock = stream, every_s, still_every_s, clock
        self._printed_at = 0.0
        self._printed: Status | None = None
        self._pending: Status | None = None

    def __enter__(self) -> "PlainProgress":
        return self

    def __exit__(self, *_: object) -> None:
        """Print the last status if it is newer than the last line."""
        if self._pending is not None:
            self._print(self._pending)

    def __call__(self, status: Status) -> None:
        if self._with_log and status.run_id and status.outcome == "running":
            return
        last = self._printed
        wait_s = self._every_s if last is None or work(status) != work(last) else self._still_every_s
        is_new = last is None or (status.phase, status.warning) != (last.phase, last.warning)
        if is_new or self._clock() >= self._printed_at + wait_s:
            self._print(status)
        else:
            self._pending = status

    def line(self, text: str) -> None:
        """Show a line of the log."""
        print(text, file=self._stream, flush=True)

    def _print(self, status: Status) -> None:
        if status.warning and (self._printed is None or status.warning != self._printed.warning):
            print(printable(f"warning: {status.warning}"), file=self._stream)
        print(printable(status_line(status)), file=self._stream, flush=True)
        self._printed, self._printed_at, self._pending = status, self._clock(), None


class LiveProgress:
    """Progress bar with rows, rates and the time left, redrawn in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[line]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("planning", total=None, line="")
        self._warning = ""

    def __enter__(self) -> "LiveProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # the terminal may have been closed
            self._bar.stop()

    def line(self, text: str) -> None:
        """Show a line of the log, above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def __call__(self, status: Status) -> None:
        from rich.markup import escape

        if status.warning != self._warning:
            self._warning = status.warning
            self._bar.console.print(f"warning: {escape(printable(status.warning))}")
        self._bar.update(
            self._task,
            description=escape(printable(status.phase)),
            total=status.rows_total if any(work(status)) else None,  # None draws a pulsing bar
            completed=status.rows_done,
            line=counts(status),
        )


def progress_for(with_log: bool = False) -> PlainProgress | LiveProgress:
    """Return a bar if standard error is a terminal, else plain lines. with_log: log lines are shown as well."""
    return LiveProgress() if sys.stderr.isatty() else PlainProgress(sys.stderr, with_log=with_log)
