"""Copies metadata of a step to the GPU: int32 arrays in one device tensor, filled by one copy from pinned memory."""

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.kernels.transfer import staging_buffer

_ALIGNED = 4  # numbers of 4 bytes: see `Launch`


class StagedArrays:
    """Views of one int32 tensor, each aligned, which one copy fills."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        self.tensor = torch.zeros(sum(self._padded), dtype=torch.int32, device=device)
        self.views = [part[:size] for part, size in zip(self.tensor.split(self._padded), sizes)]

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """Overwrite the beginning of each view. The copy is queued on the current stream and waits for nothing."""
        staged = staging_buffer(self.tensor.shape, self.tensor.device)
        filled, offset = staged.numpy(), 0
        for array, view, padded in zip(arrays, self.views, self._padded, strict=True):
            assert array.size <= view.numel(), "more than was allocated"
            filled[offset : offset + array.size] = array.ravel()
            offset += padded
        self.tensor.copy_(staged, non_blocking=True)
