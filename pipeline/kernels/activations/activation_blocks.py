"""How many inputs share a scale where activations are rounded, whatever they are rounded to."""

import torch

BLOCK = 128
SMALL_BLOCKS = (32, 64)


def block_of(group_size: int, in_features: int) -> int | None:
    """Inputs of a block for a weight with a scale for each `group_size` inputs; None where no block fits its groups."""
    if group_size >= in_features or group_size % BLOCK == 0:
        return BLOCK
    return group_size if group_size in SMALL_BLOCKS else None


def in_blocks(x_MK: torch.Tensor, block: int) -> torch.Tensor:
    """(M, K) -> (M, B, block) in float32, the last block filled up with zeros."""
    return torch.nn.functional.pad(x_MK.float(), (0, -x_MK.shape[1] % block)).unflatten(1, (-1, block))
