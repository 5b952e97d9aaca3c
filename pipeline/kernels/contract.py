"""The interface of a set of kernels: signatures, shapes, aliasing. `reference.py` is the oracle for each kernel.

Shape suffixes: T tokens of a step, S sequences of a step, R rows of a step (some of its tokens), H hidden size,
F width between up and down, N query heads, K KV heads, M heads of all kinds (N + 2 K) in a projection, D head size,
E experts of a layer, A experts of a token, B block size, C number of blocks, M maximum number of blocks of a sequence
in a block table.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from pipeline.kernels.cache import LayerCache
from pipeline.kernels.memory import on_device
from pipeline.kernels.routing import Routing
from pipeline.weights.packed import ExpertWeights, LinearWeight

P = TypeVar("P")

Linear = Callable[[Any], torch.Tensor]
"""x_TK -> y_TN, in x's type. Owns its packed weight. If it implements `InputKernels`, it also accepts their results."""


@runtime_checkable
class InputKernels(Protocol):
    """Kernels that compute a linear's inputs.

    They belong to the set (`Kernels`), or to the linear, which then returns its inputs in a private form. The linear's
    outputs are bit-identical either way.
    """

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, /
    ) -> tuple[Any, torch.Tensor]: ...

    def gate_mul(self, gate_up_T2F: torch.Tensor, activation: str, /) -> Any: ...


class Workspace:
    """Memory that the linears of a model share. It holds no weights: its contents change from call to call."""


@dataclass(frozen=True)
class Norm:
    """Weight of a norm, and the bias of a LayerNorm."""

    weight_H: torch.Tensor
    bias_H: torch.Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> "Norm":
        bias_H = None if self.bias_H is None else self.bias_H.to(device, dtype)
        return Norm(self.weight_H.to(device, dtype), bias_H)


@dataclass(frozen=True)
class AttentionInput:
    """Layout of each sequence's queries and keys. One object serves all layers of a step.

    Sequence s computes the query tokens query_start_S1[s]:query_start_S1[s+1]. They are the last tokens of its context
    of context_len_S[s] tokens, whose keys and values (including those of these tokens) are in the blocks
    block_table_SM[s]. The numpy arrays are host copies, for kernels that plan on the host.
    """

    query_start_S1: np.ndarray  # int32
    context_len_S: np.ndarray  # int32
    block_table_SM: np.ndarray  # int32; entries past the context are not read
    slot_mapping_T: torch.Tensor  # int64: block * B + offset, where this token's key and value are written
    block_size: int
    plans: dict[Hashable, Any] = field(default_factory=dict, compare=False)
    """Plans of this step: a kernel plans in the first layer that needs a plan; later layers find it by its key."""

    @classmethod
    def one_sequence(cls, num_tokens: int, block_size: int, device: torch.device | None = None) -> "AttentionInput":
        """Describe a sequence that computes all of its tokens, in the blocks from 0 on."""
        return cls(
            query_start_S1=np.array([0, num_tokens], dtype=np.int32),
            context_len_S=np.array([num_tokens], dtype=np.int32),
            block_table_SM=np.arange(-(-num_tokens // block_size), dtype=np.int32)[None],
            slot_mapping_T=torch.arange(num_tokens, device=device),
            block_size=block_size,
        )

    def rows(self, row_R: np.ndarray) -> "AttentionInput":
        """Return the metadata of some tokens of the step, in any order, each as a sequence of one query.

        Their keys and values must have been written already.
        """
        sequence_R = np.searchsorted(self.query_start_S1, row_R, side="right") - 1
        behind_R = self.query_start_S1[sequence_R + 1] - 1 - row_R
        return AttentionInput(
            query_start_S1=np.arange(len(row_R) + 1, dtype=np.int32),
            context_len_S=(self.context_len_S[sequence_R] - behind_R).astype(np.int32),
            block_table_SM=self.block_table_SM[sequence_R],
            slot_mapping_T=self.slot_mapping_T[on_device(row_R, self.slot_mapping_T.device)],
            block_size=self.block_size,
        )


class Rotation(NamedTuple):
    """Rotations of a step's tokens in the layers with one rope. query_scale_T11: factor of each token's queries."""

    cos_TD2: torch.Tensor
    sin_TD2: torch.Tensor
    query_scale_T11: torch.Tensor | None = None


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
class GraphShape:
    """The largest steps to capture and replay, and the model's heads."""

    max_seqs: int
    max_blocks: int  # per sequence
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: frozenset[int | None]  # of the layers
    max_queries: int  # tokens that a sequence computes in such a step, if the kernels support that many
    max_tokens: int  # per step
    max_mixed_tokens: int = 0  # of a mixed step, in which a sequence computes more than `max_queries`; 0: none
    num_numbers: int = 0  # of the runner, copied along with each step
    with_fp8_cache: bool = False


class FutureNumbers(NamedTuple):
    """The runner's numbers that only the device knows yet (future tokens): number p_i is value_N[v_i].

    From index `at` on, the runner's numbers contain p_0 to p_count - 1, followed by v_0 to v_count - 1.
    """

    at: int
    count: int
    value_N: torch.Tensor  # int64


class GraphAttention(Protocol):
    """Attention metadata of a step, in device tensors with fixed addresses.

    With one of its `plans` in an `AttentionInput`, `Kernels.attention` launches the same work for every step, so a
    graph can capture it once, after `unpack`, and replay it after each `prepare_replay`. The first plan is for a single
    sequence of any length; the others are for steps with other kinds of work and several sequences.
    """

    plans: tuple[dict[Hashable, Any], ...]
    numbers: torch.Tensor  # int64: the runner's
    max_queries: int
    max_mixed_tokens: int  # 0: mixed steps cannot be captured, or need not be

    def mixed_plans(self, num_tokens: int) -> dict[Hashable, Any]:
        """Return the plans for mixed steps that are padded to `num_tokens`."""
        ...

    def fits_mixed(self, count_S: np.ndarray, num_tokens: int) -> bool:
        """Return whether `mixed_plans(num_tokens)` can compute a step whose sequences compute count_S tokens each."""
        ...

    def prepare_mixed_replay(
        self, attn_metadata: AttentionInput, numbers: np.ndarray, future: FutureNumbers | None = None
    ) -> None:
        """Do the same as `prepare_replay` for a step that `mixed_plans` computes."""
        ...

    def prepare_replay(
        self, attn_metadata: AttentionInput, numbers: np.ndarray, future: FutureNumbers | None = None
    ) -> int:
        """Copy a step's metadata to the device in one copy, without waiting for it. Return the index in `plans` of the
        plan for the step. numbers (int64): the runner's numbers, starting with the first."""
        ...

    def unpack(self) -> None:
        """Update the tensors to the step that was copied last, in one launch, which is captured first."""
        ...


@dataclass(frozen=True)
class LowRankUpdate:
    """Update of a linear by an adapter: y += (x @ a_RK.T) @ b_NR.T, with R its rank. b includes the adapter's scale."""

    a_RK: torch.Tensor
    b_NR: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.a_RK.nbytes + self.b_NR.nbytes

    def select_outputs(self, row_N: torch.Tensor) -> "LowRankUpdate":
        """Return the update of these outputs (int64), in this order."""
        return LowRankUpdate(self.a_RK, self.b_NR[row_N])

    def select_inputs(self, start: int, stop: int) -> "LowRankUpdate":
        """Return the update that reads only inputs start:stop. Those of a partition of the inputs add up to the whole
        update."""
        return LowRankUpdate(self.a_RK[:, start:stop].contiguous(), self.b_NR)


@dataclass(frozen=True)
class AdapterTokens:
    """Index of each token's adapter. One object serves all linears of a step that compute the same tokens."""

    adapter_T: np.ndarray  # int64; -1: none
    num_adapters: int
    device: torch.device
    _plans: dict[Hashable, Any] = field(default_factory=dict, compare=False)

    def plan(self, make: Callable[["AdapterTokens"], P]) -> P:
        """Return `make(self)`, computed by the first linear of the step."""
        if make not in self._plans:
            self._plans[make] = make(self)
        return self._plans[make]


class Lora(Protocol):
    """The updates of a linear by all adapters, on the device."""

    @property
    def num_bytes(self) -> int: ...

    def __call__(self, y_TN: torch.Tensor, x_TK: torch.Tensor, tokens: AdapterTokens) -> None:
        """Add the update of each token's adapter to y, in place."""
        ...


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
    ) -> None:
        """Update x and residual in place to their values after the last layer; write keys and values to the caches.
        rotations: one for each of the model's ropes."""
        ...


@dataclass(frozen=True)
class RoundedLinears:
    """Linears on rounded activations, as `fp8.py` or `int8.py` of `kernels/activations/` defines them.

    prepare(weight) -> Linear, like `Kernels.prepare_linear`; None if the weight has no exact form in this type.
    """

    prepare: Callable[[LinearWeight], Linear | None]
    backends: str


@dataclass(frozen=True)
class Kernels:
    """A frozen set of functions for one device and type, with the implementation behind each (`backends`).

    prepare_linear(weight) -> Linear: packs once at load; the caller drops its own copy.
    add_rms_norm(x_TH, residual_TH, weight_H, eps) -> (y_TH, residual_TH + x_TH); may write into its inputs.
    norm_rope_write(qkv_TMD, cos_TD2, sin_TD2, (q_norm_D, k_norm_D) or None, eps, LayerCache, slot_mapping_T) -> q_TND:
      norms each query and key head if the family does, rotates halves, the layout of Hugging Face checkpoints ("neox"),
      and writes keys and values into the cache in place, in the cache's form (see `kernels/cache.py`).
    attention(q_TND, LayerCache, AttentionInput, scale, window, softcap, sinks_N) -> o_TND: see `Attention`.
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
