"""Progress of a running job: plain lines, and a bar on a terminal."""

import sys
from dataclasses import replace
from io import StringIO

from pipeline.cli.progress import PlainProgress, progress_for
from pipeline.job.telemetry.status import Status, status_line
from tests.cli.conftest import EVIL


def test_plain_progress_prints_changes_every_few_seconds_and_rarely_without_progress():
    now = [100.0]
    stream = StringIO()
    with PlainProgress(stream, every_s=5, still_every_s=30, clock=lambda: now[0]) as progress:
        progress(Status(phase="planning"))
        for second in range(40):
            now[0] += 1
            progress(Status(phase="loading", rows_total=100, elapsed_s=second))
        for second in range(12):
            now[0] += 1
            progress(Status(phase="running", rows_total=100, rows_done=second))
        progress(Status(phase="finished", rows_total=100, rows_done=100))
        progress(Status(phase="finished", rows_total=100, rows_done=100, error_rows=1))
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "planning", "loading", "loading (30 s)", "running", "running: 5%", "running: 10%",
        "finished: 100%", "finished: 100%",
    ]  # fmt: skip
    assert "(1 error row)" in lines[-1], "the last state is always printed"


def test_a_status_in_one_line():
    status = Status(phase="running", rows_total=2000, rows_done=1000, error_rows=3, input_tokens_per_s=1234.5,
                    generated_tokens_per_s=99, eta_s=300)  # fmt: skip
    assert status_line(status) == ("running: 50%, 1,000/2,000 rows (3 error rows), 1,234 tok/s in, 99 out, 5 min left")
    ended = replace(status, outcome="interrupted", phase="interrupted")
    assert status_line(ended) == "interrupted: 50%, 1,000/2,000 rows (3 error rows)"


def test_a_live_bar_is_drawn_on_a_terminal(monkeypatch):
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with progress_for() as progress:
        progress(Status(phase="generating [x]", rows_total=2000, rows_done=1000, eta_s=300))
    drawn = terminal.getvalue()
    for expected in ("generating [x]", "1,000/2,000 rows", "5 min left"):
        assert expected in drawn
    with progress_for() as progress:
        progress(Status(phase=f"reading {EVIL}"))
    assert "evil\\x1b[31mRED\\x1b]0;title" in terminal.getvalue()
    assert "\x1b]0;" not in terminal.getvalue()
