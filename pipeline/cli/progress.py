"""Shows a running job: a live bar on a terminal, one plain line every few seconds elsewhere.

Owns what is shown only. `job` hands over a `Status` every second or so; everything goes to standard error, so that
standard output holds results alone.
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
    """A line at a change of phase and every few seconds while something moves, seldom while nothing does."""

    def __init__(
        self,
        stream: TextIO,
        every_s: float = PLAIN_EVERY_S,
        still_every_s: float = STILL_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        with_log: bool = False,
    ) -> None:
        """with_log: lines of the log are shown too, which say the same of a run once it has begun."""
        self._with_log = with_log
        self._stream, self._every_s, self._still_every_s, self._clock = stream, every_s, still_every_s, clock
        self._said_at = 0.0
        self._said: Status | None = None
        self._unsaid: Status | None = None

    def __enter__(self) -> "PlainProgress":
        return self

    def __exit__(self, *_: object) -> None:
        """The last state may have come between two lines."""
        if self._unsaid is not None:
            self._say(self._unsaid)

    def __call__(self, status: Status) -> None:
        if self._with_log and status.run_id and status.outcome == "running":
            return
        last = self._said
        wait_s = self._every_s if last is None or work(status) != work(last) else self._still_every_s
        is_new = last is None or (status.phase, status.warning) != (last.phase, last.warning)
        if is_new or self._clock() >= self._said_at + wait_s:
            self._say(status)
        else:
            self._unsaid = status

    def line(self, text: str) -> None:
        """Show a line of the log."""
        print(text, file=self._stream, flush=True)

    def _say(self, status: Status) -> None:
        if status.warning and (self._said is None or status.warning != self._said.warning):
            print(printable(f"warning: {status.warning}"), file=self._stream)
        print(printable(status_line(status)), file=self._stream, flush=True)
        self._said, self._said_at, self._unsaid = status, self._clock(), None


class LiveProgress:
    """A bar with rows, rates and the time left, redrawn in place."""

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
        with suppress(OSError):  # the terminal may be gone
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
            total=status.rows_total if any(work(status)) else None,  # None: a bar that moves
            completed=status.rows_done,
            line=counts(status),
        )


def progress_for(with_log: bool = False) -> PlainProgress | LiveProgress:
    """The drawing that fits where standard error goes. with_log: lines of the log are shown as well."""
    return LiveProgress() if sys.stderr.isatty() else PlainProgress(sys.stderr, with_log=with_log)
