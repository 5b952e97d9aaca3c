"""Blocks of inputs that share a scale when activations are rounded to 8 bits."""

import torch

BLOCK = 128
SMALL_BLOCKS = (32, 64)


def block_of(group_size: int, in_features: int) -> int | None:
    """Return the inputs per block for a weight with one scale per `group_size` inputs; None if no block fits."""
    if group_size >= in_features or group_size % BLOCK == 0:
        return BLOCK
    return group_size if group_size in SMALL_BLOCKS else None


def in_blocks(x_MK: torch.Tensor, block: int) -> torch.Tensor:
    """Reshape (M, K) to (M, B, block) in float32; the last block is padded with zeros."""
    return torch.nn.functional.pad(x_MK.float(), (0, -x_MK.shape[1] % block)).unflatten(1, (-1, block))
