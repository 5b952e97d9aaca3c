"""Attention of captured steps: metadata of fixed size for each window. Implements `graph_attention.GraphAttention`."""

from collections.abc import Hashable
from dataclasses import replace
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


class CapturedAttention:
    """A `DecodeMetadata` for each sliding window of the model's layers, large enough for every step of `shape`.

    Steps without shared prefixes use plans without a cascade: its empty launch would cost each layer a few
    microseconds. Mixed steps always launch it, and the prefill kernel for `_max_tiles` tiles.
    """

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        target, group = CompileTarget.from_device(device), checked_group(*heads)
        self._kv_heads = shape.num_kv_heads, shape.head_dim
        self.max_queries = min(shape.max_queries, max_queries_of(group, shape.head_dim))
        self.max_mixed_tokens = shape.max_mixed_tokens
        self._queries = rows_of(shape.head_dim) // group  # per tile of the prefill kernel
        self._tiles_at_once = max(1, target.num_multiprocessors // shape.num_kv_heads)
        cascade = CascadeShape.for_steps(shape.max_tokens, *heads, target)
        cascade = replace(cascade, max_tokens=max(shape.max_tokens, shape.max_mixed_tokens))
        self._cascade = CascadeSteps(cascade)
        of_window = {window: cascade if window is None else None for window in shape.windows}
        self._no_tiles_I2 = np.full((self._max_tiles(shape.max_mixed_tokens), 2), -1)
        fixed_sizes = [shape.max_seqs + 1, shape.max_seqs, self._no_tiles_I2.size]
        programs = num_programs_of(target, *heads, self.max_queries, shape.with_fp8_cache)
        decode_sizes = DecodeMetadata.sizes(shape.max_seqs, programs)
        sizes = [*chain.from_iterable((*decode_sizes, *(each.sizes if each else ())) for each in of_window.values())]
        self._staged = StagedStep([*fixed_sizes, *sizes], shape, device)
        self.numbers = self._staged.numbers
        query_start_S1, context_len_S, tiles, *rest = self._staged.arrays
        self._item_I2 = tiles.view(-1, 2)
        views = iter(rest)
        self._metadata = [
            DecodeMetadata.from_tensors(
                DecodeNumbers(*islice(views, len(decode_sizes))),
                None if each is None else CascadeMetadata.for_steps(each, islice(views, len(each.sizes))),
                SequenceTensors(query_start_S1, context_len_S, self._staged.table_of(window)),
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                num_queries=self.max_queries,
                window=window,
            )
            for window, each in of_window.items()
        ]
        with_cascade: dict[Hashable, Any] = {
            plan_key(metadata.window, *self._kv_heads): AttentionPlan(metadata, None) for metadata in self._metadata
        }
        without_cascade: dict[Hashable, Any] = {
            plan_key(metadata.window, *self._kv_heads): AttentionPlan(replace(metadata, cascade=None), None)
            for metadata in self._metadata
        }
        self.plans = (without_cascade, with_cascade) if None in shape.windows else (without_cascade,)

    def mixed_plans(self, num_tokens: int) -> dict[Hashable, Any]:
        item_I2 = self._item_I2[: self._max_tiles(num_tokens)]
        return {
            plan_key(each.window, *self._kv_heads): AttentionPlan(
                each, PrefillMetadata(each.window, item_I2, *each.sequences)
            )
            for each in self._metadata
        }

    def fits_mixed(self, count_S: np.ndarray, num_tokens: int) -> bool:
        prompt_S = count_S[count_S > self.max_queries]
        return int((-(-prompt_S // self._queries)).sum()) <= self._max_tiles(num_tokens)

    def _max_tiles(self, num_tokens: int) -> int:
        """Return the number of prompt tiles in mixed steps padded to `num_tokens`.

        It is twice the number that the tokens fill, since the last tile of each prompt may be nearly empty, and at
        least the number that the GPU computes at once.
        """
        return max(self._tiles_at_once, 2 * -(-num_tokens // self._queries))

    def prepare_mixed_replay(
        self, attn_metadata: AttentionInput, numbers: np.ndarray, future: FutureNumbers | None = None
    ) -> None:
        is_prompt_S = np.diff(attn_metadata.query_start_S1) > self.max_queries
        prompts, decoding = np.flatnonzero(is_prompt_S), np.flatnonzero(~is_prompt_S)
        items = prefill_items(attn_metadata, prompts, self._queries)
        item_I2 = self._no_tiles_I2.copy()
        item_I2[: len(items)] = items
        shared = self._cascade.numbers_among(attn_metadata, decoding)
        arrays = self._decode_arrays(attn_metadata, decoding, shared)
        self._fill(attn_metadata, item_I2, arrays, numbers, future)

    def prepare_replay(
        self, attn_metadata: AttentionInput, numbers: np.ndarray, future: FutureNumbers | None = None
    ) -> int:
        shared = self._cascade.numbers(attn_metadata) if len(self.plans) > 1 else None
        arrays = self._decode_arrays(attn_metadata, None, shared)
        self._fill(attn_metadata, self._no_tiles_I2, arrays, numbers, future)
        return int(shared is not None and shared.item_U3.size > 0)

    def _decode_arrays(
        self, attn_metadata: AttentionInput, sequences: np.ndarray | None, shared: CascadeNumbers[np.ndarray] | None
    ) -> list[np.ndarray]:
        arrays: list[np.ndarray] = []
        for each in self._metadata:
            own_shared = shared if each.cascade is not None else None
            arrays += [*each.numbers_of(attn_metadata, sequences, own_shared), *(own_shared or ())]
        return arrays

    def _fill(
        self,
        attn_metadata: AttentionInput,
        item_I2: np.ndarray,
        decode_arrays: list[np.ndarray],
        numbers: np.ndarray,
        future: FutureNumbers | None,
    ) -> None:
        arrays = [attn_metadata.query_start_S1, attn_metadata.context_len_S, item_I2, *decode_arrays]
        self._staged.fill(arrays, numbers, attn_metadata, future)

    def unpack(self) -> None:
        self._staged.unpack()
