"""How long work takes on a device, and what it reaches alone, copying memory and multiplying matrices.

Time is taken by CUDA events on a card, by the clock elsewhere. On a card the work is captured in a CUDA graph and
replayed where that can be, as in the engine's steps, so that starting its kernels one by one is not in its time. Before
each run a buffer larger than the second-level cache is read, as the rest of a step would do: written data would wait
there and be written back during what is timed. The host runs ahead while that is read.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F

FLUSH_BYTES = 256 << 20  # more than any card's second-level cache
WARM_UPS = 2
MIN_RUNS, MAX_RUNS = 3, 30


class Stopwatch:
    """`seconds` of calls on one device. budget_s: of one measurement, which then stops at MIN_RUNS at the least.
    num_launched: measurements of work that could not be captured and was launched anew in each run."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device, self.budget_s, self.num_launched = device, budget_s, 0
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
            self._sum = torch.empty((), dtype=torch.float32, device=device)
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def seconds(self, call: Callable[[], object]) -> float:
        """The median of some runs, after some that do not count."""
        for _ in range(WARM_UPS):
            call()
        self.wait()
        once = self._on_clock if not self.on_gpu else self._on_card
        run = self._captured(call) if self.on_gpu else call
        began, runs = time.perf_counter(), list[float]()
        while len(runs) < MIN_RUNS or (len(runs) < MAX_RUNS and time.perf_counter() - began < self.budget_s):
            runs.append(once(run))
        return median(runs)

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _captured(self, call: Callable[[], object]) -> Callable[[], object]:
        """What replays `call`; itself, where it waits for the device or copies from pageable memory.

        Not by `torch.cuda.graph`, which collects garbage and gives all cached memory back each time.
        """
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool)
                try:
                    call()
                finally:
                    graph.capture_end()
        except RuntimeError:
            self.num_launched += 1
            self._pool = torch.cuda.graph_pool_handle()  # the one before may count as being captured into
            self.wait()  # raises where the card is lost
            return call
        before.wait_stream(self._stream)
        graph.replay()
        return graph.replay

    @staticmethod
    def _on_clock(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def _on_card(self, run: Callable[[], object]) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(self._flush, dim=0, out=self._sum)
        before.record()
        run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3


@dataclass(frozen=True)
class Rates:
    """copy_bytes_per_s counts bytes read and bytes written; gemm_flops_per_s is the best of some square products in the
    type that is measured."""

    copy_bytes_per_s: float
    gemm_flops_per_s: float

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """The longer of moving so many bytes and computing so many operations."""
        return max(num_bytes / self.copy_bytes_per_s, flops / self.gemm_flops_per_s)

    def to_text(self) -> str:
        return (
            f"Measured alone: copying {self.copy_bytes_per_s / 1e9:,.0f} GB/s (read and written), products "
            f"{self.gemm_flops_per_s / 1e12:,.2f} TFLOP/s."
        )


def measure_rates(stopwatch: Stopwatch, dtype: torch.dtype, copy_bytes: int, gemm_sizes: tuple[int, ...]) -> Rates:
    """`copy_bytes` are copied once over; gemm_sizes: of the square matrices."""

    def copied_per_s() -> float:
        source = torch.zeros(copy_bytes, dtype=torch.int8, device=stopwatch.device)
        target = torch.empty_like(source)
        return 2 * copy_bytes / stopwatch.seconds(lambda: target.copy_(source))

    def flops_per_s(size: int) -> float:
        x_MK, weight_NK = (torch.randn(size, size, device=stopwatch.device).to(dtype) for _ in range(2))
        return 2.0 * size**3 / stopwatch.seconds(lambda: F.linear(x_MK, weight_NK))

    return Rates(copied_per_s(), max(flops_per_s(size) for size in gemm_sizes))
