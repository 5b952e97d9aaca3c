"""Batch-invariant linears and attention on CPU, in float32: a row's bits do not depend on the rest of the step.

A compiled loop over tokens treats its last tokens differently, and may order their sums differently. So linears always
compute whole tiles of tokens, and attention computes each query by itself. Prefill attention is therefore as slow per
token as decode attention.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import LayerCache
from pipeline.kernels.cpu.attention.decode_kernel import SoftmaxOptions, nothing_read, paged_decode
from pipeline.kernels.cpu.compile.numerics import arrays_of, bits
from pipeline.kernels.cpu.compile.threads import ALL_ITEMS, PARALLEL_ELEMENTS, use_threads
from pipeline.kernels.cpu.linear.linear_kernel import TILE_TOKENS
from pipeline.kernels.cpu.linear.linear_widened import float32_linear, widened_linear
from pipeline.kernels.cpu.linear.selection import ReorderedLinear
from pipeline.kernels.cpu.linear.tiled_linear import TiledLinear
from pipeline.kernels.linears import Linear
from pipeline.weights.packed import GroupIntWeight, LinearWeight


class WholeTilesLinear:
    """A linear that pads its tokens to whole tiles, so that one loop computes all of them."""

    def __init__(self, linear: TiledLinear) -> None:
        self.linear = linear

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        missing = -len(x_TK) % TILE_TOKENS
        y_TN = self.linear(F.pad(x_TK, (0, 0, 0, missing)) if missing else x_TK)
        return y_TN[: len(x_TK)] if missing else y_TN


def prepare_linear(weight: LinearWeight) -> Linear:
    """Pack one weight: in its stored type if a kernel reads that, else in float32."""
    narrow = widened_linear(weight)
    if narrow is None:
        return WholeTilesLinear(float32_linear(weight.dequantize(torch.float32), weight.bias_N))
    order_K = weight.input_order_K if isinstance(weight, GroupIntWeight) else None
    linear = WholeTilesLinear(narrow)
    return linear if order_K is None else ReorderedLinear(linear, order_K)


@dataclass(frozen=True)
class _Plan:
    block_table_TM: np.ndarray
    context_len_T: np.ndarray
    parallel: bool
    alone: tuple[np.ndarray, ...]


def attention(
    q_TND: torch.Tensor,
    cache: LayerCache,
    attn_metadata: AttentionInput,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implement `contract.Kernels.attention`: each query is a sequence of its own for the decode kernel."""
    num_kv_heads, head_dim = cache.k_CBKD.shape[2:]
    key = "each query alone", num_kv_heads, head_dim
    if key not in attn_metadata.plans:
        alone = attn_metadata.rows(np.arange(len(q_TND)))
        parallel = int(alone.context_len_S.sum()) * num_kv_heads * head_dim >= PARALLEL_ELEMENTS
        table_TM, reads = np.ascontiguousarray(alone.block_table_SM), nothing_read(len(q_TND))
        attn_metadata.plans[key] = _Plan(table_TM, alone.context_len_S, parallel, reads)
    plan: _Plan = attn_metadata.plans[key]
    q_TND = q_TND.contiguous()
    out_TND = torch.empty_like(q_TND)
    use_threads(plan.parallel)
    paged_decode(
        *(bits(q_TND), *arrays_of(cache), plan.block_table_TM, plan.context_len_T),
        *SoftmaxOptions.from_arguments(scale, window, softcap, sinks_N),
        num_kv_heads,  # parts, the same in every step
        *plan.alone,
        bits(out_TND),
        *ALL_ITEMS,
    )
    return out_TND
