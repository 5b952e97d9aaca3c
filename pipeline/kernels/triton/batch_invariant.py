"""Batch-invariant linears and attention on a GPU: a row's bits do not depend on the rest of the step.

Linears: `linear/fixed_order.py` on 16-bit weights instead of cuBLAS. 4-bit and fp8 weights are dequantized at load, or
in each call if the 16-bit weights do not fit. Cost: a step of few tokens reads 16 bits per weight instead of 4 or 8.

Attention: the prefill kernel serves all queries, also in decode. A query's keys come in tiles that begin at fixed
positions, in one loop with one mask. Masked keys add exactly 0, so it does not matter which queries share a tile.
Contexts are not split across programs. Cost: a few sequences with long contexts keep only a few multiprocessors busy.

The other kernels always compute each row by itself.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import LayerCache
from pipeline.kernels.graph_attention import FutureNumbers, GraphShape
from pipeline.kernels.linears import Linear
from pipeline.kernels.memory import on_device
from pipeline.kernels.triton.attention.dispatch import AttentionPlan, PagedAttention, checked_group, plan_key
from pipeline.kernels.triton.attention.prefill import PrefillMetadata, prefill_items, rows_of
from pipeline.kernels.triton.attention.staging import StagedStep
from pipeline.kernels.triton.launch import CompileTarget
from pipeline.kernels.triton.linear.dispatch import DequantBuffer, TorchLinear, TwoPathLinear, has_two_paths
from pipeline.kernels.triton.linear.fixed_order import fixed_launches
from pipeline.weights.packed import Fp8Weight, GroupIntWeight, LinearWeight

_NO_WINDOW = 1 << 30
"""Wider than any context. Without a window, the kernel uses a separate loop without mask for tiles that all of its
queries see, which may round differently; with a window there is a single loop."""


class FixedLinear(TorchLinear):
    """Linear y = x @ weight.T + bias, the weight in x's type."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype, device: torch.device):
        super().__init__(weight_NK.contiguous(), bias_N, dtype, device)
        self.target = CompileTarget.from_device(device)

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        return fixed_product(x_MK, self.weight_NK, self.bias_N, self.target)


class WidenedLinear(TwoPathLinear):
    """Linear of a 4-bit or fp8 weight that is dequantized in each call, into a workspace that all linears share."""

    def __init__(
        self, weight: GroupIntWeight | Fp8Weight, dtype: torch.dtype, device: torch.device, scratch: DequantBuffer
    ) -> None:
        super().__init__(weight, dtype, device, scratch, crossover=0)

    def dense(self, x_MK: torch.Tensor) -> torch.Tensor:
        return fixed_product(x_MK, self.widened(), self.bias_N, self.target)


def fixed_product(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, target: CompileTarget
) -> torch.Tensor:
    """Return x @ weight.T + bias in x's type."""
    out_MN = x_MK.new_empty(len(x_MK), len(weight_NK))
    if len(x_MK):
        for launch in fixed_launches(x_MK, weight_NK, bias_N, out_MN, target):
            launch.run()
    return out_MN


def prepare_linear(
    weight: LinearWeight, dtype: torch.dtype, device: torch.device, scratch: DequantBuffer | None = None
) -> Linear:
    """Pack one weight. With a `scratch`, 4-bit and fp8 weights stay packed; others are dequantized once, here."""
    if scratch is not None and has_two_paths(weight):
        return WidenedLinear(weight, dtype, device, scratch)
    return FixedLinear(weight.dequantize(dtype), weight.bias_N, dtype, device)


class BatchInvariantAttention(PagedAttention):
    """Attention by the prefill kernel for all sequences of a step, in one loop over their keys."""

    def plan(
        self, attn_metadata: AttentionInput, q_TND: torch.Tensor, cache: LayerCache, window: int | None
    ) -> AttentionPlan:
        queries = _queries_of_tile(q_TND.shape[1], cache.k_CBKD.shape[2], q_TND.shape[2])
        all_sequences, finite_window = np.arange(len(attn_metadata.context_len_S)), window or _NO_WINDOW
        return AttentionPlan(
            None, PrefillMetadata.from_input(attn_metadata, all_sequences, queries, finite_window, q_TND.device)
        )


class CapturedBatchInvariantAttention:
    """Batch-invariant attention of captured steps. Implements `graph_attention.GraphAttention`.

    There is one tile per possible sequence; missing sequences have no queries. Mixed steps have their own tile list.
    """

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        self._queries = {kind.heads: _queries_of_tile(shape.num_heads, *kind.heads) for kind in shape.kinds}
        self.max_queries, self.max_mixed_tokens = (
            min(shape.max_queries, *self._queries.values()),
            shape.max_mixed_tokens,
        )
        self._max_seqs, self._kinds = shape.max_seqs, shape.kinds
        item_I2 = np.zeros((shape.max_seqs, 2), dtype=np.int32)
        item_I2[:, 0] = np.arange(shape.max_seqs)
        self._no_tiles = [np.full((self._max_tiles(heads, shape.max_mixed_tokens), 2), -1) for heads in self._queries]
        sizes = [shape.max_seqs + 1, shape.max_seqs, *(each.size for each in self._no_tiles)]
        self._staged = StagedStep(sizes, shape, device)
        self.numbers = self._staged.numbers
        self.plans = (self._plans(dict.fromkeys(self._queries, on_device(item_I2, device))),)

    def mixed_plans(self, num_tokens: int) -> dict[Hashable, Any]:
        items = zip(self._queries, self._staged.arrays[2:])
        return self._plans(
            {heads: item_I2.view(-1, 2)[: self._max_tiles(heads, num_tokens)] for heads, item_I2 in items}
        )

    def fits_mixed(self, count_S: np.ndarray, num_tokens: int) -> bool:
        return True

    def prepare_mixed_replay(
        self, attn_metadata: AttentionInput, numbers: np.ndarray, future: FutureNumbers | None = None
    ) -> None:
        items = [each.copy() for each in self._no_tiles]
        for item_I2, queries in zip(items, self._queries.values()):
            own_I2 = prefill_items(attn_metadata, np.arange(len(attn_metadata.context_len_S)), queries)
            item_I2[: len(own_I2)] = own_I2
        self._fill(attn_metadata, items, numbers, future)

    def _max_tiles(self, heads: tuple[int, int], num_tokens: int) -> int:
        """Return the maximum number of tiles: the last tile of each sequence may be nearly empty."""
        return self._max_seqs + num_tokens // self._queries[heads]

    def _plans(self, items: dict[tuple[int, int], torch.Tensor]) -> dict[Hashable, Any]:
        query_start_S1, context_len_S = self._staged.arrays[:2]
        plans: dict[Hashable, Any] = {}
        for kind in self._kinds:
            sequences = query_start_S1, context_len_S, self._staged.table_of(kind.window)
            metadata = PrefillMetadata(kind.window or _NO_WINDOW, items[kind.heads], *sequences)
            plans[plan_key(*kind)] = AttentionPlan(None, metadata)
        return plans

    def prepare_replay(
        self, attn_metadata: AttentionInput, numbers: np.ndarray, future: FutureNumbers | None = None
    ) -> int:
        self._fill(attn_metadata, self._no_tiles, numbers, future)
        return 0

    def _fill(
        self,
        attn_metadata: AttentionInput,
        items: list[np.ndarray],
        numbers: np.ndarray,
        future: FutureNumbers | None,
    ) -> None:
        start_S1 = np.full(self._max_seqs + 1, attn_metadata.query_start_S1[-1])
        start_S1[: len(attn_metadata.query_start_S1)] = attn_metadata.query_start_S1
        context_S = np.zeros(self._max_seqs, dtype=np.int32)
        context_S[: len(attn_metadata.context_len_S)] = attn_metadata.context_len_S
        self._staged.fill([start_S1, context_S, *items], numbers, attn_metadata, future)

    def unpack(self) -> None:
        self._staged.unpack()


def _queries_of_tile(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    return rows_of(head_dim) // checked_group(num_heads, num_kv_heads, head_dim)
