"""Second moments of the inputs of a layer's linears on the calibration texts, for GPTQ.

A layer's inputs are the outputs of the quantized layers before it. They are kept for one layer at a time.

Shape suffixes: N outputs, K inputs, T tokens of a text, H hidden, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.linears import Linear
from pipeline.kernels.select import select_kernels
from pipeline.model.config import ModelConfig
from pipeline.model.decoder import DecoderLayer
from pipeline.model.kv_cache import KVCache, single_kv_pages
from pipeline.model.load import LayerWeights
from pipeline.model.rotation import RotationTables
from pipeline.quantize.gptq import SecondMoments

BLOCK_SIZE = 16  # of the KV cache of one text

LINEARS = ("qkv", "o", "gate_up", "down")
"""Linears of a layer, by their fields of `LayerWeights`."""


class Calibration:
    """Hidden states of all texts before the next layer, in float32."""

    def __init__(
        self,
        config: ModelConfig,
        embedding_VH: torch.Tensor,
        position_PH: torch.Tensor | None,
        texts: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self._config, self._device = config.for_length(config.max_position), device
        self._kernels = select_kernels(device, torch.float32)
        self._longest = max(map(len, texts))
        self._hidden_TH = [F.embedding(torch.tensor(ids), embedding_VH).float() for ids in texts]
        if position_PH is not None:
            self._hidden_TH = [hidden_TH + position_PH[: len(hidden_TH)].float() for hidden_TH in self._hidden_TH]
        self._hidden_TH = [hidden_TH * config.embedding_scale for hidden_TH in self._hidden_TH]

    def moments(self, index: int, weights: LayerWeights) -> dict[str, torch.Tensor]:
        """Return the second moments of the inputs of each of the layer's LINEARS, over all texts."""
        layer = self._layer(index, weights)
        moments_of = {name: SecondMoments() for name in LINEARS}
        for name, moments in moments_of.items():
            setattr(layer, name, _recording(getattr(layer, name), moments))
        for _ in self._outputs(layer):
            pass
        return {name: moments.sum_KK for name, moments in moments_of.items() if moments.sum_KK is not None}

    def advance(self, index: int, weights: LayerWeights) -> None:
        """Replace the hidden states by the outputs of the layer with these weights."""
        self._hidden_TH = list(self._outputs(self._layer(index, weights)))

    def _layer(self, index: int, weights: LayerWeights) -> DecoderLayer:
        one = replace(self._config, layers=(self._config.layers[index],))
        return DecoderLayer(one, 0, weights, self._kernels, torch.float32, self._device)

    @torch.inference_mode()
    def _outputs(self, layer: DecoderLayer) -> Iterator[torch.Tensor]:
        config = layer.config
        pages = single_kv_pages(config, BLOCK_SIZE, torch.float32)
        kv = KVCache.allocate(config, -(-self._longest // BLOCK_SIZE), pages, torch.float32, self._device)
        tables = RotationTables(config.ropes, config.head_dim, self._longest, self._device)
        for hidden_TH in self._hidden_TH:
            length = len(hidden_TH)
            attn_metadata = AttentionInput.one_sequence(length, BLOCK_SIZE, self._device)
            attn_metadata = replace(attn_metadata, state_slot_S=np.zeros(1, dtype=np.int64))
            x_TH = hidden_TH.to(self._device, copy=True)  # a layer may write into its inputs
            rotations = tables.at(torch.arange(length, device=self._device))
            x_TH, residual_TH = layer.forward(x_TH, torch.zeros_like(x_TH), rotations, attn_metadata, kv)
            yield (x_TH + residual_TH).cpu()


def _recording(linear: Linear, moments: SecondMoments) -> Linear:
    def call(x_TK: torch.Tensor) -> torch.Tensor:
        moments.add(x_TK)
        return linear(x_TK)

    return call
