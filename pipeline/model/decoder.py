"""One decoder for all supported families, driven by `ModelConfig` fields and a set of kernels.

Shape suffixes: T tokens of the step, R rows that need logits, H hidden, N query heads, K KV heads, M heads of a fused
projection (N + 2 K), D head size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.kernels.cache import LayerCache
from pipeline.kernels.contract import AttentionInput, InputKernels, Kernels, Linear
from pipeline.kernels.memory import advise_huge_pages, on_device
from pipeline.model.config import ModelConfig
from pipeline.model.load import LayerWeights, WeightReader
from pipeline.weights.packed import DenseWeight


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers, in blocks."""

    layers: list[LayerCache]
    has_spare_block: bool = False

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        with_spare_block: bool = False,
    ) -> "KVCache":
        """Allocate a cache in the model's type or FP8. with_spare_block: add a last block, to which the tokens that pad
        a step are written."""
        shape = num_blocks + with_spare_block, block_size, config.num_kv_heads, config.head_dim
        layers = [LayerCache.allocate(*shape, dtype, device) for _ in range(config.num_layers)]
        if device.type == "cpu":
            for layer in layers:
                for tensor in layer.tensors:
                    advise_huge_pages(tensor)
        return cls(layers, with_spare_block)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, including the spare one."""
        return self.layers[0].k_CBKD.shape[0]

    @property
    def block_size(self) -> int:
        return self.layers[0].k_CBKD.shape[1]

    def fill(self, blocks: list[int], value: float) -> None:
        """Overwrite whole blocks in every layer (after non-finite values, and in tests)."""
        for layer in self.layers:
            layer.fill(blocks, value)


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
    ) -> None:
        self.config, self.kernels, self.index = config, kernels, index
        self.window = config.windows[index]
        self.softcap = 0.0
        self.sinks_N: torch.Tensor | None = None
        self.input_norm_H = weights.input_norm_H.to(device, dtype)
        self.post_norm_H = weights.post_norm_H.to(device, dtype)
        self.qk_norm_D: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.qk_norm:
            assert weights.q_norm_D is not None
            assert weights.k_norm_D is not None
            self.qk_norm_D = weights.q_norm_D.to(device, dtype), weights.k_norm_D.to(device, dtype)
        self.qkv: Linear = kernels.prepare_linear(weights.qkv)
        self.o: Linear = kernels.prepare_linear(weights.o)
        self.gate_up: Linear = kernels.prepare_linear(weights.gate_up)
        self.down: Linear = kernels.prepare_linear(weights.down)
        # A linear that rounds its inputs provides kernels that write them rounded.
        self.before_qkv, self.before_gate_up, self.before_down = (
            linear if isinstance(linear, InputKernels) else kernels for linear in (self.qkv, self.gate_up, self.down)
        )

    def write(
        self, x_TH: Any, cos: torch.Tensor, sin: torch.Tensor, slot_mapping_T: torch.Tensor, kv: KVCache
    ) -> torch.Tensor:
        """Write the tokens' keys and values; return their queries (T, N, D). `x_TH` comes from `before_qkv`."""
        c = self.config
        qkv_TMD = self.qkv(x_TH).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        cache = kv.layers[self.index]
        return self.kernels.norm_rope_write(qkv_TMD, cos, sin, self.qk_norm_D, c.norm_eps, cache, slot_mapping_T)

    def attend(self, q_TND: torch.Tensor, attn_metadata: AttentionInput, kv: KVCache) -> torch.Tensor:
        cache, scale = kv.layers[self.index], self.config.head_dim**-0.5
        o_TND = self.kernels.attention(q_TND, cache, attn_metadata, scale, self.window, self.softcap, self.sinks_N)
        return self.o(o_TND.flatten(1))

    def feed_forward(self, x_TH: Any) -> torch.Tensor:
        return self.down(self.before_down.silu_mul(self.gate_up(x_TH)))

    def forward(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attn_metadata: AttentionInput,
        kv: KVCache,
        row_R: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and residual (T, H) after this layer, only for the tokens `row_R` if given. Keys and values are
        written for all tokens. May write into its inputs."""
        eps = self.config.norm_eps
        normed_TH, residual_TH = self.before_qkv.add_rms_norm(x_TH, residual_TH, self.input_norm_H, eps)
        q_TND = self.write(normed_TH, cos, sin, attn_metadata.slot_mapping_T, kv)
        if row_R is not None and len(row_R) < len(q_TND):
            if len(row_R) == 0:
                return x_TH[:0], residual_TH[:0]
            rows = on_device(row_R, q_TND.device)
            q_TND, residual_TH, attn_metadata = q_TND[rows], residual_TH[rows], attn_metadata.rows(row_R)
        x_TH = self.attend(q_TND, attn_metadata, kv)
        normed_TH, residual_TH = self.before_gate_up.add_rms_norm(x_TH, residual_TH, self.post_norm_H, eps)
        return self.feed_forward(normed_TH), residual_TH


class Decoder:
    """Weights on a device and the forward pass of a step."""

    def __init__(
        self, folder: Path, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Load `folder`. Raises ModelError if its tensors do not match `config` exactly."""
        self.config, self.kernels, self.dtype, self.device = config, kernels, dtype, device
        reader = WeightReader(folder, config, device)
        embedding = reader.embedding()
        narrower = embedding.dtype.itemsize < dtype.itemsize  # it is widened per lookup and takes half the memory
        self.embedding_VH = embedding.to(device, embedding.dtype if narrower else dtype)
        self.layers = [
            DecoderLayer(config, index, weights, kernels, dtype, device)
            for index, weights in enumerate(reader.layers())
        ]
        self.final_norm_H = reader.final_norm().to(device, dtype)
        self.lm_head: Linear | None = None
        if reader.has_vocabulary_head:
            head = DenseWeight(embedding) if reader.ties_head else reader.lm_head()
            self.lm_head = kernels.prepare_linear(head)
        classes = reader.class_head()
        self.class_head_CH = None if classes is None else classes.float().cpu().numpy()
        reader.finish()
        self._decode_steps = None
        if kernels.fused_layer_loop is not None:
            self._decode_steps = kernels.fused_layer_loop(self.layers, config.head_dim, config.norm_eps)
        self.num_widened = len(reader.widened)

    def forward(
        self,
        token_ids_T: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attn_metadata: AttentionInput,
        row_R: np.ndarray,
        kv: KVCache,
    ) -> torch.Tensor:
        """Compute the step's tokens, write their keys and values into `kv`, and return the last hidden states (R, H) of
        the tokens `row_R`.

        cos and sin (T, D / 2) are the rotations of the tokens' positions. Later steps need only the keys and values of
        the last layer, so the rest of that layer is computed for `row_R` alone.
        """
        k, eps = self.kernels, self.config.norm_eps
        x_TH = F.embedding(token_ids_T, self.embedding_VH).to(self.dtype)
        residual_TH = torch.zeros_like(x_TH)
        fused_loop = self._decode_steps
        if fused_loop is not None and len(row_R) == len(x_TH) and fused_loop.supports(attn_metadata, kv.layers):
            fused_loop.run(x_TH, residual_TH, cos, sin, attn_metadata, kv.layers)
        else:
            for layer in self.layers:
                wanted_R = row_R if layer is self.layers[-1] else None
                x_TH, residual_TH = layer.forward(x_TH, residual_TH, cos, sin, attn_metadata, kv, wanted_R)
        if len(row_R) == 0:
            return x_TH
        return k.add_rms_norm(x_TH, residual_TH, self.final_norm_H, eps)[0]

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Return logits (R, vocabulary) in the model's type; zeros if the model has no head over the vocabulary."""
        if self.lm_head is None:
            return hidden_RH.new_zeros((len(hidden_RH), self.config.vocab_size))
        return self.lm_head(hidden_RH)
