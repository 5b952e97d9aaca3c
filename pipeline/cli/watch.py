"""Output of `pipeline status --watch`: rows, tokens and rates of the job and of each engine actor.

A table redrawn in place on a terminal, a line now and then elsewhere. The data is read from the output folder
(`job/output/run_follower.py`), so a job can be watched from any machine.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.cli.progress import PlainProgress
from pipeline.formatting import counted, duration, percent, printable
from pipeline.job.output.run_follower import RunFollower
from pipeline.job.telemetry.pace import Pace
from pipeline.report.record.run_record import ActorRecord, RunRecord

if TYPE_CHECKING:
    from pipeline.job.telemetry.status import Status

BAR_WIDTH = 40
HEAD_LINES = 9  # lines of the drawing without its actors
_DOING = {"startup": "starting", "load": "loading", "wasted": "recomputing"}


class ActorRates:
    """Current phase and rates of each actor, from the growth between records of one run."""

    def __init__(self) -> None:
        self._paces: dict[int, Pace] = {}
        self._phases: dict[int, dict[str, int]] = {}
        self._doing: dict[int, str] = {}
        self._at_us = -1

    def add(self, run: RunRecord) -> None:
        if run.wall_us == self._at_us:
            return  # the same record
        self._at_us = run.wall_us
        for actor in run.actors:
            self._paces.setdefault(actor.actor, Pace()).add(run.wall_us / 1e6, actor.computed)
            before = self._phases.get(actor.actor, {})
            grown = {phase: us - before.get(phase, 0) for phase, us in actor.phases_us.items()}
            self._phases[actor.actor] = dict(actor.phases_us)
            if any(grown.values()):
                phase = max(grown, key=lambda phase: grown[phase])
                self._doing[actor.actor] = _DOING.get(phase, phase)

    def current(self, actor: ActorRecord) -> tuple[str, float, float]:
        """Return an actor's phase, and its prompt and generated tokens per second."""
        pace = self._paces.get(actor.actor)
        return self._doing.get(actor.actor, ""), *(pace.per_s() if pace else (0.0, 0.0))


def watch_live(seen: RunFollower, target: str, stream: TextIO) -> None:
    """Redraw a table until the run is over; its last state stays visible."""
    console, rates = Console(file=stream, highlight=False), ActorRates()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            if seen.run is not None:
                rates.add(seen.run)
            live.update(drawing(seen, target, rates, console.height), refresh=True)
            if seen.is_over:
                return
            seen.wait()


def watch_lines(seen: RunFollower, stream: TextIO) -> None:
    """Print a line every few seconds while rows or tokens advance, until the run is over."""
    with PlainProgress(stream) as progress:
        _until_over(seen, progress)


def watch_json(seen: RunFollower, show: Callable[["Status", str | None], None]) -> None:
    """Call `show` for each status that differs from the previous one, until the run is over."""
    last: list[object] = []

    def changed(status: "Status") -> None:
        if last != [status, seen.staleness]:
            last[:] = [status, seen.staleness]
            show(status, seen.staleness)

    _until_over(seen, changed)


def _until_over(seen: RunFollower, show: Callable[["Status"], None]) -> None:
    show(seen.status)
    while not seen.is_over:
        seen.wait()
        show(seen.status)


def drawing(seen: RunFollower, target: str, rates: ActorRates, height: int) -> Group:
    """Return the drawing, at most `height` lines."""
    status, run = seen.status, seen.run
    head = Text(
        f"{printable(target)}: {printable(status.outcome if seen.staleness is None else 'stale')}", style="bold"
    )
    phase = "" if status.phase == status.outcome else f"{printable(status.phase)}, "
    head.append(f"  {phase}{duration(round(status.elapsed_s))}", style="not bold")
    bar = Table.grid(padding=(0, 2))
    share = status.rows_done / max(1, status.rows_total)
    errors = f" ({counted(status.error_rows, 'error row')})" if status.error_rows else ""
    left = "" if status.eta_s is None else f"{duration(round(status.eta_s))} left"
    bar.add_row(ProgressBar(max(1, status.rows_total), status.rows_done, width=BAR_WIDTH), percent(share), left)
    tokens = f"{status.input_tokens:,} tokens in, {status.generated_tokens:,} out"
    speed = f"{status.input_tokens_per_s:,.0f} tok/s in, {status.generated_tokens_per_s:,.0f} out"
    rows = f"{status.rows_done:,} of {status.rows_total:,} rows{errors}, {counted(status.units, 'unit')} written"
    lines = [head, bar, Text(rows), Text(f"{tokens}; {speed}")]
    if run is not None and run.actors:
        max_actors = max(1, height - HEAD_LINES)
        lines.append(_actors(run, rates, max_actors, not seen.is_over))
        if len(run.actors) > max_actors:
            lines.append(Text(f"and {len(run.actors) - max_actors:,} more actors", style="dim"))
    for note in (status.warning, seen.staleness):
        if note:
            lines.append(Text(printable(note), style="yellow"))
    return Group(*lines)


def _actors(run: RunRecord, rates: ActorRates, max_actors: int, is_running: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("actor")
    table.add_column("does", no_wrap=True, min_width=max(map(len, _DOING.values())))
    for name in ("units", "rows", "errors", "tok/s in", "tok/s out", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    for actor in run.actors[:max_actors]:
        doing, prompt_per_s, generated_per_s = rates.current(actor)
        rates_per_s = round(prompt_per_s), round(generated_per_s)
        counts = (actor.units, actor.rows, actor.error_rows, *rates_per_s, actor.restarts)
        table.add_row(str(actor.actor), doing if is_running else "", *(f"{count:,}" for count in counts))
    return table
