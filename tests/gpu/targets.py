"""Targets of these tests: a card, in its types and at the sizes of real models, and the CPU at small sizes.

On the CPU they repeat the checks of `tests/kernels` and `tests/engine`: see `conftest.py`.
"""

from dataclasses import dataclass

import pytest
import torch

from pipeline.kernels.contract import Kernels
from pipeline.kernels.select import select_kernels
from tests.gpu.inputs import Heads

LAYER_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 100, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
_ON_CARD = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))


@dataclass(frozen=True)
class Target:
    """Device, element type and shapes of the tests."""

    device: torch.device
    dtype: torch.dtype
    heads: tuple[Heads, ...]
    linears_NK: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    models: tuple[str, ...]  # shapes whose layers are tested at their own sizes
    layer_tokens: tuple[int, ...]  # of those layers' linears

    @property
    def type_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def kernels(self, keep_dense: bool = True, deterministic: bool = False) -> Kernels:
        return select_kernels(self.device, self.dtype, "auto", keep_dense, deterministic)

    def normal(self, *shape: int) -> torch.Tensor:
        random = torch.Generator(self.device).manual_seed(sum(shape))
        return torch.randn(shape, device=self.device, generator=random).to(self.dtype)


def _on_card(dtype: torch.dtype) -> Target:
    heads = Heads(32, 8, 128), Heads(16, 8, 128), Heads(14, 2, 64), Heads(4, 4, 64)
    linears_NK = (384, 256), (1536, 1024), (256, 896), (1024, 3072)
    device = torch.device("cuda", 0)  # torch.cuda.set_device refuses one without an index
    models = "llama3-8b-awq", "qwen3-0.6b"
    return Target(device, dtype, heads, linears_NK, (1, 3, 16, 33, 64, 200, 512), models, LAYER_TOKENS)


_CPU = Target(torch.device("cpu"), torch.float32, (Heads(14, 2, 64),), ((96, 256),), (1, 33), ("tiny-awq",), (1, 33))
TARGETS = pytest.mark.parametrize(
    "target",
    [
        pytest.param(_CPU, id="cpu", marks=pytest.mark.gpu),
        pytest.param(_on_card(torch.bfloat16), id="card, bfloat16", marks=_ON_CARD),
        pytest.param(_on_card(torch.float16), id="card, float16", marks=_ON_CARD),
    ],
)
