"""LoRA adapters on a GPU: two grouped products per linear, whatever the number of adapters. Implements `adapters.Lora`.

Adapters are the experts of `experts/grouped_product.py`, at most one for each token. Ranks are padded with zeros to the
largest; an adapter without this linear has zeros only.

Suffixes: T tokens, E adapters, R ranks, K inputs, N outputs.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from pipeline.kernels.adapters import AdapterTokens, LowRankUpdate
from pipeline.kernels.memory import on_device
from pipeline.kernels.triton.experts.grouped_product import grouped_launch, tile_for
from pipeline.kernels.triton.experts.pairs import Pairs, pairs_by_expert
from pipeline.kernels.triton.experts.weights import GroupedWeights
from pipeline.kernels.triton.launch import CompileTarget, Launch, power_of_two

_RANKS = 16  # padded ranks are a multiple: the smallest tile of a product


class GroupedLora:
    """Updates of a linear by all adapters."""

    def __init__(
        self,
        updates: Sequence[LowRankUpdate | None],
        dtype: torch.dtype,
        device: torch.device,
        target: CompileTarget | None = None,
    ) -> None:
        known = [update for update in updates if update is not None]
        rank = -(-max(len(update.a_RK) for update in known) // _RANKS) * _RANKS
        num_outputs, num_inputs = len(known[0].b_NR), known[0].a_RK.shape[1]
        a_ERK = torch.zeros(len(updates), rank, num_inputs, dtype=dtype, device=device)
        b_ENR = torch.zeros(len(updates), num_outputs, rank, dtype=dtype, device=device)
        for adapter, update in enumerate(updates):
            if update is not None:
                a_ERK[adapter, : len(update.a_RK)] = update.a_RK
                b_ENR[adapter, :, : len(update.a_RK)] = update.b_NR
        self.a = GroupedWeights("dense", a_ERK, None, None, rank, num_inputs)
        self.b = GroupedWeights("dense", b_ENR, None, None, num_outputs, rank)
        self.target = target or CompileTarget.from_device(device)

    @property
    def num_bytes(self) -> int:
        return self.a.num_bytes + self.b.num_bytes

    def __call__(self, y_TN: torch.Tensor, x_TK: torch.Tensor, tokens: AdapterTokens) -> None:
        pairs = tokens.plan(_pairs)
        if pairs is not None:
            for launch in self.launches(y_TN, x_TK, pairs):
                launch.run()

    def launches(self, y_TN: torch.Tensor, x_TK: torch.Tensor, pairs: Pairs) -> tuple[Launch, Launch]:
        """Return the products by A and by B, for tokens with an adapter. The second adds to y."""
        rank = self.a.num_outputs
        low_TR = x_TK.new_empty(len(x_TK), rank)
        tile = tile_for(len(x_TK), self.b, x_TK.dtype, self.target)
        tile = replace(tile, depth=min(tile.depth, power_of_two(rank)))  # the ranks are all inputs of B
        return (
            grouped_launch(x_TK, self.a, pairs, 1, low_TR, self.target),
            grouped_launch(low_TR, self.b, pairs, 1, y_TN, self.target, tile=tile, is_added=True),
        )


def _pairs(tokens: AdapterTokens) -> Pairs | None:
    """Return the tokens of each adapter; None if no token has one."""
    if (tokens.adapter_T < 0).all():
        return None
    return pairs_by_expert(on_device(tokens.adapter_T[:, None], tokens.device), tokens.num_adapters)
