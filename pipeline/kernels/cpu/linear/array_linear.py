"""What linears of compiled kernels have in common: they write into arrays that are kept from step to step."""

from abc import ABC, abstractmethod

import numpy as np
import torch

from pipeline.kernels.cpu.compile.numerics import bits
from pipeline.kernels.cpu.compile.threads import use_threads


class ArrayLinear(ABC):
    """y = x @ weight.T + bias; the bias in float32."""

    def __init__(self, shape_NK: tuple[int, int], bias_N: torch.Tensor | None) -> None:
        self.shape_NK = shape_NK
        self.bias_N = None if bias_N is None else bias_N.to(torch.float32)

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        num_tokens = x_MK.shape[0]
        out_MN = x_MK.new_empty(num_tokens, self.shape_NK[0])
        use_threads(self.is_parallel(num_tokens))
        self.write(bits(x_MK.contiguous()), bits(out_MN))
        return out_MN

    @abstractmethod
    def is_parallel(self, num_tokens: int) -> bool:
        """Whether so many tokens are worth more than one thread."""

    @abstractmethod
    def write(self, x_MK: np.ndarray, out_MN: np.ndarray) -> None:
        """y to `out_MN`, on as many threads as compiled kernels run on now. Both contiguous, in float32 or, where a
        linear takes them, as bits of bfloat16."""
