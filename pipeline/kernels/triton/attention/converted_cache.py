"""Keys and values of a step's prompts in the model's type, for an FP8 cache: converted once per layer.

The prefill kernel reads a key once per tile of queries, and would convert it each time. Prompts are compute-bound, so
it is faster to convert the blocks that they read into a separate cache. That cache also takes the keys of the step's
own tokens from the FP8 cache, so attention does not depend on how a prompt is chunked.

Suffixes: those of `kernels/contract.py`, X blocks of the converted cache, M' blocks of a sequence.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
# It does not understand functions made by `triton.jit`.

import numpy as np
import torch
import triton
import triton.language as tl

from pipeline.kernels.cache import LayerCache
from pipeline.kernels.triton.attention.fp8_cache import halves
from pipeline.kernels.triton.launch import CompileTarget, Launch, cache_arguments, power_of_two

MAX_BYTES = 1 << 27
"""Limit for a layer's converted keys and values. `engine/startup/memory.py` reserves four times as much."""
MIN_READS = 3
"""Minimum average number of tiles that read a block for conversion to pay: conversion reads one byte and writes two,
and later reads are two bytes instead of one."""
_ROWS = 32


def converted_blocks(
    table_SM: np.ndarray, begin_S: np.ndarray, end_S: np.ndarray, tiles_S: np.ndarray, max_blocks: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the blocks to convert, and a block table over them; None if tiles should convert what they read.

    Each sequence reads its blocks begin_S to end_S with tiles_S tiles of queries.
    """
    index_M = np.arange(table_SM.shape[1])
    read_SM = (index_M >= begin_S[:, None]) & (index_M < end_S[:, None])
    block_X, index = np.unique(table_SM[read_SM], return_inverse=True)
    if len(block_X) > max_blocks or (read_SM.sum(axis=1) * tiles_S).sum() < MIN_READS * len(block_X):
        return None
    converted_SM = np.zeros_like(table_SM)
    converted_SM[read_SM] = index
    return block_X, converted_SM


@triton.jit
def _convert(
    block_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_out_ptr,
    v_out_ptr,
    BLOCK: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    """Convert some of the vectors of a block."""
    HEADS: tl.constexpr = BLOCK * NUM_KV_HEADS
    row_R, pair_D = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, PAIRS)
    column_D = tl.arange(0, 2 * PAIRS)
    is_row_R = row_R < HEADS
    first = tl.load(block_ptr + tl.program_id(0)).to(tl.int64) * HEADS
    scale_R = first + row_R % NUM_KV_HEADS * BLOCK + row_R // NUM_KV_HEADS
    pair_RD = (first + row_R)[:, None] * (HEAD_DIM // 2) + pair_D[None, :]
    is_pair_RD = is_row_R[:, None] & (pair_D < HEAD_DIM // 2)[None, :]
    out_RD = (tl.program_id(0).to(tl.int64) * HEADS + row_R)[:, None] * HEAD_DIM + column_D[None, :]
    is_out_RD = is_row_R[:, None] & (column_D < HEAD_DIM)[None, :]
    FACTOR: tl.constexpr = 1.0 if CONVERTS else 256.0
    for kind in tl.static_range(2):
        code_ptr, scale_ptr, to_ptr = (v_ptr, v_scale_ptr, v_out_ptr) if kind else (k_ptr, k_scale_ptr, k_out_ptr)
        code_RD = tl.load(code_ptr.to(tl.pointer_type(tl.int16)) + pair_RD, mask=is_pair_RD, other=0)
        factor_R = tl.load(scale_ptr + scale_R, mask=is_row_R, other=0.0) * FACTOR
        even_RD, odd_RD = halves(code_RD, tl.float32, CONVERTS)
        x_RD = tl.interleave(even_RD, odd_RD) * factor_R[:, None]
        tl.store(to_ptr + out_RD, x_RD.to(to_ptr.dtype.element_ty), mask=is_out_RD)


def convert_launch(cache: LayerCache, block_X: torch.Tensor, converted: LayerCache, target: CompileTarget) -> Launch:
    """Return the launch that converts the blocks block_X (int32) of an FP8 cache into the first of `converted`."""
    _, block_size, num_kv_heads, head_dim = cache.k_CBKD.shape
    return Launch(
        _convert,
        (len(block_X), triton.cdiv(block_size * num_kv_heads, _ROWS)),
        (block_X, *cache_arguments(cache), converted.k_CBKD, converted.v_CBKD),
        {
            "BLOCK": block_size,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "PAIRS": power_of_two(head_dim // 2),
            "ROWS": _ROWS,
            "CONVERTS": target.converts_fp8,
        },
    )
