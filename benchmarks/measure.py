"""Medians with their spread, paired ratios, facts about the machine, and tables."""

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
from pipeline.formatting import table as format_table
from pipeline.machine.host import VECTOR_FLAGS, available_cores, package_versions, processor

PACKAGES = ("torch", "transformers", "numba", "ray")


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Spread":
        assert len(values) > 0
        return cls(median(values), min(values), max(values), len(values))

    def to_text(self, digits: int = 2) -> str:
        """Return `1.23 (1.10 to 1.31)`, or only `1.23` for a single repetition."""
        if self.count == 1:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the spread of ours / theirs, paired by round, since a temporary slowdown affects both."""
    assert len(ours) == len(theirs)
    return Spread.from_values([a / b for a, b in zip(ours, theirs)])


def alternating(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Return the order of each round. Every other round is reversed, so that none always runs on a warmer machine."""
    return [list(names) if number % 2 == 0 else list(reversed(names)) for number in range(rounds)]


def table(columns: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a header line and one line per row.

    columns: the header and the format of each column, like `name <8 | seconds >9.2f`. A column is at least as wide as
    its format says and as its longest value. None is an empty cell. Text ignores the column's number format.
    """
    parts = [column.rpartition(" ") for column in columns.split(" | ")]
    formats = [spec for _, _, spec in parts]
    widths = [spec[0] + re.findall(r"\d+", spec)[0] for spec in formats]

    def cells(values: Sequence[object]) -> list[str]:
        return [
            format("" if value is None else value, width if value is None or isinstance(value, str) else spec)
            for value, spec, width in zip(values, formats, widths, strict=True)
        ]

    head = cells([head.strip() for head, _, _ in parts])
    return format_table(map(cells, rows), head=head, sides="".join(spec[0] for spec in formats)).split("\n")


def last_line(command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a process and return its last output line, parsed as JSON.

    Raises PipelineError with the end of its standard error when it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise PipelineError(f"{' '.join(command)} exited with code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def machine_facts() -> dict[str, str]:
    """Return the processor, cores, load and package versions to report with a measurement."""
    model, flags = processor()
    return {
        "cpu": f"{model} ({', '.join(flag for flag in VECTOR_FLAGS if flag in flags) or 'no AVX2'})",
        "cores": f"{available_cores()} of {os.cpu_count()}",
        "threads": str(torch.get_num_threads()),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
    } | package_versions(PACKAGES)


def use_threads(threads: int | None) -> None:
    """Set torch's threads in this process, so that all engines use the same number. None keeps torch's default."""
    if threads is not None:
        torch.set_num_threads(min(threads, os.cpu_count() or 1))


def facts_to_text(facts: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def fastest(call: Callable[[], object], passes: int, min_s: float = 0.0) -> float:
    """Return the shortest call's seconds, after a warm-up call. Makes at least `passes` calls, of `min_s` in total."""
    call()
    seconds: list[float] = []
    while len(seconds) < passes or sum(seconds) < min_s:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
