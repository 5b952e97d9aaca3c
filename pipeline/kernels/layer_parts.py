"""The parts of decoder layers, and the interface of a loop over layers. Suffixes: those of `kernels/contract.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import LayerCache
from pipeline.kernels.linears import Linear


@dataclass(frozen=True)
class Norm:
    """Weight of a norm, and the bias of a LayerNorm."""

    weight_H: torch.Tensor
    bias_H: torch.Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> "Norm":
        bias_H = None if self.bias_H is None else self.bias_H.to(device, dtype)
        return Norm(self.weight_H.to(device, dtype), bias_H)


class Rotation(NamedTuple):
    """Rotations of a step's tokens in the layers with one rope. query_scale_T11: factor of each token's queries."""

    cos_TD2: torch.Tensor
    sin_TD2: torch.Tensor
    query_scale_T11: torch.Tensor | None = None


class LayerParts(Protocol):
    """The parts of a decoder layer, as its kernels prepared them. rope_index: of its rotations. scale, window, softcap,
    sinks_N: see `Attention`."""

    rope_index: int
    attn_norm: Norm | None
    attn_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    qk_norm_D: tuple[torch.Tensor, torch.Tensor] | None
    qkv: Linear
    o: Linear
    gate_up: Linear | None
    down: Linear | None
    activation: str
    scale: float
    window: int | None
    softcap: float
    sinks_N: torch.Tensor | None


class FusedLayerLoop(Protocol):
    """Loop over all layers, for steps in which each sequence computes one token or, with drafts, a few tokens.

    The results are the same as layer by layer: it runs the same kernels in the same order.
    """

    def supports(self, attn_metadata: AttentionInput, caches: Sequence[LayerCache]) -> bool:
        """Return whether it supports this step. The step must need the outputs of every token."""
        ...

    def run(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        rotations: Sequence[Rotation],
        attn_metadata: AttentionInput,
        caches: Sequence[LayerCache],
        is_windowed: Sequence[bool],
    ) -> None:
        """Update x and residual in place to their values after the last layer; write keys and values to the caches.
        rotations: one for each of the model's ropes. is_windowed: of each layer, for `AttentionInput.of_layer`."""
        ...
