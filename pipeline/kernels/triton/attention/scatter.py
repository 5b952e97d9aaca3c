"""First launch of a captured step's graph: moves what was copied to the device to where the graph reads it.

It writes block tables to their rows, and token ids that only the device knows to those of the step. The parameters
change from step to step, so they are part of the copy: `SCATTER_HEAD` numbers at its head.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

import numpy as np
import torch
import triton
import triton.language as tl

from pipeline.kernels.graph_attention import FutureNumbers
from pipeline.kernels.triton.launch import Launch

SCATTER_HEAD = 7  # int64
_SIZE, _PROGRAMS = 1024, 64


def scatter_head(table_SM: np.ndarray, table_at: int, window_table_at: int, future: FutureNumbers | None) -> np.ndarray:
    """Return the head of a copy that has `numbers` at its beginning, table_SM at `table_at` (in int32), and, if there
    is one, the block table of the layers with a window, of the same shape, at `window_table_at`."""
    at, count, address = (0, 0, 0) if future is None else (future.at, future.count, future.value_N.data_ptr())
    return np.array([*table_SM.shape, table_at, at, count, address, window_table_at], dtype=np.int64)


@triton.jit(do_not_specialize=["table_stride"])
def _scatter(head_ptr, copy_ptr, table_ptr, window_table_ptr, table_stride, SIZE: tl.constexpr):
    num_seqs, num_blocks = tl.load(head_ptr), tl.load(head_ptr + 1)
    copied_ptr, number_ptr = copy_ptr + tl.load(head_ptr + 2), copy_ptr.to(tl.pointer_type(tl.int64))
    index_ptr, num_future = number_ptr + tl.load(head_ptr + 3), tl.load(head_ptr + 4)
    window_copied_ptr = copy_ptr + tl.load(head_ptr + 6)
    value_ptr = tl.load(head_ptr + 5).to(tl.pointer_type(tl.int64))
    for first in range(
        tl.program_id(0) * SIZE, tl.maximum(num_seqs * num_blocks, num_future), tl.num_programs(0) * SIZE
    ):
        at = first + tl.arange(0, SIZE)
        is_block = at < num_seqs * num_blocks
        entry = at // num_blocks * table_stride + at % num_blocks
        tl.store(table_ptr + entry, tl.load(copied_ptr + at, mask=is_block, other=0), mask=is_block)
        if window_table_ptr is not None:
            block = tl.load(window_copied_ptr + at, mask=is_block, other=0)
            tl.store(window_table_ptr + entry, block, mask=is_block)
        is_future = at < num_future
        position = tl.load(index_ptr + at, mask=is_future, other=0)
        row = tl.load(index_ptr + num_future + at, mask=is_future, other=0)
        tl.store(number_ptr + position, tl.load(value_ptr + row, mask=is_future, other=0), mask=is_future)


def scatter_launch(
    head: torch.Tensor, copied: torch.Tensor, table_SM: torch.Tensor, window_table_SM: torch.Tensor | None
) -> Launch:
    """Return the launch that, as `head` specifies (`scatter_head` on the device), writes the block tables of the copy
    (int32) into the first rows and columns of these tables, and future values into the copy's numbers."""
    tables = table_SM, window_table_SM, table_SM.stride(0)
    return Launch(_scatter, (_PROGRAMS,), (head, copied, *tables), {"SIZE": _SIZE})
