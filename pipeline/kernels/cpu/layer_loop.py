"""Loop over all layers of a step in which each sequence computes one token or a few: less Python between kernels.

With few sequences such a step waits for the Python between its kernels. Each linear streams several megabytes through
the nearest caches and evicts Python's data: making tensors, getting their arrays and setting numba's number of threads
takes 7 us in a loop of its own and 35 us in a step. Here arrays are looked up once, results are in memory that is
reused from step to step, and a whole step runs on one number of threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.cpu.attention.attention import attend, plan_of
from pipeline.kernels.cpu.attention.decode_kernel import SoftmaxOptions
from pipeline.kernels.cpu.compile.numerics import CacheArrays, arrays_of, bits
from pipeline.kernels.cpu.compile.threads import ALL_ITEMS
from pipeline.kernels.cpu.elementwise import (
    GATES,
    add_rms_norm_kernel,
    gate_mul_kernel,
    norm_rope_write_kernel,
    rms_norm_kernel,
)
from pipeline.kernels.cpu.linear.tiled_linear import TiledLinear
from pipeline.kernels.layer_parts import LayerParts, Rotation

MAX_TOKENS = 256
"""Limit for steps in which some sequences compute several tokens. With more, kernels take so long that the Python
between them does not matter, and their results are too large to keep."""


@dataclass(frozen=True)
class _Layer:
    """The inputs of one layer's kernels."""

    rope_index: int
    attn_norm_H: np.ndarray
    attn_post_norm_H: np.ndarray | None
    mlp_norm_H: np.ndarray
    mlp_post_norm_H: np.ndarray | None
    with_norm: bool
    q_norm_D: np.ndarray
    k_norm_D: np.ndarray
    qkv: TiledLinear
    o: TiledLinear
    gate_up: TiledLinear
    down: TiledLinear
    gate: int
    options: SoftmaxOptions

    @classmethod
    def from_parts(cls, parts: LayerParts, head_dim: int) -> "_Layer | None":
        """Return the layer; None if one of its linears cannot write into an array."""
        linears = parts.qkv, parts.o, parts.gate_up, parts.down
        tiled = [linear for linear in linears if isinstance(linear, TiledLinear)]
        if len(tiled) < len(linears):
            return None
        qkv, o, gate_up, down = tiled
        assert parts.attn_norm is not None
        assert parts.mlp_norm is not None
        q_norm_D, k_norm_D = parts.qk_norm_D or (parts.attn_norm.weight_H.new_ones(head_dim),) * 2
        return cls(
            rope_index=parts.rope_index,
            attn_norm_H=bits(parts.attn_norm.weight_H),
            attn_post_norm_H=None if parts.attn_post_norm is None else bits(parts.attn_post_norm.weight_H),
            mlp_norm_H=bits(parts.mlp_norm.weight_H),
            mlp_post_norm_H=None if parts.mlp_post_norm is None else bits(parts.mlp_post_norm.weight_H),
            with_norm=parts.qk_norm_D is not None,
            q_norm_D=bits(q_norm_D),
            k_norm_D=bits(k_norm_D),
            qkv=qkv,
            o=o,
            gate_up=gate_up,
            down=down,
            gate=GATES.index(parts.activation),
            options=SoftmaxOptions.from_arguments(parts.scale, parts.window, parts.softcap, parts.sinks_N),
        )

    def is_parallel(self, num_tokens: int) -> bool:
        return any(linear.is_parallel(num_tokens) for linear in (self.qkv, self.o, self.gate_up, self.down))


class _Buffers:
    """Intermediate results for `num_tokens` tokens; one set for all layers."""

    def __init__(self, num_tokens: int, layer: _Layer, head_dim: int, dtype: np.dtype) -> None:
        def buffer(width: int) -> np.ndarray:
            return np.empty((num_tokens, width), dtype)

        self.num_tokens = num_tokens
        self.qkv_TK, self.out_TK = buffer(layer.qkv.shape_NK[0]), buffer(layer.o.shape_NK[1])
        self.gate_up_T2F, self.product_TF = buffer(layer.gate_up.shape_NK[0]), buffer(layer.down.shape_NK[1])
        self.qkv_TMD = self.qkv_TK.reshape(num_tokens, layer.qkv.shape_NK[0] // head_dim, head_dim)
        self.out_TND = self.out_TK.reshape(num_tokens, layer.o.shape_NK[1] // head_dim, head_dim)
        self.q_TND = np.empty_like(self.out_TND)


class CompiledLayerLoop:
    """Implements `layer_parts.FusedLayerLoop` in float32 or bfloat16, on a cache of the same type."""

    def __init__(self, layers: list[_Layer], head_dim: int, eps: float) -> None:
        self._layers, self._head_dim, self._eps = layers, head_dim, np.float32(eps)
        self._buffers: _Buffers | None = None
        self._caches: Sequence[LayerCache] = ()
        self._arrays: list[CacheArrays] = []

    def supports(self, attn_metadata: AttentionInput, caches: Sequence[LayerCache]) -> bool:
        num_sequences, num_tokens = len(attn_metadata.context_len_S), int(attn_metadata.query_start_S1[-1])
        return caches[0].k_CBKD.dtype != FP8 and num_tokens <= max(MAX_TOKENS, num_sequences)

    def run(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        rotations: Sequence[Rotation],
        attn_metadata: AttentionInput,
        caches: Sequence[LayerCache],
        is_windowed: Sequence[bool],
    ) -> None:
        num_tokens, eps, x, residual = len(x_TH), self._eps, bits(x_TH), bits(residual_TH)
        buffers = self._buffers
        if buffers is None or num_tokens != buffers.num_tokens:
            buffers = self._buffers = _Buffers(num_tokens, self._layers[0], self._head_dim, x.dtype)
        if caches is not self._caches:
            self._caches, self._arrays = caches, [arrays_of(cache) for cache in caches]
        tables = [(rotation.cos_TD2.numpy(), rotation.sin_TD2.numpy()) for rotation in rotations]
        heads = buffers.q_TND.shape[1], caches[0].k_CBKD.shape[2], self._head_dim
        is_parallel = self._layers[0].is_parallel(num_tokens)
        kinds = [
            (each.slot_mapping_T.numpy(), plan_of(each, *heads, is_parallel))
            for each in (attn_metadata, attn_metadata.windowed)
            if each is not None
        ]
        for layer, cache, windowed in zip(self._layers, self._arrays, is_windowed):
            slot_T, plan = kinds[windowed]
            add_rms_norm_kernel(x, residual, layer.attn_norm_H, eps, *ALL_ITEMS)
            layer.qkv.write(x, buffers.qkv_TK)
            norms = layer.with_norm, layer.q_norm_D, layer.k_norm_D
            norm_rope_write_kernel(
                buffers.qkv_TMD,
                *tables[layer.rope_index],
                *norms,
                eps,
                slot_T,
                cache[0],
                cache[1],
                buffers.q_TND,
                *ALL_ITEMS,
            )
            attend(buffers.q_TND, cache, plan, layer.options, buffers.out_TND)
            layer.o.write(buffers.out_TK, x)
            if layer.attn_post_norm_H is not None:
                rms_norm_kernel(x, layer.attn_post_norm_H, eps, *ALL_ITEMS)
            add_rms_norm_kernel(x, residual, layer.mlp_norm_H, eps, *ALL_ITEMS)
            layer.gate_up.write(x, buffers.gate_up_T2F)
            gate_mul_kernel(buffers.gate_up_T2F, layer.gate, buffers.product_TF, *ALL_ITEMS)
            layer.down.write(buffers.product_TF, x)
            if layer.mlp_post_norm_H is not None:
                rms_norm_kernel(x, layer.mlp_post_norm_H, eps, *ALL_ITEMS)


def fused_layer_loop(layers: Sequence[LayerParts], head_dim: int, eps: float) -> CompiledLayerLoop | None:
    """Implement `Kernels.fused_layer_loop`."""
    all_layers = [_Layer.from_parts(parts, head_dim) for parts in layers]
    supported = [layer for layer in all_layers if layer is not None]
    return CompiledLayerLoop(supported, head_dim, eps) if len(supported) == len(all_layers) else None
