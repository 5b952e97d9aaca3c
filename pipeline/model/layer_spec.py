"""Fields that describe a decoder layer, and the names of a checkpoint's tensors. `families.py` fills them."""

from dataclasses import dataclass
from typing import Literal

from pipeline.model.rope import Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
GATED: tuple[Activation, ...] = ("silu", "gelu_tanh")
"""Activations of feed-forwards with a gate."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention and a feed-forward, each between optional norms.

    window: keys that a query sees; None: all. scale: factor of the attention scores. softcap: bound of the scores by
    softcap * tanh(score / softcap); 0: none. pre_norm, post_norm: norms before and after attention and feed-forward.
    qk_norm: norm of queries and keys, of each head or over all heads. is_gated: the feed-forward computes
    activation(gate) * up, else activation(up).
    """

    rope: Rope
    scale: float
    window: int | None = None
    softcap: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    is_gated: bool = True
    activation: Activation = "silu"


@dataclass(frozen=True)
class TensorNames:
    """Names of tensors, without `.weight` and `.bias`. Those of a layer follow `layer`, whose braces hold its index.

    qkv, gate_up: the linears that are fused here, or the one that the checkpoint has for them. position: table of
    learned positions; empty: none. is_transposed: linears are stored as (inputs, outputs).
    """

    embedding: str = "embed_tokens"
    position: str = ""
    final_norm: str = "norm"
    layer: str = "layers.{}."
    attn_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    attn_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = "post_feedforward_layernorm"
    is_transposed: bool = False
