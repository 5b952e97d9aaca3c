"""Processes side by side, each with a time limit and a log: one that fails, hangs or loses its card costs only itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.bench.gpu.task import Setting, Task

PATIENCE_S = 2.0  # between SIGTERM and SIGKILL
LOST_S = 3.0  # after which a process that SIGKILL does not end is left alone
POLL_S = 0.05

Verdict = Literal["done", "failed", "ended", "not started"]


@dataclass(frozen=True)
class Outcome:
    """What became of a task. began_s: after the session's beginning. why: of all but `done`."""

    name: str
    verdict: Verdict
    began_s: float
    seconds: float
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Running:
    """A started task. It leads a process group, so that its own children end with it."""

    def __init__(self, task: Task, setting: Setting, environment: Mapping[str, str], limit_s: float) -> None:
        self.task, self.began = task, time.monotonic()
        self.until, self.limit_s = self.began + limit_s, limit_s
        self.log = setting.results / f"{task.name}.log"
        command = [sys.executable, "-m", "pipeline.bench.gpu.sections", task.command_line(setting)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def end(self) -> str:
        """Stop it, whatever it does. What to say beyond that, where it does not go."""
        for number, patience_s in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, LOST_S)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(patience_s)
            except ProcessLookupError:
                self.process.wait()
            except subprocess.TimeoutExpired:
                continue
            try:
                os.killpg(self.process.pid, signal.SIGKILL)  # what it started and did not wait for
            except ProcessLookupError:
                pass
            return ""
        return "; it did not go on SIGKILL and may still hold the card"

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[-500:]


def run_side_by_side(
    tasks: Sequence[Task],
    setting: Setting,
    environment: Mapping[str, str],
    left_s: Callable[[], float],
    session_began: float,
) -> list[Outcome]:
    """Start all `tasks` and wait until the last has ended or was ended: at its limit, or when no time is left."""
    running = [Running(task, setting, environment, min(task.limit_s, left_s())) for task in tasks]
    outcomes: list[Outcome] = []

    def over(each: Running, verdict: Verdict, why: str = "") -> None:
        running.remove(each)
        now, began_s = time.monotonic(), each.began - session_began
        outcomes.append(Outcome(each.task.name, verdict, began_s, now - each.began, why))

    try:
        while running:
            for each in list(running):
                code = each.process.poll()
                if code is not None:
                    why = "" if code == 0 else f"left with {code}: {each.last_words()}"
                    over(each, "failed" if code else "done", why)
                elif time.monotonic() > each.until or left_s() <= 0:
                    what = "the budget's end" if left_s() <= 0 else f"its limit of {each.limit_s:.0f} s"
                    over(each, "ended", f"at {what}{each.end()}; last words: {each.last_words()}")
            time.sleep(POLL_S if running else 0.0)
    finally:
        for each in running:  # where the session itself is stopped
            each.end()
    return outcomes
