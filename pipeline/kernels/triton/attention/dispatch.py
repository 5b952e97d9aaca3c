"""Attention over the paged cache on a GPU: one kernel for sequences with few query tokens, another for many.

Both write into one output, so a step may mix them. See `contract.Kernels`.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.errors import ModelError
from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.triton.attention.cascade_metadata import CascadeShape
from pipeline.kernels.triton.attention.converted_cache import MAX_BYTES, convert_launch
from pipeline.kernels.triton.attention.decode import decode_launches
from pipeline.kernels.triton.attention.decode_metadata import DecodeMetadata, max_queries_of
from pipeline.kernels.triton.attention.prefill import PrefillMetadata, prefill_launch, rows_of
from pipeline.kernels.triton.launch import CompileTarget, power_of_two


@dataclass(frozen=True)
class AttentionPlan:
    """Metadata of a step for the layers of one window; None if the step has no sequences of that kind."""

    decode: DecodeMetadata | None
    prefill: PrefillMetadata | None


class PagedAttention:
    """Implements `contract.Kernels.attention` for one device.

    A step is planned once per window and shape of heads; the plan is kept in `AttentionInput.plans` under `plan_key`.
    To capture steps in a CUDA graph, the caller allocates a `DecodeMetadata` per window, refills it before each step
    and stores it there; a call then only launches, the same kernels every time.
    """

    def __init__(self, device: torch.device) -> None:
        self.target = CompileTarget.from_device(device)

    def __call__(
        self,
        q_TND: torch.Tensor,
        cache: LayerCache,
        attn_metadata: AttentionInput,
        scale: float,
        window: int | None,
        softcap: float = 0.0,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Support float16, bfloat16 and float32; the cache must be contiguous, and of q's type or FP8."""
        key = plan_key(window, *cache.k_CBKD.shape[2:])
        if key not in attn_metadata.plans:
            attn_metadata.plans[key] = self.plan(attn_metadata, q_TND, cache, window)
        plan: AttentionPlan = attn_metadata.plans[key]
        q_TND = q_TND.contiguous()
        out_TND = torch.empty_like(q_TND)
        options = scale, softcap, sinks_N, self.target
        if plan.prefill is not None:
            read = cache
            if plan.prefill.block_X is not None:
                shape = len(plan.prefill.block_X), *cache.k_CBKD.shape[1:]
                read = LayerCache(q_TND.new_empty(shape), q_TND.new_empty(shape))
                convert_launch(cache, plan.prefill.block_X, read, self.target).run()
            prefill_launch(q_TND, read, out_TND, plan.prefill, *options).run()
        if plan.decode is not None:
            for launch in decode_launches(q_TND, cache, out_TND, plan.decode, *options):
                launch.run()
        return out_TND

    def plan(
        self, attn_metadata: AttentionInput, q_TND: torch.Tensor, cache: LayerCache, window: int | None
    ) -> AttentionPlan:
        """Plan a step on the host for the layers with this window."""
        num_heads, head_dim = q_TND.shape[1:]
        num_kv_heads = cache.k_CBKD.shape[2]
        group = checked_group(num_heads, num_kv_heads, head_dim)
        count_S = np.diff(attn_metadata.query_start_S1)
        limit = max_queries_of(group, head_dim)
        few, many = np.flatnonzero(count_S <= limit), np.flatnonzero(count_S > limit)
        decode = prefill = None
        if len(few):
            max_count = power_of_two(int(count_S[few].max()))
            cascade, shared = None, None
            if window is None:
                shape = CascadeShape.for_steps(int(count_S[few].sum()), num_heads, num_kv_heads, head_dim, self.target)
                cascade_plan = shape.decide(attn_metadata, few).plan
                if cascade_plan is not None:
                    max_tokens, max_tiles = int(attn_metadata.query_start_S1[-1]), int(cascade_plan.tiles_G.sum())
                    cascade = replace(shape, max_tokens=max_tokens, max_tiles=max_tiles)
                    shared = shape.numbers(attn_metadata, cascade_plan)
            max_seqs, max_blocks = attn_metadata.block_table_SM.shape
            decode = DecodeMetadata.allocate(
                *(max_seqs, max_blocks, attn_metadata.block_size),
                *(num_heads, num_kv_heads, head_dim, q_TND.device, self.target),
                num_queries=min(max_count, limit),
                window=window,
                cascade=cascade,
                is_fp8=cache.k_CBKD.dtype == FP8,
            )
            decode.prepare_replay(attn_metadata, few, shared)
        if len(many):
            max_converted = 0
            if cache.k_CBKD.dtype == FP8:
                block_bytes = 2 * cache.k_CBKD[0].numel() * q_TND.element_size()
                max_converted = MAX_BYTES // block_bytes
            queries = rows_of(head_dim) // group
            prefill = PrefillMetadata.from_input(attn_metadata, many, queries, window, q_TND.device, max_converted)
        return AttentionPlan(decode, prefill)


def checked_group(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the query heads per KV head. Raises ModelError for more than the kernels support."""
    group = num_heads // num_kv_heads
    if group > rows_of(head_dim):
        raise ModelError(
            f"{num_heads} query heads with {num_kv_heads} KV heads of size {head_dim}: the attention kernels support "
            f"up to {rows_of(head_dim)} query heads per KV head"
        )
    return group


def plan_key(window: int | None, num_kv_heads: int, head_dim: int) -> tuple[str, int | None, int, int]:
    """Return the key in `AttentionInput.plans` of the plan for the layers with this window and these heads."""
    return "triton", window, num_kv_heads, head_dim
