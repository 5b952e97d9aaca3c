"""The interface of a set of kernels: signatures, shapes, aliasing. `reference.py` is the oracle for each kernel.

Shape suffixes: T tokens of a step, S sequences of a step, R rows of a step (some of its tokens), H hidden size,
F width between up and down, N query heads, K KV heads, M heads of all kinds (N + 2 K) in a projection, D head size,
E experts of a layer, A experts of a token, B block size, C number of blocks, M maximum number of blocks of a sequence
in a block table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pipeline.kernels.adapters import Lora, LowRankUpdate
from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import LayerCache
from pipeline.kernels.delta_net import DeltaWeights, StateCache
from pipeline.kernels.graph_attention import GraphAttention, GraphShape
from pipeline.kernels.layer_parts import FusedLayerLoop, LayerParts
from pipeline.kernels.linears import Linear, RoundedLinears
from pipeline.kernels.routing import Routing
from pipeline.weights.packed import ExpertWeights, LinearWeight


class Attention(Protocol):
    """Attention of a step's queries to the keys and values in the cache."""

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
        """Return o_TND: for each query, the values weighted by the softmax of score = scale * query @ key.

        window: None is full causal attention, else a query at position p sees keys p - window + 1 .. p.
        softcap: above 0, scores become softcap * tanh(score / softcap) before the mask.
        sinks_N: float32, contiguous: one logit per query head, neither scaled nor capped. It joins the softmax as the
        score of one more key, whose value is zero: weights are exp(score) / (exp(sink) + sum of exp(score)).
        """
        ...


class Route(Protocol):
    """Choice of experts by a router's logits."""

    def __call__(
        self, logits_TE: torch.Tensor, routing: Routing, choice_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return expert_TA (int64), different experts for each token in any order, and their weights (float32).
        choice_bias_E: float32."""
        ...


class Experts(Protocol):
    """Feed-forwards of a layer's experts, with their packed weights."""

    def __call__(self, x_TH: torch.Tensor, expert_TA: torch.Tensor, weight_TA: torch.Tensor) -> torch.Tensor:
        """Return y_TH = sum over a token's experts of weight * down(gate_mul(gate_up(x))), in x's type. The sum is in
        float32 and rounded once."""
        ...


@dataclass(frozen=True)
class Kernels:
    """A frozen set of functions for one device and type, with the implementation behind each (`backends`).

    prepare_linear(weight) -> Linear: packs once at load; the caller drops its own copy.
    add_rms_norm(x_TH, residual_TH, weight_H, eps) -> (y_TH, residual_TH + x_TH); may write into its inputs.
    norm_rope_write(qkv_TMD, cos_TD2, sin_TD2, (q_norm_D, k_norm_D) or None, eps, LayerCache, slot_mapping_T) -> q_TND:
      norms each query and key head if the family does, rotates halves, the layout of Hugging Face checkpoints ("neox"),
      and writes keys and values into the cache in place, in the cache's form (see `kernels/cache.py`).
    attention(q_TND, LayerCache, AttentionInput, scale, window, softcap, sinks_N) -> o_TND: see `Attention`.
    delta_net(qkvz_TX, ba_TX, weights, eps, StateCache, AttentionInput) -> o_TX: a Gated DeltaNet between its linears;
      advances the states of the step's sequences, or keeps its inputs (see `kernels/delta_net.py`). qkvz: channels, and
      z of all value heads. ba: b, then a, of all value heads.
    rms_norm(x_TH, weight_H, eps) -> the norm, written into x, whose rows may lie apart.
    gate_mul(gate_up_T2F, activation) -> activation(first half) * second half; "silu", or "gelu_tanh", the approximation
      by tanh of GELU (arXiv 1606.08415). "clamped_swiglu" is gate * sigmoid(1.702 * gate) * (up + 1), with gate = first
      half, at most 7, and up = second half, between -7 and 7 (gpt-oss).
    route(logits_TE, routing, choice_bias_E): see `Route`.
    prepare_experts(weights, activation, prepare_linear) -> Experts. prepare_linear: of their linears, if the set
      computes experts by linears.
    greedy(logits_RV) -> token_and_finite_2R (int64): the best token of each row, the first one in a tie, and 1 if the
      row is finite. A row with a NaN or +inf, or without a value above -inf, gets 0 and an arbitrary token id of the
      vocabulary. Logits are float32, float16 or bfloat16.
    sample(logits_RV, sampling_params_5R) -> token_and_finite_2R, like `greedy`, with sampled rows. sampling_params_5R
      (float64) holds for each row: temperature (0: greedy), top_k (1 to V), top_p, min_p and a number u in [0, 1). Let
      w = exp((logit - largest logit) / temperature). top_k keeps the k likeliest tokens and those that tie with the
      k-th; min_p keeps tokens with at least that w; top_p keeps, of the rest, the smallest number of likeliest
      tokens whose sum reaches top_p of their sum, the first ones in a tie. The sample is the first token with w > 0 at
      which the running sum of what is kept, in order of token ids, exceeds u times its total. Parameters are rounded to
      float32 first.
    prepare_lora(updates) -> Lora: packs the updates of a linear once at load. updates: by the index of the adapter;
      None: it does not change this linear.
    graph_attention(shape, device) -> GraphAttention; None: steps with this attention cannot be captured.
    fused_layer_loop(layers, head_dim, eps) -> FusedLayerLoop for layers made with `prepare_linear`; None: these layers
      or kernels do not support it.
    rounded: linears on rounded activations, by `engine.activation_dtype`; used only on request.
    compile_ahead(steps, log, num_threads): calls `steps` without running any kernel, so its results are meaningless,
      then compiles every kernel that it would have run, on `num_threads` threads. `log` receives progress messages.
      None: there is nothing to compile.
    """

    prepare_linear: Callable[[LinearWeight], Linear]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    norm_rope_write: Callable[
        [
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
            tuple[torch.Tensor, torch.Tensor] | None,
            float,
            LayerCache,
            torch.Tensor,
        ],
        torch.Tensor,
    ]
    attention: Attention
    delta_net: Callable[
        [torch.Tensor, torch.Tensor, DeltaWeights, float, StateCache, AttentionInput],
        torch.Tensor,
    ]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    gate_mul: Callable[[torch.Tensor, str], torch.Tensor]
    route: Route
    prepare_experts: Callable[[ExpertWeights, str, Callable[[LinearWeight], Linear]], Experts]
    greedy: Callable[[torch.Tensor], torch.Tensor]
    sample: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    prepare_lora: Callable[[Sequence[LowRankUpdate | None]], Lora]
    backends: dict[str, str]
    graph_attention: Callable[[GraphShape, torch.device], GraphAttention] | None = None
    fused_layer_loop: Callable[[Sequence[LayerParts], int, float], FusedLayerLoop | None] | None = None
    rounded: Mapping[str, RoundedLinears] = field(default_factory=dict)
    compile_ahead: Callable[[Callable[[], None], Callable[[str], None], int], None] | None = None
