"""Time calls on a device, and measure the device's rates of copies and matrix products.

On a GPU a call is captured in a CUDA graph and replayed between two CUDA events, as in the engine's captured steps, so
its time excludes launching kernels one by one. Before each run a buffer larger than the L2 cache is read, while the
host runs ahead. Writing the buffer instead would still move data to memory during the timed call.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.measure import fastest
from pipeline.engine.forward.graphs import CudaCapture
from pipeline.errors import PipelineError

FLUSH_BYTES = 256 << 20  # larger than any L2 cache
NUM_WARM_UPS = 2
MIN_RUNS, MAX_RUNS = 3, 30
COPY_BYTES, GEMM_SIZES = 4 << 30, (4096, 8192)
SMOKE_COPY_BYTES, SMOKE_GEMM_SIZES = 1 << 20, (64,)


class Stopwatch:
    """Median seconds of calls on one device.

    budget_s: time for the runs of one call, with at least MIN_RUNS runs. not_captured: why calls could not be captured;
    their times include launches.
    """

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device, self.budget_s = device, budget_s
        self.not_captured: list[str] = []
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self._flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
            self._sum = torch.empty((), dtype=torch.float32, device=device)

    @torch.inference_mode()
    def seconds(self, call: Callable[[], object]) -> float:
        for _ in range(NUM_WARM_UPS):
            call()
        run = self._captured(call) if self.on_gpu else call
        run_s = self._gpu_seconds if self.on_gpu else _clock_seconds
        began, runs = time.perf_counter(), list[float]()
        while len(runs) < MIN_RUNS or (len(runs) < MAX_RUNS and time.perf_counter() - began < self.budget_s):
            runs.append(run_s(run))
        return median(runs)

    def complaints(self) -> list[str]:
        return [f"launched kernel by kernel: {reason}" for reason in dict.fromkeys(self.not_captured)]

    def _captured(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a function that replays `call`, or `call` itself if it cannot be captured."""
        try:
            replay = CudaCapture()(call)  # new pool: one whose graphs were all freed takes no new graph
        except PipelineError as reason:
            self.not_captured.append(str(reason))
            torch.cuda.synchronize(self.device)  # raises if the card is lost
            return call
        replay()
        return replay

    def _gpu_seconds(self, run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(self._flush, dim=0, out=self._sum)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def _clock_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Rates:
    """Rates of a device. copy_bytes_per_s: bytes read and written. gemm_flops_per_s: best of several square GEMMs."""

    copy_bytes_per_s: float
    gemm_flops_per_s: float

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """Return the longer of the times to move `num_bytes` and to compute `flops`."""
        return max(num_bytes / self.copy_bytes_per_s, flops / self.gemm_flops_per_s)

    def to_text(self) -> str:
        return (
            f"copies {self.copy_bytes_per_s / 1e9:,.0f} GB/s (read and written), GEMMs "
            f"{self.gemm_flops_per_s / 1e12:,.1f} TFLOP/s"
        )


def measure_rates(device: torch.device, dtype: torch.dtype, is_smoke: bool) -> Rates:
    """Time a copy of several GiB and square GEMMs, launched without a CUDA graph, whose copy nodes are slower than
    torch's copy kernel."""
    copy_bytes, sizes = (SMOKE_COPY_BYTES, SMOKE_GEMM_SIZES) if is_smoke else (COPY_BYTES, GEMM_SIZES)
    random = torch.Generator(device).manual_seed(0)

    def copy_rate() -> float:
        source = torch.rand(copy_bytes // 4, dtype=torch.float32, device=device, generator=random)
        target = torch.empty_like(source)
        return 2 * copy_bytes / _launched_seconds(lambda: target.copy_(source), device)

    def gemm_rate(size: int) -> float:
        x_MK, weight_NK = (torch.randn(size, size, device=device, generator=random).to(dtype) for _ in range(2))
        return 2.0 * size**3 / _launched_seconds(lambda: F.linear(x_MK, weight_NK), device)

    return Rates(copy_rate(), max(gemm_rate(size) for size in sizes))


@torch.inference_mode()
def _launched_seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return fastest(call, 3)
    from triton.testing import do_bench

    median_ms: Any = do_bench(call, warmup=50, rep=200, return_mode="median")
    return median_ms / 1e3
