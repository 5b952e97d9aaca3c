"""Attention of captured steps: metadata of fixed size for each window. See `contract.GraphAttention`."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pipeline.kernels.contract import AttentionInput, GraphShape
from pipeline.kernels.triton.attention.cascade_metadata import CascadeShape
from pipeline.kernels.triton.attention.cascade_steps import CascadeSteps
from pipeline.kernels.triton.attention.decode_metadata import DecodeMetadata, most_queries
from pipeline.kernels.triton.attention.dispatch import AttentionPlan, checked_group, plan_key
from pipeline.kernels.triton.attention.prefill import PrefillMetadata, prefill_items, rows_of
from pipeline.kernels.triton.attention.staging import StagedArrays
from pipeline.kernels.triton.launch import Target


class CapturedAttention:
    """A `DecodeMetadata` for each sliding window of the model's layers, large enough for every step of `shape`.

    Steps in which no prefix is read together take plans without a cascade: its empty launch would cost each layer some
    microseconds. Mixed steps always launch it, and the prefill kernel beside, for as many tiles as `_most_tiles` says.
    """

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        target, group = Target.of(device), checked_group(*heads)
        self.max_queries = min(shape.max_queries, most_queries(group))
        self.max_mixed_tokens = shape.max_mixed_tokens
        self._queries = rows_of(shape.head_dim) // group  # of a tile of the prefill kernel
        self._tiles_at_once = max(1, target.num_multiprocessors // shape.num_kv_heads)
        cascade = CascadeShape.of(shape.max_tokens, *heads, target)
        cascade = replace(cascade, most_tokens=max(shape.max_tokens, shape.max_mixed_tokens))
        self._cascade = CascadeSteps(cascade)
        self._metadata = [
            DecodeMetadata.allocate(
                *(shape.max_seqs, shape.max_blocks, shape.block_size, *heads, device, target),
                num_queries=self.max_queries,
                window=window,
                cascade=cascade if window is None else None,
            )
            for window in shape.windows
        ]
        with_cascade: dict[Hashable, Any] = {
            plan_key(metadata.window): AttentionPlan(metadata, None) for metadata in self._metadata
        }
        alone: dict[Hashable, Any] = {
            plan_key(metadata.window): AttentionPlan(replace(metadata, cascade=None), None)
            for metadata in self._metadata
        }
        self.plans = (alone, with_cascade) if None in shape.windows else (alone,)
        self._prompts = StagedArrays([2 * self._most_tiles(shape.max_mixed_tokens)], device)
        self._prompts.tensor.fill_(-1)

    def mixed_plans(self, num_tokens: int) -> dict[Hashable, Any]:
        item_I2 = self._prompts.views[0].view(-1, 2)[: self._most_tiles(num_tokens)]
        plans: dict[Hashable, Any] = {}
        for metadata in self._metadata:
            places = metadata.query_start_S1, metadata.context_len_S, metadata.block_table_SM
            prefill = PrefillMetadata(metadata.window, item_I2, *places)
            plans[plan_key(metadata.window)] = AttentionPlan(metadata, prefill)
        return plans

    def fits_mixed(self, count_S: np.ndarray, num_tokens: int) -> bool:
        prompt_S = count_S[count_S > self.max_queries]
        return int((-(-prompt_S // self._queries)).sum()) <= self._most_tiles(num_tokens)

    def _most_tiles(self, num_tokens: int) -> int:
        """Of prompts in mixed steps padded to so many tokens: twice those that the tokens fill, as each prompt's last
        tile may be nearly empty; or what the GPU computes at once, as fewer gain nothing."""
        return max(self._tiles_at_once, 2 * -(-num_tokens // self._queries))

    def refill_mixed(self, where: AttentionInput) -> None:
        is_prompt_S = np.diff(where.query_start_S1) > self.max_queries
        prompts, decoding = np.flatnonzero(is_prompt_S), np.flatnonzero(~is_prompt_S)
        for metadata in self._metadata:
            shared = [] if metadata.cascade is None else self._cascade.numbers_among(where, decoding)
            metadata.refill(where, decoding, shared)
        items = prefill_items(where, prompts, self._queries)
        padded_I2 = np.full((self._prompts.views[0].numel() // 2, 2), -1)
        padded_I2[: len(items)] = items
        self._prompts.fill([padded_I2])

    def refill(self, where: AttentionInput, most_short: int = 0) -> int:
        kind = 0
        for metadata in self._metadata:
            shared = [] if metadata.cascade is None else self._cascade.numbers(where)
            if shared and shared[0].size > 0:
                kind = 1
            metadata.refill(where, shared=shared, most_short=most_short)
        return kind

    def shorten(self, short_S: torch.Tensor) -> None:
        """Tiles after the end of a shorter context hold nothing that its queries see, and add nothing."""
        for metadata in self._metadata:
            metadata.context_len_S[: len(short_S)] -= short_S
