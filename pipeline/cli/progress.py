"""Shows a running job: a live bar on a terminal, one plain line every few seconds elsewhere.

Owns what is shown only. `job` hands over a `Status` every second or so; everything goes to standard error, so that
standard output holds results alone.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from pipeline.formatting import duration, printable

if TYPE_CHECKING:
    from pipeline.job.telemetry.status import Status

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
    ) -> None:
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

    def __call__(self, status: "Status") -> None:
        last = self._said
        wait_s = self._every_s if last is None or _work(status) != _work(last) else self._still_every_s
        is_new = last is None or (status.phase, status.warning) != (last.phase, last.warning)
        if is_new or self._clock() >= self._said_at + wait_s:
            self._say(status)
        else:
            self._unsaid = status

    def _say(self, status: "Status") -> None:
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

    def __call__(self, status: "Status") -> None:
        from rich.markup import escape

        if status.warning != self._warning:
            self._warning = status.warning
            self._bar.console.print(f"warning: {escape(printable(status.warning))}")
        self._bar.update(
            self._task,
            description=escape(printable(status.phase)),
            total=status.rows_total if any(_work(status)) else None,  # None: a bar that moves
            completed=status.rows_done,
            line=_counts(status),
        )


def progress_for(stream: Any = None) -> PlainProgress | LiveProgress:
    """The drawing that fits where standard error goes."""
    stream = stream or sys.stderr
    return LiveProgress() if stream.isatty() else PlainProgress(stream)


def status_line(status: "Status") -> str:
    """A status in one line of text."""
    if not any(_work(status)):
        elapsed = f" ({duration(status.elapsed_s)})" if status.elapsed_s >= 1 else ""
        return f"{status.phase}{elapsed}"
    share = 100 * status.rows_done / max(1, status.rows_total)
    return f"{status.phase}: {share:.1f} %, {_counts(status)}"


def _work(status: "Status") -> tuple[int, ...]:
    """What moves when anything does."""
    return status.rows_done, status.error_rows, status.input_tokens, status.generated_tokens


def _counts(status: "Status") -> str:
    if not any(_work(status)):
        return ""
    counts = f"{status.rows_done:,}/{status.rows_total:,} rows"
    if status.error_rows:
        counts += f" ({status.error_rows:,} errors)"
    if status.outcome != "running" or status.rows_done >= status.rows_total:
        return counts
    counts += f", {status.input_tokens_per_s:,.0f} tok/s in, {status.generated_tokens_per_s:,.0f} out"
    return counts if status.eta_s is None else f"{counts}, {duration(status.eta_s)} left"
