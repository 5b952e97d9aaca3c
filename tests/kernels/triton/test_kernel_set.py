"""What a set of GPU kernels says of itself."""

import torch

from pipeline.kernels.reference import reference_kernels
from pipeline.kernels.triton.kernel_set import triton_kernels
from pipeline.kernels.triton.linear.dispatch import Scratch


def test_it_is_said_what_serves() -> None:
    device = torch.device("cpu")
    plain, special = (
        triton_kernels(torch.float32, device, scratch=scratch, deterministic=scratch is not None).served_by
        for scratch in (None, Scratch(torch.float32, device))
    )
    assert ("kept" in plain["linear"], "shared scratch" in special["linear"]) == (True, True)
    for kernel in ("linear", "attention"):
        assert ("batch-invariant" in plain[kernel], "batch-invariant" in special[kernel]) == (False, True)
    assert set(plain) == set(reference_kernels(torch.float32, device).served_by)
