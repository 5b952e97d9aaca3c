"""Copies of per-step data to the GPU: arrays in one tensor, filled by one copy from pinned memory."""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.graph_attention import FutureNumbers, GraphShape
from pipeline.kernels.memory import staging_buffer
from pipeline.kernels.triton.attention.scatter import SCATTER_HEAD, scatter_head, scatter_launch

_ALIGNED = 4  # numbers of 4 bytes: see `Launch`


class StagedArrays:
    """Aligned views of one int32 tensor, which one copy fills, followed by `extra_size` numbers that vary per step."""

    def __init__(self, sizes: Sequence[int], device: torch.device, extra_size: int = 0) -> None:
        self._padded = [_aligned(size) for size in sizes]
        self.tensor = torch.zeros(sum(self._padded) + extra_size, dtype=torch.int32, device=device)
        *parts, self.extra = self.tensor.split([*self._padded, extra_size])
        self.views = [part[:size] for part, size in zip(parts, sizes)]

    def fill(self, arrays: Sequence[np.ndarray], extra: Sequence[np.ndarray] = ()) -> None:
        """Overwrite the beginning of each view, and of the space after them with the aligned arrays `extra`. The copy
        is queued on the current stream, without waiting."""
        size = sum(self._padded) + sum(words_of(array) for array in extra)
        staged = staging_buffer((size,), self.tensor.device)
        filled, offset = staged.numpy(), 0
        for array, view, padded in zip(arrays, self.views, self._padded, strict=True):
            assert array.size <= view.numel(), "more than was allocated"
            filled[offset : offset + array.size] = array.ravel()
            offset += padded
        for array in extra:
            words = np.ascontiguousarray(array).ravel().view(np.int32)
            filled[offset : offset + len(words)] = words
            offset += words_of(array)
        self.tensor[:size].copy_(staged, non_blocking=True)


class StagedStep:
    """All inputs of a captured step from the host: arrays of fixed size, the runner's numbers, and block tables.

    `fill` sends them in one copy. The graph begins with `unpack`, which moves them to where the rest of it reads them.
    """

    def __init__(self, sizes: Sequence[int], shape: GraphShape, device: torch.device) -> None:
        """`sizes` are those of the arrays. `numbers` (int64) is a view of the runner's numbers, always sent first."""
        table = shape.max_seqs, shape.max_blocks
        room = _aligned(2 * shape.num_numbers) + (1 + shape.has_window_blocks) * _aligned(prod(table))
        self._staged = StagedArrays([2 * SCATTER_HEAD, *sizes], device, room)
        head, *self.arrays = self._staged.views
        self._head = head.view(torch.int64)
        self.numbers = self._staged.extra[: 2 * shape.num_numbers].view(torch.int64)
        self.block_table_SM = torch.zeros(table, dtype=torch.int32, device=device)
        self.window_block_table_SM = torch.zeros_like(self.block_table_SM) if shape.has_window_blocks else None

    def table_of(self, window: int | None) -> torch.Tensor:
        """Return the block table of the layers with this window."""
        own = self.window_block_table_SM
        return self.block_table_SM if window is None or own is None else own

    def fill(
        self,
        arrays: Sequence[np.ndarray],
        numbers: np.ndarray,
        attn_metadata: AttentionInput,
        future: FutureNumbers | None,
    ) -> None:
        """Send a step's arrays, the runner's numbers and its block tables."""
        tables = [each.block_table_SM for each in (attn_metadata, attn_metadata.windowed) if each is not None]
        tables = tables[: 1 if self.window_block_table_SM is None else 2]
        assert numbers.dtype == np.int64
        assert all(table_SM.dtype == np.int32 for table_SM in tables)
        at = words_of(numbers)
        head = scatter_head(tables[0], at, at + words_of(tables[0]), future)
        self._staged.fill([head.view(np.int32), *arrays], [numbers, *tables])

    def unpack(self) -> None:
        scatter_launch(self._head, self._staged.extra, self.block_table_SM, self.window_block_table_SM).run()


def words_of(array: np.ndarray) -> int:
    """Return the number of 4-byte words of an array, padded for the alignment of the next one."""
    return _aligned(array.nbytes // 4)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
