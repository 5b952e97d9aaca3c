"""Vectors that are hard to store in 8 bits."""

import torch


def hostile_vectors(count: int, head_dim: int) -> torch.Tensor:
    """(count, head_dim) float32: of sizes from 1e-6 to 1e4, some with few values that are not small, of zeros, of
    halfway cases, and with NaN or infinity in them."""
    torch.manual_seed(count)
    vectors = torch.randn(count, head_dim) * 10 ** (10 * torch.rand(count, 1) - 6)
    vectors[1::9] *= 10 ** (-6 * torch.rand(len(vectors[1::9]), head_dim))  # down to subnormal codes and below
    vectors[2::9] = 0.0
    vectors[3::9] = torch.randint(-448, 449, vectors[3::9].shape).float()  # halfway between codes, many of them
    vectors[3::9, 0] = 448.0
    vectors[4::9, 1:] = 0.0
    for start, broken in ((5, float("nan")), (6, float("inf")), (7, float("-inf"))):
        vectors[start::9, head_dim // 3] = broken
    return vectors
