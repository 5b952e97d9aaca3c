"""One decoder for all supported families, driven by `ModelConfig` fields and a set of kernels.

Shape suffixes: T tokens of the step, R rows that need logits, H hidden, N query heads, K KV heads, M heads of a fused
projection (N + 2 K), D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.contract import Kernels
from pipeline.kernels.layer_parts import Norm, Rotation
from pipeline.kernels.linears import InputKernels, Linear
from pipeline.kernels.memory import on_device
from pipeline.kernels.ranks import ONE_RANK, OneRank
from pipeline.model.config import ModelConfig
from pipeline.model.kv_cache import KVCache
from pipeline.model.layer_spec import Activation
from pipeline.model.load import ExpertNorms, LayerWeights, WeightReader
from pipeline.model.lora import Adapters
from pipeline.model.offload import LayerOffload
from pipeline.model.routed import RoutedExperts
from pipeline.model.sharding import Share
from pipeline.weights.packed import DenseWeight, LinearWeight, StackedWeight

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}


class StackedLinears:
    """Linears of several forms that read the same input; their outputs (T, N) follow each other."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts

    def __call__(self, x_TK: Any) -> torch.Tensor:
        return torch.cat([part(x_TK) for part in self.parts], dim=1)


def prepared(kernels: Kernels, weight: LinearWeight) -> Linear:
    """Pack a weight, part by part if its parts have several forms."""
    if isinstance(weight, StackedWeight):
        return StackedLinears([kernels.prepare_linear(part) for part in weight.parts])
    return kernels.prepare_linear(weight)


class DecoderLayer:
    """One layer: its weights on a device, and its forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: LayerWeights,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        ranks: OneRank = ONE_RANK,
    ) -> None:
        self.config, self.kernels, self.ranks, self.index = config, kernels, ranks, index
        spec = self.spec = config.layers[index]
        self.heads = config.heads(index)
        self.scale, self.window, self.softcap, self.activation = spec.scale, spec.window, spec.softcap, spec.activation
        self.sinks_N = None if weights.sinks_N is None else weights.sinks_N.to(device, torch.float32)
        self.rope_index = config.ropes.index(spec.rope)

        def on_device(norm: Norm | None) -> Norm | None:
            return None if norm is None else norm.to(device, norm_dtype(config, dtype))

        self.attn_norm, self.attn_post_norm = on_device(weights.attn_norm), on_device(weights.attn_post_norm)
        self.mlp_norm, self.mlp_post_norm = on_device(weights.mlp_norm), on_device(weights.mlp_post_norm)
        qk_norm = weights.qk_norm
        if qk_norm is not None:
            qk_norm = qk_norm[0].to(device, norm_dtype(config, dtype)), qk_norm[1].to(device, norm_dtype(config, dtype))
        self.qk_norm_D = qk_norm if spec.qk_norm == "head" else None
        self._full_qk_norm = qk_norm if spec.qk_norm == "full" else None
        self._residual_scale = weights.residual_scale
        self.qkv: Linear = prepared(kernels, weights.qkv)
        self.ba: Linear | None = None if weights.ba is None else prepared(kernels, weights.ba)
        self.delta = weights.delta and weights.delta.to(device)
        self.o: Linear = kernels.prepare_linear(weights.o)
        self.gate_up: Linear | None = None if weights.gate_up is None else prepared(kernels, weights.gate_up)
        self.down: Linear | None = None if weights.down is None else kernels.prepare_linear(weights.down)
        self.routed: RoutedExperts | None = None
        if (routed := weights.routed) is not None and spec.experts is not None:
            norms = None if routed.norms is None else ExpertNorms._make(map(on_device, routed.norms))
            routed = replace(routed, norms=norms)
            self.routed = RoutedExperts(routed, spec.experts.routing, spec.activation, config.norm_eps, kernels)
        # A linear that rounds its inputs provides kernels that write them rounded. A router reads them as they are, and
        # so does `ba`.
        read_by = self.qkv if self.ba is None else None, self.gate_up if self.routed is None else None, self.down
        self.before_qkv, self.before_gate_up, self.before_down = (
            linear if isinstance(linear, InputKernels) else kernels for linear in read_by
        )

    def write(
        self, qkv_TK: torch.Tensor, rotation: Rotation, slot_mapping_T: torch.Tensor, kv: KVCache
    ) -> torch.Tensor:
        """Write the tokens' keys and values; return their queries (T, N, D). qkv_TK: outputs of `qkv`, without
        gates."""
        c, cache, cos_TD2, sin_TD2 = self.config, kv.layers[self.index], rotation.cos_TD2, rotation.sin_TD2
        num_kv_heads, head_dim = self.heads
        if self._full_qk_norm is not None:
            q, kv_width = c.num_heads * head_dim, num_kv_heads * head_dim
            self.kernels.rms_norm(qkv_TK[:, :q], self._full_qk_norm[0], c.norm_eps)
            self.kernels.rms_norm(qkv_TK[:, q : q + kv_width], self._full_qk_norm[1], c.norm_eps)
        qkv_TMD = qkv_TK.unflatten(1, (c.num_heads + 2 * num_kv_heads, head_dim))
        if self.spec.v_norm:
            v_TKD = qkv_TMD[:, -num_kv_heads:]
            v_TKD.copy_(F.rms_norm(v_TKD, (head_dim,), eps=c.norm_eps))
        q_TND = self.kernels.norm_rope_write(
            qkv_TMD, cos_TD2, sin_TD2, self.qk_norm_D, c.norm_eps, cache, slot_mapping_T
        )
        return q_TND if rotation.query_scale_T11 is None else q_TND.mul_(rotation.query_scale_T11)

    def attend(
        self, q_TND: torch.Tensor, attn_metadata: AttentionInput, kv: KVCache, gate_TX: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the outputs of attention and of `o`. gate_TX: of each value that `o` reads, before the sigmoid."""
        cache, scores = kv.layers[self.index], (self.scale, self.window, self.softcap, self.sinks_N)
        seen_TX = self.kernels.attention(q_TND, cache, attn_metadata, *scores).flatten(1)
        if gate_TX is not None:
            seen_TX = seen_TX.mul_(gate_TX.sigmoid())
        return self.ranks.sum(self.o(seen_TX))

    def recur(self, x_TH: torch.Tensor, attn_metadata: AttentionInput, kv: KVCache) -> torch.Tensor:
        """Return what `o` reads in a layer with a state, which this updates."""
        cache = kv.states[self.index]
        assert self.ba is not None
        assert self.delta is not None
        assert cache is not None
        qkvz_TX, ba_TX = self.qkv(x_TH), self.ba(x_TH)
        return self.kernels.delta_net(qkvz_TX, ba_TX, self.delta, self.config.norm_eps, cache, attn_metadata)

    def feed_forward(self, x_TH: Any, residual_TH: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward of `x_TH`, which comes from `before_gate_up`. residual_TH: its input before the
        norm."""
        y_TH: torch.Tensor | None = None
        if self.gate_up is not None and self.down is not None:
            up_TF = self.gate_up(x_TH)
            if self.spec.is_gated:
                y_TH = self.down(self.before_down.gate_mul(up_TF, self.activation))
            else:
                y_TH = self.down(_ACTIVATIONS[self.spec.activation](up_TF))
        if self.routed is not None:
            y_TH = self.routed(x_TH, residual_TH, y_TH)
        assert y_TH is not None, "a layer has a feed-forward, or experts"
        return self.ranks.sum(y_TH)

    def forward(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        rotations: Sequence[Rotation],
        attn_metadata: AttentionInput,
        kv: KVCache,
        row_R: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and residual (T, H) after this layer, only for the tokens `row_R` if given. Keys and values are
        written for all tokens. May write into its inputs. rotations: of each rope of the model."""
        c, rotation = self.config, rotations[self.rope_index]
        attn_metadata = attn_metadata.of_layer(kv.is_windowed[self.index])
        normed_TH, residual_TH = add_norm(c, self.before_qkv, x_TH, residual_TH, self.attn_norm)
        if self.spec.mixer is not None:
            mixed, gate_TX = self.recur(normed_TH, attn_metadata, kv), None
        else:
            qkv_TK, gate_TX = self.qkv(normed_TH), None
            if self.spec.output_gate:
                gate_TX, qkv_TK = qkv_TK.tensor_split((c.num_heads * self.heads.head_dim,), dim=1)
            mixed = self.write(qkv_TK, rotation, attn_metadata.slot_mapping_T, kv)
        if row_R is not None and len(row_R) < len(mixed):
            if len(row_R) == 0:
                return x_TH[:0], residual_TH[:0]
            rows = on_device(row_R, mixed.device)
            mixed, residual_TH, attn_metadata = mixed[rows], residual_TH[rows], attn_metadata.rows(row_R)
            gate_TX = None if gate_TX is None else gate_TX[rows]
        attended = self.o(mixed) if self.spec.mixer else self.attend(mixed, attn_metadata, kv, gate_TX)
        x_TH = self._post_norm(attended, self.attn_post_norm)
        normed_TH, residual_TH = add_norm(c, self.before_gate_up, x_TH, residual_TH, self.mlp_norm)
        x_TH = self._post_norm(self.feed_forward(normed_TH, residual_TH), self.mlp_post_norm)
        if self.spec.residual_scale:
            x_TH, residual_TH = x_TH.mul_(self._residual_scale), residual_TH.mul_(self._residual_scale)
        return x_TH, residual_TH

    def _post_norm(self, x_TH: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is None:
            return x_TH
        if self.config.norm_kind == "layer":
            return F.layer_norm(x_TH, x_TH.shape[1:], norm.weight_H, norm.bias_H, self.config.norm_eps)
        return self.kernels.rms_norm(x_TH, norm.weight_H, self.config.norm_eps)


def norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the norms' weights. An offset is added in float32, and narrower types would round the sum."""
    return torch.float32 if config.norm_offset else dtype


def add_norm(
    config: ModelConfig, kernels: InputKernels, x_TH: torch.Tensor, residual_TH: torch.Tensor, norm: Norm | None
) -> tuple[Any, torch.Tensor]:
    """Return the norm of residual + x, or the sum itself without a norm, and the sum. May write into its inputs."""
    if norm is not None and config.norm_kind == "rms":
        return kernels.add_rms_norm(x_TH, residual_TH, norm.weight_H, config.norm_eps)
    sum_TH = residual_TH.add_(x_TH)
    if norm is None:
        return sum_TH, sum_TH
    return F.layer_norm(sum_TH, sum_TH.shape[1:], norm.weight_H, norm.bias_H, config.norm_eps), sum_TH


class Decoder:
    """Weights on a device and the forward pass of a step."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        offload: LayerOffload | None = None,
        ranks: OneRank = ONE_RANK,
    ) -> None:
        """Load this rank's share of `folder`. `self.config` then describes the share, `config` the whole model.
        offload: moves each layer as it is loaded.

        Raises ModelError if the folder's tensors do not match `config` exactly, or a format cannot be divided."""
        self.kernels, self.dtype, self.device, self.ranks = kernels, dtype, device, ranks
        self.vocab_size, share = config.vocab_size, Share(config, ranks.rank, ranks.size)
        reader = WeightReader(folder, config, device)
        self.config = config = config.local(ranks.size)
        embedding = share.vocabulary(reader.embedding())
        self.embedding = _lookup_table(embedding, dtype)
        scale = config.embedding_scale
        self.embedding_scale = float(torch.tensor(scale, dtype=dtype)) if config.rounds_embedding_scale else scale
        position = reader.position_embedding()
        self.position_PH = None if position is None else position.to(device, dtype)
        self.layers: list[DecoderLayer] = []
        for index, weights in enumerate(reader.layers()):
            own = share.layer(index, weights)
            self.layers.append(DecoderLayer(config, index, own, kernels, dtype, device, ranks))
            if offload is not None:
                offload.add(self.layers[-1])
        if offload is not None:
            offload.allocate_staging()
        self.offload = offload
        self.final_norm = reader.final_norm().to(device, norm_dtype(config, dtype))
        self.lm_head: Linear | None = None
        if reader.has_vocabulary_head:
            head = embedding if reader.ties_head else share.vocabulary(reader.lm_head())
            self.lm_head = kernels.prepare_linear(head)
        classes = reader.class_head()
        self.class_head_CH = None if classes is None else classes.float().cpu().numpy()
        reader.finish()
        self._decode_steps = None
        if kernels.fused_layer_loop is not None and _is_fusable(config):
            self._decode_steps = kernels.fused_layer_loop(self.layers, config.head_dim, config.norm_eps)
        self.adapters: Adapters | None = None

    def forward(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        rotations: Sequence[Rotation],
        attn_metadata: AttentionInput,
        row_R: np.ndarray,
        kv: KVCache,
        adapter_T: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Compute the step's tokens, write their keys and values into `kv`, and return the last hidden states (R, H) of
        the tokens `row_R`.

        rotations: of the tokens' positions, one for each rope of the model. adapter_T: index in `adapters` of each
        token's adapter, -1: none; None: no token has one. Later steps need only the keys and values of the last layer,
        so the rest of that layer is computed for `row_R` alone.
        """
        x_TH = self.embed(token_ids_T, positions_T)
        residual_TH = torch.zeros_like(x_TH)
        fused_loop, layers = self._decode_steps, self.layers
        if adapter_T is not None:
            assert self.adapters is not None
            fused_loop, layers = None, self.adapters.adapted(layers, adapter_T, row_R)
        if fused_loop is not None and len(row_R) == len(x_TH) and fused_loop.supports(attn_metadata, kv.layers):
            fused_loop.run(x_TH, residual_TH, rotations, attn_metadata, kv.layers, kv.is_windowed)
        else:
            for layer in layers if self.offload is None else self.offload.in_turn(layers):
                wanted_R = row_R if layer is layers[-1] else None
                x_TH, residual_TH = layer.forward(x_TH, residual_TH, rotations, attn_metadata, kv, wanted_R)
        if len(row_R) == 0:
            return x_TH
        return add_norm(self.config, self.kernels, x_TH, residual_TH, self.final_norm)[0]

    def embed(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer (T, H)."""
        x_TH = self.ranks.embed(token_ids_T, self.embedding, self.dtype)
        if self.position_PH is not None:
            x_TH += self.position_PH[positions_T]
        return x_TH if self.embedding_scale == 1.0 else x_TH.mul_(self.embedding_scale)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Return logits (R, vocabulary) in the model's type; zeros if the model has no head over the vocabulary. Only
        the leading rank gets them."""
        if self.lm_head is None:
            return hidden_RH.new_zeros((len(hidden_RH), self.vocab_size))
        logits_RV, cap = self.ranks.gather_logits(self.lm_head(hidden_RH), self.vocab_size), self.config.logit_softcap
        if self.config.logit_scale != 1.0:
            logits_RV.mul_(self.config.logit_scale)
        return logits_RV.div_(cap).tanh_().mul_(cap) if cap else logits_RV


def _lookup_table(embedding: LinearWeight, dtype: torch.dtype) -> LinearWeight:
    """Return the embedding as it is kept: quantized, or in the narrower of its own type and `dtype`, which takes less
    memory; rows are widened when they are looked up."""
    if not isinstance(embedding, DenseWeight):
        return embedding
    narrower = embedding.weight_NK.dtype.itemsize < dtype.itemsize
    return embedding if narrower else DenseWeight(embedding.weight_NK.to(dtype))


def _is_fusable(config: ModelConfig) -> bool:
    """Return whether `FusedLayerLoop` computes such layers: with RMSNorm before attention and feed-forward, norms of
    heads, heads of one shape, and a gate; without norms of values and factors of the residual."""
    return config.norm_kind == "rms" and not any(
        layer.mixer
        or layer.heads
        or layer.output_gate
        or layer.rope.query_beta
        or layer.qk_norm == "full"
        or layer.v_norm
        or layer.residual_scale
        or not layer.pre_norm
        or not layer.is_gated
        or layer.experts
        for layer in config.layers
    )
