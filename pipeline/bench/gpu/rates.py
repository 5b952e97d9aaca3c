"""What a device reaches alone, copying memory and multiplying matrices: what everything else is held against."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pipeline.bench.gpu.stopwatch import Stopwatch


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
