"""How much a session's sections run: whole on a card, or just enough on a processor to see that they work."""

from dataclasses import dataclass

from pipeline.bench.gpu.kernels import kernel_times, linear_times, tile_times
from pipeline.bench.gpu.kernels.kernel_times import KernelCases
from pipeline.bench.gpu.kernels.tile_times import TileSizes
from pipeline.bench.gpu.task import Setting


@dataclass(frozen=True)
class Scale:
    """requests_by, tokens_by: divide the request sets. budget_s: of one measurement. rows, contexts: of `steps`;
    num_timed, num_traced: steps of each point there."""

    requests_by: int
    tokens_by: int
    budget_s: float
    copy_bytes: int
    gemm_sizes: tuple[int, ...]
    kernels: KernelCases
    tokens: tuple[int, ...]
    tiles: TileSizes
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    num_timed: int = 12
    num_traced: int = 8


FULL = Scale(
    1,
    1,
    0.1,
    2 << 30,
    (4096, 8192),
    kernel_times.FULL,
    linear_times.FULL_TOKENS,
    tile_times.FULL,
    (1, 8, 32, 64, 128, 256, 512),
    (256, 1024),
)
SMOKE = Scale(
    256,
    16,
    0.0,
    1 << 20,
    (64,),
    kernel_times.SMOKE,
    linear_times.SMOKE_TOKENS,
    tile_times.SMOKE,
    (1, 2),
    (20,),
    2,
    2,
)


def scale_of(setting: Setting) -> Scale:
    return SMOKE if setting.is_smoke else FULL
