"""Attention of captured steps: metadata of fixed size for each window. See `contract.GraphAttention`."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from pipeline.kernels.contract import AttentionInput, GraphShape
from pipeline.kernels.triton.attention.cascade_metadata import CascadeShape
from pipeline.kernels.triton.attention.cascade_steps import CascadeSteps
from pipeline.kernels.triton.attention.decode_metadata import DecodeMetadata, most_queries
from pipeline.kernels.triton.attention.dispatch import AttentionPlan, plan_key
from pipeline.kernels.triton.launch import Target


class CapturedAttention:
    """A `DecodeMetadata` for each sliding window of the model's layers, large enough for every step of `shape`.

    Steps in which no prefix is read together take plans without a cascade: its empty launch would cost each layer some
    microseconds.
    """

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        self.max_queries = min(shape.max_queries, most_queries(shape.num_heads // shape.num_kv_heads))
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        target = Target.of(device)
        cascade = CascadeShape.of(shape.max_tokens, *heads, target)
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
