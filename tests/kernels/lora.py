"""Random updates of a linear by adapters of different ranks."""

from collections.abc import Sequence

import torch

from pipeline.kernels.adapters import LowRankUpdate


def random_updates(ranks: Sequence[int], num_outputs: int, num_inputs: int) -> list[LowRankUpdate | None]:
    """Return an update for each rank, whose outputs have about the magnitude of its inputs; None for rank 0."""
    random = torch.Generator().manual_seed(sum(ranks))

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=random) * shape[1] ** -0.5).half().float()

    return [LowRankUpdate(normal(r, num_inputs), normal(num_outputs, r)) if r else None for r in ranks]
