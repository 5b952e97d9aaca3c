"""Compiled linears: a weight in tiles, and the kernel for its kind."""

import numpy as np
import torch

from pipeline.kernels.cpu.compile.numerics import bits
from pipeline.kernels.cpu.compile.threads import ALL_ITEMS, use_threads
from pipeline.kernels.cpu.linear.linear_kernel import linear_kernel
from pipeline.kernels.cpu.tiles.weight_tiles import tiles

Scratch = tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]


class TiledLinear:
    """Linear y = x @ weight.T + bias, the bias in float32. Its kernel writes into arrays, which callers may reuse."""

    PARALLEL_PRODUCTS = 1 << 23
    """Products below this stay on one thread: waking another one costs more than it saves."""
    READING = 12
    """Number of products that take as long as reading and widening one weight."""

    def __init__(
        self,
        kind: str,
        shape_NK: tuple[int, int],
        bias_N: torch.Tensor | None,
        words_TWL: np.ndarray,
        scales_TBL: np.ndarray | None = None,
        zeros_TBL: np.ndarray | None = None,
        block: int = 0,
    ) -> None:
        """`kind` and the arguments that its weights need: see `linear_kernel`."""
        self.kind, self.shape_NK, self.block = kind, shape_NK, block
        self.words_TWL, self.scales_TBL = words_TWL, scales_TBL
        bias_N = torch.zeros(shape_NK[0]) if bias_N is None else bias_N.to(torch.float32)
        bias_TL = tiles(bias_N.numpy()[:, None])[:, 0]
        self._weight = words_TWL, scales_TBL, zeros_TBL, block, bias_TL, *ALL_ITEMS
        self._multiply = linear_kernel(kind)

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        num_tokens = x_MK.shape[0]
        out_MN = x_MK.new_empty(num_tokens, self.shape_NK[0])
        use_threads(self.is_parallel(num_tokens))
        self.write(bits(x_MK.contiguous()), bits(out_MN))
        return out_MN

    def is_parallel(self, num_tokens: int) -> bool:
        """Return whether this many tokens justify more than one thread."""
        return (num_tokens + self.READING) * self.shape_NK[0] * self.shape_NK[1] >= self.PARALLEL_PRODUCTS

    def write(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        """Write y to `out_MN`, on numba's current number of threads. Both arrays are contiguous, in float32 or, if the
        kind supports it, bits of bfloat16."""
        self._multiply(x_MK, out_MN, *self._scratch(x_MK), *self._weight)

    def _scratch(self, x_MK: np.ndarray) -> Scratch:
        """Return the kernel's byte_MK, scale_MB and sum_MB."""
        return None, None, None
