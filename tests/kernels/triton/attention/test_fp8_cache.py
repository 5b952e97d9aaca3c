"""Codes as the Triton kernels convert them, in all types that they multiply in."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not see what `triton.jit` makes of a function.

import pytest
import torch
import triton
import triton.language as tl

from pipeline.kernels.cache import FP8
from pipeline.kernels.triton.attention.fp8_cache import halves
from pipeline.kernels.triton.launch import Target
from tests.kernels.triton.problems import DEVICE


@triton.jit
def _halves(pair_ptr, out_ptr, ROWS: tl.constexpr, PAIRS: tl.constexpr, CONVERTS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    even, odd = halves(tl.load(pair_ptr + at), out_ptr.dtype.element_ty, CONVERTS)
    tl.store(out_ptr + 2 * at, even)
    tl.store(out_ptr + 2 * at + 1, odd)


@pytest.mark.parametrize("converts", [False, True], ids=["by bits", "by instructions"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_code_is_converted_exactly(dtype: torch.dtype, converts: bool) -> None:
    if converts and not Target.of(DEVICE).converts_fp8:
        pytest.skip("this device has no such instructions")
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # those of NaN, which are never written
    codes = torch.cat([codes, codes.flip(0), codes.roll(1), codes.roll(3)])  # each in each place of two pairs
    out = torch.empty(1024, dtype=dtype, device=DEVICE)
    _halves[(1,)](codes.to(DEVICE).view(torch.int16), out, ROWS=16, PAIRS=32, CONVERTS=converts)
    factor = 1.0 if converts else 2.0**8
    assert torch.equal(out.cpu().double() * factor, codes.view(FP8).double())
