"""Sections of the benchmark, each in its own process with a time limit.

A section that fails, hangs or loses the card does not affect other sections, and keeps its results so far.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.stopwatch import Rates, Stopwatch
from benchmarks.shapes import model_size
from pipeline.engine.engine import Engine
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.kernels.select import default_dtype
from pipeline.roofline.cost_model import DecoderSize, Weights

BUDGET_S = 0.1  # for the runs of one timed call
PATIENCE_S = 5.0  # between SIGTERM and SIGKILL
EXIT_S = 20.0  # for a process to exit after closing its results; freeing a card's memory takes time


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Model and device of a section.

    model: a shape of `benchmarks.shapes` or a checkpoint. traces: file to append traces to. rates: measured rates
    of the device.
    """

    model: str
    device: torch.device
    is_smoke: bool
    traces: Path
    rates: Rates = Rates(1.0, 1.0)  # noqa: RUF009 (frozen)

    @property
    def dtype(self) -> torch.dtype:
        return default_dtype(self.device, torch.bfloat16)

    @property
    def size(self) -> DecoderSize:
        return model_size(self.model)[0]

    @property
    def weights(self) -> Weights:
        return model_size(self.model)[1]

    def stopwatch(self) -> Stopwatch:
        return Stopwatch(self.device, 0.0 if self.is_smoke else BUDGET_S)


@dataclass
class Found:
    """Results of a section so far. text: as tables. figures: as JSON. failures: of cases and of the section."""

    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Record an exception as a failure of this case, so that the next case runs."""
        try:
            yield
        except Exception as error:  # a failing kernel must not stop the other cases
            self.failed(name, error)

    def failed(self, name: str, error: Exception) -> None:
        traceback.print_exception(error)
        self.failures.append(f"{name}: {type(error).__name__}: {str(error).strip()[:500]}")


def launch_mixed_steps(engine: Engine) -> Callable[[], None]:
    """Launch steps with prompts kernel by kernel. The returned function switches back to replaying captured steps."""
    assert isinstance(engine.runner, ModelRunner)
    graphs = engine.runner._graphs
    if graphs is None:
        return lambda: None
    serves = graphs.supports

    def serves_decoding(step: StepInput) -> bool:
        return int(np.diff(step.query_start_S1).max()) <= graphs._attention.max_queries and serves(step)

    graphs.supports = serves_decoding  # pyright: ignore[reportAttributeAccessIssue]
    return lambda: setattr(graphs, "supports", serves)


Section = Callable[[Setting], Iterator[Found]]
"""Yields its updated result whenever there is more."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a section. verdict: done, failed, ended (at its time limit) or not started."""

    name: str
    verdict: str
    began_s: float
    seconds: float
    why: str = ""


class RunningSection:
    """Running section. Forked to avoid importing torch again, so the parent must not have initialized the card."""

    def __init__(self, name: str, section: Section, setting: Setting, log: Path) -> None:
        assert not torch.cuda.is_initialized(), "a forked process could not use the card"
        self.name, self.found, self._log, self._began = name, Found(), log, time.monotonic()
        context = multiprocessing.get_context("fork")
        self._results, results = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(name, section, setting, log, results), daemon=True)
        self._process.start()
        results.close()

    def wait(self, limit_s: float, session_began: float) -> Outcome:
        """Wait until the section has ended, or end it after `limit_s` seconds."""
        until = time.monotonic() + limit_s
        is_over = False
        while not is_over and time.monotonic() < until:
            try:
                if self._results.poll(min(1.0, max(until - time.monotonic(), 0.0))):
                    self.found = self._results.recv()
            except (EOFError, OSError):  # OSError: the process ended while sending a result
                is_over = True
        self.end(EXIT_S if is_over else 0.0)
        verdict, reason = "done", ""
        if not is_over:
            verdict, reason = "ended", f"after {limit_s:.0f} s; log: {self._log_end()}"
        elif self._process.exitcode != 0:
            verdict, reason = "failed", f"exit code {self._process.exitcode}; log: {self._log_end()}"
        elif self.found.failures:
            verdict, reason = "failed", f"{len(self.found.failures)} failures, the first: {self.found.failures[0]}"
        now = time.monotonic()
        return Outcome(self.name, verdict, self._began - session_began, now - self._began, reason)

    def end(self, patience_s: float) -> None:
        """Wait up to `patience_s` for its exit, then end it and its child processes."""
        self._process.join(patience_s)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid or 0, number)
            self._process.join(PATIENCE_S)

    def _log_end(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return " | ".join(lines[-3:])[-500:]


def _run(name: str, section: Section, setting: Setting, log: Path, results: Connection) -> None:
    """Run a section in its own process and process group, with its output in the log."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `with` blocks end their child processes
    faulthandler.register(signal.SIGTERM, file=2, chain=True)
    print(f"=== {name}")
    if setting.device.type == "cuda":
        torch.cuda.set_device(setting.device)
    found = Found()
    try:
        for found in section(setting):
            results.send(found)
    except Exception as error:
        found.failed(name, error)
        results.send(found)
