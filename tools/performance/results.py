"""Results files: what `pipeline bench ... --json` printed, and figures that the log had before.

A file is one JSON object. `bench`, `command`, `machine` and `date` have to be there. The rest is what the benchmark
says, or the part of it that is known. `what` names the work in words, `commit` the commit that first reported it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

REQUIRED = ("bench", "command", "machine", "date")
BENCHES = (
    "gpu",
    "engine",
    "job",
    "speculation",
    "scheduler",
    "ladder",
    "plan",
    "cluster",
    "admission",
    "schedule",
    "choice",
    "figures",
)
VECTORS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512", "avx2": "AVX2"}  # the best one first


class ResultError(ValueError):
    """A results file that cannot be read. The message names it."""


@dataclass(frozen=True)
class Figure:
    """A median with its spread. median is None where only the bounds are known; low is None where there was one run."""

    median: float | None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, told: Any) -> "Figure":
        """From a number, a list of repetitions, or the object that benchmarks print."""
        if isinstance(told, list):
            return cls(median(told), min(told), max(told)) if len(told) > 1 else cls(told[0])
        if not isinstance(told, dict):
            return cls(told)
        if told.get("count") == 1:
            return cls(told["median"])
        return cls(told.get("median"), told.get("low"), told.get("high"))

    @property
    def cautious(self) -> float:
        """The median, or the lower bound where that is all."""
        value = self.low if self.median is None else self.median
        assert value is not None
        return value

    def meets(self, aim: float, lower_is_better: bool = False) -> bool:
        if lower_is_better:
            return (self.high if self.median is None and self.high is not None else self.cautious) <= aim
        return self.cautious >= aim

    def to_text(self, digits: int = 2, unit: str = "") -> str:
        """`1.16x (1.15 to 1.18)`; a share is shown in percent."""
        scale = 100 if unit == "%" else 1

        def number(value: float | None) -> str:
            return "" if value is None else f"{value * scale:,.{digits}f}"

        if self.median is None:
            return f"{number(self.low)} to {number(self.high)}{unit}"
        bounds = "" if self.low is None else f" ({number(self.low)} to {number(self.high)})"
        return f"{number(self.median)}{unit}{bounds}"


@dataclass(frozen=True)
class Result:
    """One file. name: its path below the folder of results, without `.json`."""

    name: str
    data: dict[str, Any]

    @property
    def bench(self) -> str:
        return self.data["bench"]

    @property
    def date(self) -> str:
        return self.data["date"]

    @property
    def dtype(self) -> str:
        return self.data.get("dtype", "")

    @property
    def what(self) -> str:
        """The work in words. A line of a benchmark has `work`, `about` or `text` instead."""
        told = (self.data.get(key) for key in ("what", "work", "about", "text"))
        return next((text for text in told if text), self.bench)

    def option(self, name: str, default: str = "") -> str:
        """What its command gave for an option."""
        words = self.data["command"].split()
        return words[words.index(name) + 1] if name in words else default

    @property
    def machine(self) -> str:
        """The widest vectors of its processor; two machines of this page differ in nothing that counts more."""
        cpu = self.data["machine"]["cpu"]
        return next((name for flag, name in VECTORS.items() if flag in cpu), cpu)

    @property
    def place(self) -> str:
        """Machine and data type, as tables name them."""
        return f"{self.machine}, {self.dtype}" if self.dtype else self.machine

    def speed(self, contender: str) -> dict[str, Any]:
        """Of `bench engine`: the contender whose name begins so. Raises ResultError when there is none."""
        for speed in self.data["speeds"]:
            if speed["name"].startswith(contender):
                return speed
        raise ResultError(f"{self.name}: no contender {contender!r}")

    def speedup(self, batch: int, way: str, tail: bool = False) -> Figure | None:
        """Of `bench speculation`: how many times as fast as plain steps. None where that was not measured."""
        for told in self.data["batches"]:
            ways = {each["name"]: each for each in told["ways"]}
            if told["batch"] != batch or way not in ways:
                continue
            ratio, seconds = ("tail_by_plain", "tail_s") if tail else ("by_plain", "seconds")
            if ratio in ways[way]:
                return Figure.of(ways[way][ratio])
            if seconds in ways[way]:
                return Figure.of([a / b for a, b in zip(told["ways"][0][seconds], ways[way][seconds], strict=True)])
        return None

    def figure(self, name: str) -> Figure:
        """One figure by the name that `docs/performance/aims.json` gives it. Raises ResultError when it is not there.

        engine: a contender, or `alone: ` and a contender. job: `job_by_engine`, or a peer. scheduler: running rows;
        milliseconds. figures: their own names.
        """
        try:
            return self._figure(name)
        except (KeyError, StopIteration) as error:
            raise ResultError(f"{self.name}: no figure {name!r}") from error

    def _figure(self, name: str) -> Figure:
        if self.bench == "engine":
            ratio = "single_faster" if name.startswith("alone: ") else "faster"
            return Figure.of(self.speed(name.removeprefix("alone: "))[ratio])
        if self.bench == "job":
            return Figure.of(self.data[name] if name == "job_by_engine" else self.data["peer_by_job"][name])
        if self.bench == "scheduler":
            return step_ms(next(cost for cost in self.data["costs"] if cost["sequences"] == int(name)))
        return Figure.of(self.data["figures"][name])


def step_ms(cost: dict[str, Any]) -> Figure:
    """Host time of a step from one entry of `bench scheduler`, with bounds where several runs were put together."""
    bounds = (cost.get(f"step_us_{bound}") for bound in ("low", "high"))
    return Figure(cost["step_us"] / 1e3, *(None if bound is None else bound / 1e3 for bound in bounds))


def load(folder: Path) -> list[Result]:
    """All files below `folder`, oldest first. Raises ResultError for one that is not a result."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ResultError(f"{name}: expected one JSON object, the last line of a benchmark: {error}") from error
        if missing := [key for key in REQUIRED if key not in data]:
            raise ResultError(f"{name}: without {', '.join(missing)}")
        if data["bench"] not in BENCHES:
            raise ResultError(f"{name}: bench {data['bench']!r}; expected one of {', '.join(BENCHES)}")
        found.append(Result(name, data))
    return sorted(found, key=lambda result: (result.date, result.name))


def newest(results: Sequence[Result], bench: str, **data: Any) -> Result:
    """The latest result of a benchmark whose fields are these. Raises ResultError when there is none."""
    for result in reversed(results):
        if result.bench == bench and all(result.data.get(key) == value for key, value in data.items()):
            return result
    raise ResultError(f"no result of bench {bench} with {data}")
