"""How long a card waits between a step's kernels and the next one's: the host's part that nothing hides.

Decoding steps of some rows are profiled: the card is idle where none of its kernels or copies runs. Profiling makes the
host slower, so the gap is an upper bound. Short pauses lie between two kernels of one captured step, whatever the host
does; long ones are waiting for the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.bench.request_sets import BenchRequest
from pipeline.engine.engine import Engine

STEPS = 32
SETTLE = 8  # decoding steps before those that count
LONG_PAUSE_S = 5e-6  # kernels of a captured step start one or two microseconds apart


@dataclass(frozen=True)
class Gap:
    """Of decoding steps of `sequences` rows: the card's time from the first kernel to the last, and what of it passed
    between kernels, where idle. host_s: of that, in pauses longer than LONG_PAUSE_S."""

    sequences: int
    steps: int
    span_s: float
    idle_s: float
    host_s: float

    @property
    def share(self) -> float:
        return self.idle_s / self.span_s

    def to_text(self) -> str:
        return (
            f"{self.sequences:,} rows decoding: {self.span_s / self.steps * 1e3:.2f} ms a step, of it idle "
            f"{self.idle_s / self.steps * 1e3:.3f} ms ({self.share:.1%}), {self.host_s / self.steps * 1e3:.3f} of it "
            f"in pauses of more than {LONG_PAUSE_S * 1e6:.0f} us"
        )


def measure_gap(engine: Engine, requests: Sequence[BenchRequest]) -> Gap | None:
    """Profile decoding of `requests`, whose prompts are all different, which have at least `SETTLE + STEPS + 2` tokens
    to generate each and fit the engine at once. None where there is no card to profile. They are aborted afterwards."""
    for number, request in enumerate(requests):
        engine.add(request.to_request(number))
    computed = engine.stats.prompt_tokens + sum(len(request.prompt_token_ids) for request in requests)
    while engine.has_unfinished and engine.stats.prompt_tokens < computed:
        engine.step()
    for _ in range(SETTLE):
        engine.step()
    intervals = _profiled(engine) if torch.cuda.is_initialized() else []
    for number in range(len(requests)):
        engine.abort(number)
    if not intervals:
        return None
    span_us = max(end for _, end in intervals) - min(start for start, _ in intervals)
    idle_s = [pause / 1e6 for pause in pauses(intervals)]
    return Gap(len(requests), STEPS, span_us / 1e6, sum(idle_s), sum(each for each in idle_s if each > LONG_PAUSE_S))


def _profiled(engine: Engine) -> list[tuple[float, float]]:
    """Beginning and end, in microseconds, of everything that the card did in `STEPS` steps."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type.name == "CUDA"
    ]


def pauses(intervals: Sequence[tuple[float, float]]) -> list[float]:
    """How long none of the intervals ran, each time between the first beginning and the last end."""
    found, until = list[float](), float("inf")
    for start, end in sorted(intervals):
        if start > until:
            found.append(start - until)
        until = end if until == float("inf") else max(until, end)
    return found
