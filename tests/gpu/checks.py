"""Errors of results relative to the reference's, and how large each type's rounding may make them."""

import torch

TOLERANCES = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FP8_CODE = 0.08  # the step between the largest codes of FP8, over the largest: values on a tie may round either way

FP8_SUMS = 2**-12  # what the units that multiply FP8 lose in a sum, over the largest output


def fp8_tolerance(dtype: torch.dtype) -> float:
    """Return the error allowed of a linear on FP8 inputs, which kernels and reference round to the same bits: error of
    its sums, and of rounding the largest output to `dtype`."""
    return FP8_SUMS + torch.finfo(dtype).eps / 2


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest expected value; infinite where anything is not finite."""
    if actual.shape != expected.shape:
        return float("inf")
    wide, exact = actual.float(), expected.float()
    if not bool(wide.isfinite().all()):
        return float("inf")
    return float((wide - exact).abs().max() / exact.abs().max().clamp_min(1e-20))
