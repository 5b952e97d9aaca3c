"""Fields that describe a decoder layer, and the names of a checkpoint's tensors. `families.py` fills them."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pipeline.kernels.delta_shape import DeltaNet
from pipeline.kernels.routing import Routing
from pipeline.model.rope import Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]
GATED: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_swiglu")
"""Activations of feed-forwards with a gate."""


@dataclass(frozen=True)
class ExpertSpec:
    """Experts of a layer: feed-forwards of `width` of which a router chooses some for each token.

    router_bias: of the router's logits. choice_bias: of the choice alone. expert_scale: each expert's weight is
    multiplied by a stored factor. shared_width: of an expert that computes all tokens; 0: none. shared_gate: its output
    is multiplied by the sigmoid of a linear of the token. own_norms: router and experts read the layer's residual, each
    through a norm, and the outputs of experts and shared expert pass a norm before they are added. is_share: the widths
    are a rank's share.
    """

    num_experts: int
    width: int
    routing: Routing
    router_bias: bool = False
    choice_bias: bool = False
    expert_scale: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    own_norms: bool = False
    is_share: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the experts and of the shared one, if there is one."""
        return (self.width, self.shared_width) if self.shared_width else (self.width,)

    def local(self, num_ranks: int) -> "ExpertSpec":
        """Return the share of each rank: all experts, with a part of their width."""
        widths = {"width": self.width // num_ranks, "shared_width": self.shared_width // num_ranks}
        return replace(self, **widths, is_share=num_ranks > 1)


class Heads(NamedTuple):
    """Shape of a layer's keys and values: number of KV heads, and values of a head."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention and a feed-forward, each between optional norms.

    mixer: replaces attention, whose fields do not apply then; None: attention. heads: None: those of the model. window:
    keys that a query sees; None: all. scale: factor of the attention scores. softcap: bound of the scores by
    softcap * tanh(score / softcap); 0: none. pre_norm, post_norm: norms before and after attention and feed-forward.
    qk_norm: norm of queries and keys, of each head or over all heads. v_norm: norm of each head's values, without
    weights. v_is_k: values are projected by the keys' linear; norms and rotation of keys do not apply to them.
    residual_scale: a stored factor of the layer's output, residual included. is_gated: the feed-forward computes
    activation(gate) * up, else activation(up). output_gate: outputs of attention are multiplied by the sigmoid of a
    gate, which q's linear computes after each query head. sinks: attention has a sink per query head
    (`kernels.contract`). experts: None: one feed-forward for all tokens.
    """

    rope: Rope
    scale: float
    mixer: DeltaNet | None = None
    heads: Heads | None = None
    window: int | None = None
    softcap: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    v_norm: bool = False
    v_is_k: bool = False
    residual_scale: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    is_gated: bool = True
    activation: Activation = "silu"
    output_gate: bool = False
    sinks: bool = False
    experts: ExpertSpec | None = None

    def local(self, num_ranks: int) -> "LayerSpec":
        """Return the share of each rank. Fewer KV heads than ranks are replicated."""
        heads, experts = self.heads, self.experts
        return replace(
            self,
            heads=None if heads is None else heads._replace(num_kv_heads=max(1, heads.num_kv_heads // num_ranks)),
            experts=None if experts is None else experts.local(num_ranks),
        )


@dataclass(frozen=True)
class TensorNames:
    """Names of tensors, without `.weight` and `.bias`. Those of a layer follow `layer`, whose braces hold its index.

    qkv, gate_up: the linears that are fused here, or the one that the checkpoint has for them. position: table of
    learned positions; empty: none. is_transposed: linears are stored as (inputs, outputs). expert, shared: what the
    names of an expert's linears follow; braces hold its index. packed_experts: one tensor may hold a linear of all
    experts: "by_inputs": as (experts, inputs, outputs) with gate and up interleaved, or in MXFP4; "by_outputs": as
    (experts, outputs, inputs) with gate before up. delta_qkvz, delta_ba: the input linears of a Gated DeltaNet, whose
    outputs may be stored by key head; the names of its other tensors follow `delta`. router_norm, expert_norm,
    expert_post_norm, shared_post_norm: see `ExpertSpec.own_norms`.
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
    delta: str = "linear_attn."
    delta_qkvz: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    delta_ba: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    delta_out: str = "linear_attn.out_proj"
    delta_by_key_head: bool = False
    attn_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = "post_feedforward_layernorm"
    residual_scale: str = "layer_scalar"
    is_transposed: bool = False
    sinks: str = "self_attn.sinks"
    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    router_norm: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    expert_norm: str = "pre_feedforward_layernorm_2"
    expert_post_norm: str = "post_feedforward_layernorm_2"
    shared_post_norm: str = "post_feedforward_layernorm_1"
    expert: str = "mlp.experts.{}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    packed_experts: Literal["never", "by_inputs", "by_outputs"] = "never"
    shared: str = "mlp.shared_expert."
    shared_gate: str = "mlp.shared_expert_gate"
