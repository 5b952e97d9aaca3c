"""cuBLAS's fp8 product with a scale for each 128 inputs of a token and of an output, where torch has it.

`torch._scaled_mm` takes such scales on compute capability 9.0 from cuBLASLt 12.9 on. It is no public function and its
scales have changed from version to version, so nothing is read from version numbers: a probe runs one small product and
compares it. cuBLAS chooses its tiles by the number of tokens: a token's last bits depend on what else is in the step.
"""

import torch

BLOCK = 128
LEAST_TOKENS = 65  # with fewer a product takes the time of reading its weight, which Triton's does as fast
_AGREES = 0.02  # of the largest output: products of e4m3 with sums in float32, rounded to bfloat16


def scaled_mm(
    value_MK: torch.Tensor, scale_BM: torch.Tensor, value_NK: torch.Tensor, scale_BN: torch.Tensor
) -> torch.Tensor:
    """(M, N) in bfloat16: values in float8_e4m3fn, scales in float32 for blocks B of 128 inputs, all contiguous."""
    product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]  # no public name before torch 2.13
    return product(value_MK, value_NK.t(), scale_a=scale_BM.t(), scale_b=scale_BN, out_dtype=torch.bfloat16)


def has_scaled_mm(device: torch.device) -> bool:
    """Whether `scaled_mm` computes what it should on this device. One small product; reads its result."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return agrees(device)


def agrees(device: torch.device) -> bool:
    """The probe itself. A product of distinct scales in both directions, none of which may be mixed up."""
    random = torch.Generator().manual_seed(0)
    value_MK, value_NK = (
        torch.randn(rows, 2 * BLOCK, generator=random).to(torch.float8_e4m3fn) for rows in (192, BLOCK)
    )
    scale_BM, scale_BN = (torch.rand(2, rows, generator=random) + 0.1 for rows in (192, BLOCK))
    try:
        on_device = (each.to(device) for each in (value_MK, scale_BM, value_NK, scale_BN))
        found_MN = scaled_mm(*on_device).float().cpu()
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):
        return False  # this torch, or its cuBLAS, has no such product
    wide_MK = value_MK.float() * scale_BM.t().repeat_interleave(BLOCK, 1)
    wide_NK = value_NK.float() * scale_BN.t().repeat_interleave(BLOCK, 1)
    expected_MN = wide_MK @ wide_NK.t()
    return bool((found_MN - expected_MN).abs().max() <= _AGREES * expected_MN.abs().max())
