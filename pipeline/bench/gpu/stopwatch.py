"""How long work takes on a device: CUDA events on a card, the processor's clock elsewhere.

On a card the second-level cache is overwritten before each run, as the rest of a step would; the host runs ahead during
that, so that starting a kernel is not in its time unless the host is slower than that overwriting.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

FLUSH_BYTES = 256 << 20  # more than any card's second-level cache
WARM_UPS = 2
MIN_RUNS, MAX_RUNS = 3, 30


class Stopwatch:
    """`seconds` of calls on one device. budget_s: of one measurement, which then stops at MIN_RUNS at the least."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device, self.budget_s = device, budget_s
        self.on_gpu = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if self.on_gpu else None

    @torch.inference_mode()
    def seconds(self, call: Callable[[], object]) -> float:
        """The median of some runs, after some that do not count."""
        for _ in range(WARM_UPS):
            call()
        self.wait()
        began, runs = time.perf_counter(), list[float]()
        while len(runs) < MIN_RUNS or (len(runs) < MAX_RUNS and time.perf_counter() - began < self.budget_s):
            runs.append(self._once(call))
        return median(runs)

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _once(self, call: Callable[[], object]) -> float:
        if self._flush is None:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3
