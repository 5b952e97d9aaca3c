"""Figures that can be compared: medians with their spread, ratios of pairs, the facts of the machine, and tables."""

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from pipeline.errors import PipelineError
from pipeline.formatting import table as drawn_table
from pipeline.machine.host import VECTOR_FLAGS, available_cores, package_versions, processor

PACKAGES = ("torch", "transformers", "numba", "ray")


@dataclass(frozen=True)
class Spread:
    """Median and range of some repetitions."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        assert len(values) > 0
        return cls(median(values), min(values), max(values), len(values))

    def to_text(self, digits: int = 2) -> str:
        """`1.23 (1.10 to 1.31)`, without the bounds where there was one repetition."""
        if self.count == 1:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """ours / theirs, each pair taken in the same round: what slows the machine for a while slows both."""
    assert len(ours) == len(theirs)
    return Spread.of([a / b for a, b in zip(ours, theirs)])


def alternating(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Return the order of each round: every other one backwards, so that none always runs on the warmer machine."""
    return [list(names) if number % 2 == 0 else list(reversed(names)) for number in range(rounds)]


def table(columns: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a head and a line for each row. columns: `name <8 | seconds >9.2f`, the head of each column and the format
    of its values. A column is as wide as its format says, or as its longest value. None is an empty cell; text is shown
    unchanged."""
    parts = [column.rpartition(" ") for column in columns.split(" | ")]
    formats = [spec for _, _, spec in parts]
    widths = [spec[0] + re.findall(r"\d+", spec)[0] for spec in formats]

    def cells(values: Sequence[object]) -> list[str]:
        return [
            format("" if value is None else value, width if value is None or isinstance(value, str) else spec)
            for value, spec, width in zip(values, formats, widths, strict=True)
        ]

    head = cells([head.strip() for head, _, _ in parts])
    return drawn_table(map(cells, rows), head=head, sides="".join(spec[0] for spec in formats)).split("\n")


def last_line(command: list[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a process and return its last line, as JSON. `environment` None is this process's. Raises PipelineError with
    the end of its standard error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise PipelineError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def machine_facts() -> dict[str, str]:
    """Processor, cores, load and versions, without which a figure says nothing."""
    model, flags = processor()
    return {
        "cpu": f"{model} ({', '.join(flag for flag in VECTOR_FLAGS if flag in flags) or 'no AVX2'})",
        "cores": f"{available_cores()} of {os.cpu_count()}",
        "threads": str(torch.get_num_threads()),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
    } | package_versions(PACKAGES)


def use_threads(threads: int | None) -> None:
    """Set the threads of this process, so that an engine and its contenders have the same. None: torch's choice."""
    if threads is not None:
        torch.set_num_threads(min(threads, os.cpu_count() or 1))


def facts_to_text(facts: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def fastest(call: Callable[[], object], passes: int, min_s: float = 0.0) -> float:
    """Return the least seconds of some passes after one that warms up, and of more until all took `min_s`."""
    call()
    taken: list[float] = []
    while len(taken) < passes or sum(taken) < min_s:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)
