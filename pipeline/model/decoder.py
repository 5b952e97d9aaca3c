"""One decoder for all served families, driven by `ModelConfig` fields and a set of kernels.

Shape suffixes: T tokens of the step, R rows that want logits, H hidden, N query heads, K KV heads, M both, D head size,
B block size, C blocks.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from pipeline.kernels.contract import AttentionInput, Kernels, Linear
from pipeline.model.config import ModelConfig
from pipeline.model.load import LayerWeights, WeightReader
from pipeline.quant.packed import DenseWeight


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers in blocks: per layer two tensors (C, B, K, D)."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        layers = range(config.num_layers)
        return cls(
            [torch.zeros(shape, dtype=dtype, device=device) for _ in layers],
            [torch.zeros(shape, dtype=dtype, device=device) for _ in layers],
        )

    def fill(self, blocks: list[int], value: float) -> None:
        """Overwrite whole blocks in every layer (after non-finite values; by tests)."""
        for cache in (*self.keys, *self.values):
            cache[blocks] = value


class _Layer:
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
        self.input_norm_H = weights.input_norm_H.to(device, dtype)
        self.post_norm_H = weights.post_norm_H.to(device, dtype)
        self.q_norm_D = None if weights.q_norm_D is None else weights.q_norm_D.to(device, dtype)
        self.k_norm_D = None if weights.k_norm_D is None else weights.k_norm_D.to(device, dtype)
        self.qkv: Linear = kernels.prepare_linear(weights.qkv)
        self.o: Linear = kernels.prepare_linear(weights.o)
        self.gate_up: Linear = kernels.prepare_linear(weights.gate_up)
        self.down: Linear = kernels.prepare_linear(weights.down)

    def attend(
        self, x_TH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, where: AttentionInput, kv: KVCache
    ) -> torch.Tensor:
        c, k = self.config, self.kernels
        qkv = self.qkv(x_TH).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        qk_TMD, v_TKD = qkv.split((c.num_heads + c.num_kv_heads, c.num_kv_heads), dim=1)
        if c.qk_norm:
            assert self.q_norm_D is not None
            assert self.k_norm_D is not None
            q_TND, k_TKD = qk_TMD.split((c.num_heads, c.num_kv_heads), dim=1)
            q_TND, k_TKD = k.rms_norm(q_TND, self.q_norm_D, c.norm_eps), k.rms_norm(k_TKD, self.k_norm_D, c.norm_eps)
            qk_TMD = torch.cat([q_TND, k_TKD], dim=1)
        q_TND, k_TKD = k.rope(qk_TMD, cos, sin).split((c.num_heads, c.num_kv_heads), dim=1)
        keys, values = kv.keys[self.index], kv.values[self.index]
        k.write_kv(k_TKD, v_TKD, keys, values, where.slot_mapping_T)
        o_TND = k.attention(q_TND, keys, values, where, c.head_dim**-0.5, self.window)
        return self.o(o_TND.flatten(1))

    def feed_forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.down(self.kernels.silu_mul(self.gate_up(x_TH)))


class Decoder:
    """Weights on a device and the forward pass of a step."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Load `folder`. Raises ModelError when its tensors do not match `config` exactly."""
        self.config, self.kernels, self.dtype, self.device = config, kernels, dtype, device
        reader = WeightReader(folder, config)
        embedding = reader.embedding()
        self.embedding_VH = embedding.to(device, dtype)
        self.layers = [
            _Layer(config, index, weights, kernels, dtype, device) for index, weights in enumerate(reader.layers())
        ]
        self.final_norm_H = reader.final_norm().to(device, dtype)
        self.lm_head = kernels.prepare_linear(DenseWeight(embedding) if config.tie_embeddings else reader.lm_head())
        reader.finish()

    def forward(
        self, token_ids_T: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, where: AttentionInput, kv: KVCache
    ) -> torch.Tensor:
        """Compute the step's tokens, write their keys and values into `kv`, return the last hidden states (T, H).

        cos and sin (T, D / 2) are the rotations of the tokens' positions.
        """
        k, eps = self.kernels, self.config.norm_eps
        residual_TH = F.embedding(token_ids_T, self.embedding_VH)
        x_TH = k.rms_norm(residual_TH, self.layers[0].input_norm_H, eps)
        for index, layer in enumerate(self.layers):
            x_TH = layer.attend(x_TH, cos, sin, where, kv)
            x_TH, residual_TH = k.add_rms_norm(x_TH, residual_TH, layer.post_norm_H, eps)
            x_TH = layer.feed_forward(x_TH)
            last = index + 1 == len(self.layers)
            norm_H = self.final_norm_H if last else self.layers[index + 1].input_norm_H
            x_TH, residual_TH = k.add_rms_norm(x_TH, residual_TH, norm_H, eps)
        return x_TH

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """(R, vocabulary) float32."""
        return self.lm_head(hidden_RH).float()
