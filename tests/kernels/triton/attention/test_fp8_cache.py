"""Codes as the Triton kernels widen them, in all types that they multiply in."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not see what `triton.jit` makes of a function.

import pytest
import torch
import triton
import triton.language as tl

from pipeline.kernels.cache import FP8
from pipeline.kernels.triton.attention.fp8_cache import LIFT, widened
from tests.kernels.triton.problems import DEVICE


@triton.jit
def _widen(code_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, widened(tl.load(code_ptr + at), out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_code_is_widened_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # those of NaN, which are never written
    out = torch.empty(256, dtype=dtype, device=DEVICE)
    _widen[(1,)](codes.to(DEVICE).view(torch.int8), out, 256)
    factor = 2.0**8 if dtype == torch.float16 else LIFT.value**2
    assert torch.equal(out.cpu().double() * factor, codes.view(FP8).double())
