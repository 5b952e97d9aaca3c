"""Puts what was copied to the device for a captured step where the graph reads it, in one launch: block tables into
their rows, and token ids that only the device knows among those of the step."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not see what `triton.jit` makes of a function.

import torch
import triton
import triton.language as tl

from pipeline.kernels.contract import FutureNumbers
from pipeline.kernels.triton.launch import Launch

_SIZE = 1024


@triton.jit(
    do_not_specialize=["copied_ptr", "index_ptr", "value_ptr", "table_stride", "num_seqs", "num_blocks", "num_future"]
)
def _scatter(
    table_ptr,
    copied_ptr,
    number_ptr,
    index_ptr,
    value_ptr,
    table_stride,
    num_seqs,
    num_blocks,
    num_future,
    SIZE: tl.constexpr,
):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_block = at < num_seqs * num_blocks
    block = tl.load(copied_ptr + at, mask=is_block, other=0)
    tl.store(table_ptr + (at // num_blocks).to(tl.int64) * table_stride + at % num_blocks, block, mask=is_block)
    is_future = at < num_future
    place = tl.load(index_ptr + at, mask=is_future, other=0)
    row = tl.load(index_ptr + num_future + at, mask=is_future, other=0)
    tl.store(number_ptr + place, tl.load(value_ptr + row, mask=is_future, other=0), mask=is_future)


def scatter_launch(
    table_SM: torch.Tensor, copied_SM: torch.Tensor, numbers: torch.Tensor, future: FutureNumbers | None
) -> Launch:
    """copied_SM (contiguous) into the first rows and columns of table_SM; of the int64 `numbers`, those that
    `FutureNumbers` says."""
    num_seqs, num_blocks = copied_SM.shape
    num_future, values, index = (
        (0, numbers, numbers) if future is None else (future.count, future.value_N, numbers[future.at :])
    )
    return Launch(
        _scatter,
        (triton.cdiv(max(num_seqs * num_blocks, num_future), _SIZE),),
        (table_SM, copied_SM, numbers, index, values, table_SM.stride(0), num_seqs, num_blocks, num_future),
        {"SIZE": _SIZE},
    )
