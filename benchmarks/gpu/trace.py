"""Figures of steps from a profiler's trace: time of a captured step, its kernels by name, and pauses of the card.

Reads the file that `torch.profiler` exports (Chrome's trace format, times in microseconds). Profiling slows down the
host, so the card's waits are upper bounds. Short pauses occur between kernels of a captured step, independently of the
host. Long pauses are waits for the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

LONG_PAUSE_US = 5.0  # kernels of a captured step start one or two microseconds apart
ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cuda_runtime", "cuda_driver")
NUM_KERNELS = 12  # listed by name; others are summed
NAME_LENGTH = 80
OTHERS = "others"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Traced:
    """Figures of several steps of one kind, in seconds per step.

    replay_s: median time from the first to the last kernel of a captured step; None if no step was captured. busy_s:
    time in which the card ran something. idle_s: remaining time between the very first and last kernel. host_s: part of
    idle_s in pauses longer than LONG_PAUSE_US. kernels: name -> seconds.
    """

    num_steps: int
    replay_s: float | None
    busy_s: float
    idle_s: float
    host_s: float
    kernels: dict[str, float]

    @property
    def idle_share(self) -> float:
        """Return idle_s as a share of the time from the first kernel to the last."""
        return self.idle_s / (self.busy_s + self.idle_s)


@dataclass(frozen=True)
class Window:
    """Marked interval of the host's time. launched_s: until its last launch. device_s: the card's busy time for it."""

    launched_s: float
    device_s: float
    num_launches: int


class Trace:
    """Events of a profiler's trace, in Chrome's format."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        whole = [event for event in events if event.get("ph") == "X"]
        self._card = [event for event in whole if event.get("cat") in ON_CARD]
        self._host = [event for event in whole if event.get("cat") in ON_HOST]
        self._marks = [event for event in whole if event.get("cat") == "user_annotation"]

    def steps(self, num_steps: int) -> Traced | None:
        """Return the figures of a trace of exactly `num_steps` steps, or None if nothing ran on a card."""
        if not self._card:
            return None
        intervals = [_interval(event) for event in self._card]
        idle = pauses(intervals)
        span_us = max(end for _, end in intervals) - min(start for start, _ in intervals)
        by_name: dict[str, float] = {}
        for event in self._card:
            name = str(event["name"])[:NAME_LENGTH]
            by_name[name] = by_name.get(name, 0.0) + event["dur"]
        largest = sorted(by_name, key=lambda name: -by_name[name])
        kernels = {name: by_name[name] / num_steps / 1e6 for name in largest[:NUM_KERNELS]}
        if rest := sum(by_name[name] for name in largest[NUM_KERNELS:]):
            kernels[OTHERS] = rest / num_steps / 1e6
        replays = self._replays_us()
        each = 1e-6 / num_steps
        return Traced(
            num_steps,
            median(replays) / 1e6 if replays else None,
            (span_us - sum(idle)) * each,
            sum(idle) * each,
            sum(pause for pause in idle if pause > LONG_PAUSE_US) * each,
            kernels,
        )

    def windows(self, mark: str) -> list[Window]:
        """Return each interval marked `mark`."""
        found = []
        for start, end in (_interval(event) for event in self._marks if event["name"] == mark):
            launches = [event for event in self._host if start <= event["ts"] <= end and _correlation(event)]
            of_card = {_correlation(event) for event in launches}
            ran = [_interval(event) for event in self._card if _correlation(event) in of_card]
            if ran:
                caused = {_correlation(event) for event in self._card} & of_card
                last = max(event["ts"] + event["dur"] for event in launches if _correlation(event) in caused)
                found.append(Window((last - start) / 1e6, _busy(ran) / 1e6, len(caused)))
        return found

    def _replays_us(self) -> list[float]:
        graphs = {_correlation(event) for event in self._host if "GraphLaunch" in event["name"]} - {0}
        spans: dict[int, Interval] = {}
        for event in self._card:
            number = _correlation(event)
            if number in graphs:
                start, end = _interval(event)
                before = spans.get(number, (start, end))
                spans[number] = min(before[0], start), max(before[1], end)
        return [end - start for start, end in spans.values()]


def pauses(intervals: Sequence[Interval]) -> list[float]:
    """Return the length of each gap between the first start and the last end in which no interval runs."""
    found, until = list[float](), float("inf")
    for start, end in sorted(intervals):
        if start > until:
            found.append(start - until)
        until = end if until == float("inf") else max(until, end)
    return found


def _busy(intervals: Sequence[Interval]) -> float:
    span = max(end for _, end in intervals) - min(start for start, _ in intervals)
    return span - sum(pauses(intervals))


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _correlation(event: dict[str, Any]) -> int:
    """Return the id that a launch on the host and its work on the card share, or 0."""
    return int(event.get("args", {}).get("correlation", 0))
