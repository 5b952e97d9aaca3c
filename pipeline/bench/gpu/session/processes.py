"""Processes side by side, each with a time limit and a log: one that fails, hangs or loses its card costs only itself.

They are forked from this process, which has imported what they need: importing it anew takes seconds each time, and a
session has some forty of them. So nothing here may touch the card, or compute with torch: its threads and a card's
driver do not survive a fork.
"""

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import torch

from pipeline.bench.gpu.sections.process import run_task
from pipeline.bench.gpu.task import Outcome, Setting, Task, Verdict

PATIENCE_S = 2.0  # between SIGTERM and SIGKILL
LOST_S = 3.0  # after which a process that SIGKILL does not end is left alone
POLL_S = 0.02


class Running:
    """A started task. It leads a process group, so that its own children end with it."""

    def __init__(
        self, task: Task, setting: Setting, environment: Mapping[str, str], threads: int | None, limit_s: float
    ) -> None:
        """threads: that torch computes with; None for its own choice."""
        self.task, self.began = task, time.monotonic()
        self.until, self.limit_s = self.began + limit_s, limit_s
        self.log = setting.results / f"{task.name}.log"
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(task, setting, environment, threads, str(self.log))

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                self._signal(signal.SIGKILL)  # to what it started and did not wait for
        return self._code

    def end(self) -> str:
        """Stop it and what it started, whatever they do. What there is to say where it does not go."""
        for number, patience_s in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, LOST_S)):
            self._signal(number)
            until = time.monotonic() + patience_s
            while self.poll() is None and time.monotonic() < until:
                time.sleep(POLL_S)
            if self._code is not None:
                return ""
        return "; it did not go on SIGKILL and may still hold the card"

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            return
        if self._code is None:  # it has just been forked, and leads no group yet
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " | ".join(lines[-4:])[-500:]


def _become(task: Task, setting: Setting, environment: Mapping[str, str], threads: int | None, log: str) -> NoReturn:
    """The task's process, from its fork to its end. Asked to end, it writes where it stands into its log."""
    code = 1
    try:
        os.setsid()
        place = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for number in (1, 2):
            os.dup2(place, number)
        sys.stdin = open(os.devnull)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGTERM, file=2, chain=True)
        os.environ.update(environment)
        if threads is not None:
            torch.set_num_threads(threads)
        code = run_task(task, setting)
    except BaseException:  # also an exit that a library asks for
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the parent's is to be tidied up here


def asked_apart(question: Callable[[], str]) -> str:
    """What `question` answers in a process of its own: it may touch the card, which this one must not."""
    end, start = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(start, question().encode())
        finally:
            os._exit(0)
    os.close(start)
    with open(end, "rb") as told:
        answer = told.read().decode()
    os.waitpid(pid, 0)
    return answer


def run_side_by_side(
    tasks: Sequence[Task],
    setting: Setting,
    environment: Mapping[str, str],
    left_s: Callable[[], float],
    session_began: float,
) -> list[Outcome]:
    """Start all `tasks` and wait until the last has ended or was ended: at its limit, or when no time is left."""
    assert not torch.cuda.is_initialized(), "a forked process could not use the card"
    threads = max(1, (os.cpu_count() or 1) // len(tasks)) if len(tasks) > 1 else None
    running: list[Running] = []
    outcomes: list[Outcome] = []

    def over(each: Running, verdict: Verdict, why: str = "") -> None:
        running.remove(each)
        now, began_s = time.monotonic(), each.began - session_began
        outcomes.append(Outcome(each.task.name, verdict, began_s, now - each.began, why))

    try:
        for task in tasks:
            running.append(Running(task, setting, environment, threads, min(task.limit_s, left_s())))
        while running:
            for each in list(running):
                code = each.poll()
                if code is not None:
                    why = "" if code == 0 else f"left with {code}: {each.last_words()}"
                    over(each, "failed" if code else "done", why)
                elif time.monotonic() > each.until or left_s() <= 0:
                    what = "the budget's end" if left_s() <= 0 else f"its limit of {each.limit_s:g} s"
                    over(each, "ended", f"at {what}{each.end()}; it stood at: {each.last_words()}")
            time.sleep(POLL_S if running else 0.0)
    finally:
        for each in running:  # where the session itself is stopped
            each.end()
    return outcomes
