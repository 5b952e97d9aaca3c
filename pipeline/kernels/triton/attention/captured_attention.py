"""Attention of captured steps: metadata of fixed size for each kind of layer. Implements
`graph_attention.GraphAttention`."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.graph_attention import FutureNumbers, GraphShape
from pipeline.kernels.triton.attention.cascade_metadata import (
    CascadeMetadata,
    CascadeNumbers,
    CascadeShape,
    CascadeSteps,
)
from pipeline.kernels.triton.attention.decode_metadata import (
    DecodeMetadata,
    DecodeNumbers,
    SequenceTensors,
    max_queries_of,
    num_programs_of,
)
from pipeline.kernels.triton.attention.dispatch import AttentionPlan, checked_group, plan_key
from pipeline.kernels.triton.attention.prefill import PrefillMetadata, prefill_items, rows_of
from pipeline.kernels.triton.attention.staging import StagedStep
from pipeline.kernels.triton.launch import CompileTarget


@dataclass(frozen=True)
class _Tiles:
    """Tiles of the prefill kernel in layers with heads of one shape. queries: tokens of a tile. at_once: tiles that the
    GPU computes at once."""

    queries: int
    at_once: int

    def max_tiles(self, num_tokens: int) -> int:
        """Return the number of prompt tiles in mixed steps padded to `num_tokens`.

        It is twice the number that the tokens fill, since the last tile of each prompt may be nearly empty, and at
        least the number that the GPU computes at once.
        """
        return max(self.at_once, 2 * -(-num_tokens // self.queries))


class CapturedAttention:
    """A `DecodeMetadata` for each kind of the model's layers, large enough for every step of `shape`.

    Steps without shared prefixes use plans without a cascade: its empty launch would cost each layer a few
    microseconds. Mixed steps always launch it, and the prefill kernel for `_Tiles.max_tiles` tiles.
    """

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        target, self._kinds = CompileTarget.from_device(device), shape.kinds
        groups = {each.heads: checked_group(shape.num_heads, *each.heads) for each in shape.kinds}
        limits = [max_queries_of(group, head_dim) for (_, head_dim), group in groups.items()]
        self.max_queries, self.max_mixed_tokens = min(shape.max_queries, *limits), shape.max_mixed_tokens
        self._tiles = {
            heads: _Tiles(rows_of(heads[1]) // group, max(1, target.num_multiprocessors // heads[0]))
            for heads, group in groups.items()
        }
        cascades: list[CascadeShape | None] = []
        decode_sizes: list[DecodeNumbers[int]] = []
        for kind in shape.kinds:
            cascade = CascadeShape.for_steps(shape.max_tokens, shape.num_heads, *kind.heads, target)
            cascade = replace(cascade, max_tokens=max(shape.max_tokens, shape.max_mixed_tokens))
            cascades.append(cascade if kind.window is None else None)
            programs = num_programs_of(target, shape.num_heads, *kind.heads, self.max_queries, shape.with_fp8_cache)
            decode_sizes.append(DecodeMetadata.sizes(shape.max_seqs, programs))
        self._cascades = [None if each is None else CascadeSteps(each) for each in cascades]
        self._no_tiles = [np.full((each.max_tiles(shape.max_mixed_tokens), 2), -1) for each in self._tiles.values()]
        fixed_sizes = [shape.max_seqs + 1, shape.max_seqs, *(each.size for each in self._no_tiles)]
        sizes = chain.from_iterable((*own, *(each.sizes if each else ())) for own, each in zip(decode_sizes, cascades))
        self._staged = StagedStep([*fixed_sizes, *sizes], shape, device)
        self.numbers = self._staged.numbers
        views = iter(self._staged.arrays)
        query_start_S1, context_len_S = next(views), next(views)
        self._item_I2 = {heads: next(views).view(-1, 2) for heads in self._tiles}
        self._metadata = [
            DecodeMetadata.from_tensors(
                DecodeNumbers(*islice(views, len(own))),
                None if each is None else CascadeMetadata.for_steps(each, islice(views, len(each.sizes))),
                SequenceTensors(query_start_S1, context_len_S, self._staged.table_of(kind.window)),
                num_heads=shape.num_heads,
                num_kv_heads=kind.num_kv_heads,
                head_dim=kind.head_dim,
                num_queries=self.max_queries,
                window=kind.window,
            )
            for kind, own, each in zip(shape.kinds, decode_sizes, cascades)
        ]
        with_cascade = self._plans(self._metadata)
        without_cascade = self._plans([replace(each, cascade=None) for each in self._metadata])
        self.plans = (without_cascade, with_cascade) if any(cascades) else (without_cascade,)

    def _plans(self, metadata: Sequence[DecodeMetadata]) -> dict[Hashable, Any]:
        return {plan_key(*kind): AttentionPlan(each, None) for kind, each in zip(self._kinds, metadata)}

    def mixed_plans(self, num_tokens: int) -> dict[Hashable, Any]:
        plans: dict[Hashable, Any] = {}
        for kind, each in zip(self._kinds, self._metadata):
            item_I2 = self._item_I2[kind.heads][: self._tiles[kind.heads].max_tiles(num_tokens)]
            plans[plan_key(*kind)] = AttentionPlan(each, PrefillMetadata(kind.window, item_I2, *each.sequences))
        return plans

    def fits_mixed(self, count_S: np.ndarray, num_tokens: int) -> bool:
        prompt_S = count_S[count_S > self.max_queries]
        return all(
            int((-(-prompt_S // each.queries)).sum()) <= each.max_tiles(num_tokens) for each in self._tiles.values()
        )

    def prepare_mixed_replay(
        self, attn_metadata: AttentionInput, numbers: np.ndarray, future: FutureNumbers | None = None
    ) -> None:
        is_prompt_S = np.diff(attn_metadata.query_start_S1) > self.max_queries
        prompts, decoding = np.flatnonzero(is_prompt_S), np.flatnonzero(~is_prompt_S)
        items = [each.copy() for each in self._no_tiles]
        for item_I2, tiles in zip(items, self._tiles.values()):
            own_I2 = prefill_items(attn_metadata, prompts, tiles.queries)
            item_I2[: len(own_I2)] = own_I2
        shared = [each and each.numbers_among(attn_metadata, decoding) for each in self._cascades]
        self._fill(attn_metadata, items, decoding, shared, numbers, future)

    def prepare_replay(
        self, attn_metadata: AttentionInput, numbers: np.ndarray, future: FutureNumbers | None = None
    ) -> int:
        shared = [each and each.numbers(attn_metadata) for each in self._cascades]
        self._fill(attn_metadata, self._no_tiles, None, shared, numbers, future)
        return int(any(each is not None and each.item_U3.size > 0 for each in shared))

    def _fill(
        self,
        attn_metadata: AttentionInput,
        items: list[np.ndarray],
        decoding: np.ndarray | None,
        shared: list[CascadeNumbers[np.ndarray] | None],
        numbers: np.ndarray,
        future: FutureNumbers | None,
    ) -> None:
        """decoding: the sequences that the decode kernel computes; None: all. shared: of each kind of layers."""
        arrays = [attn_metadata.query_start_S1, attn_metadata.context_len_S, *items]
        for each, own in zip(self._metadata, shared):
            arrays += [*each.numbers_of(attn_metadata, decoding, own), *(own or ())]
        self._staged.fill(arrays, numbers, attn_metadata, future)

    def unpack(self) -> None:
        self._staged.unpack()
