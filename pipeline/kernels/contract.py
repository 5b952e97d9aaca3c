"""What a set of kernels must offer: signatures, shapes, aliasing. `reference.py` is the oracle of each.

Shape suffixes: T tokens of a step, S sequences of a step, R rows of a step (some of its tokens), H hidden,
F width between up and down, N query heads, K KV heads, M heads of all kinds (N + 2 K) in a projection, D head size,
B block size, C number of blocks, M most blocks of a sequence in a block table.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from pipeline.kernels.cache import LayerCache
from pipeline.kernels.memory import on_device
from pipeline.weights.packed import LinearWeight

Linear = Callable[[Any], torch.Tensor]
"""x_TK -> y_TN, in x's type. Owns its packed weight. One that is `InputKernels` also takes what those return as x."""


@runtime_checkable
class InputKernels(Protocol):
    """Kernels that compute a linear's inputs: those of the set (`Kernels`), or the linear's own, which return them in
    a form that it alone reads. Both give the linear's outputs the same bits."""

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, /
    ) -> tuple[Any, torch.Tensor]: ...

    def silu_mul(self, gate_up_T2F: torch.Tensor, /) -> Any: ...


@dataclass(frozen=True)
class AttentionInput:
    """Where each sequence's queries and keys lie. One object serves all layers of a step.

    Sequence s computes the query tokens query_start_S1[s]:query_start_S1[s+1]; they are the last ones of its context
    of context_len_S[s] tokens, whose keys and values (these tokens' own included) lie in the blocks block_table_SM[s].
    The numpy arrays are the host's copies, for kernels that plan on the host.
    """

    query_start_S1: np.ndarray  # int32
    context_len_S: np.ndarray  # int32
    block_table_SM: np.ndarray  # int32; entries past the context are not read
    slot_mapping_T: torch.Tensor  # int64: block * B + offset, where this token's key and value are written
    block_size: int
    plans: dict[Hashable, Any] = field(default_factory=dict, compare=False)
    """A cache for this step: a kernel plans in the first layer that asks, and later layers find the plan by its key."""

    @classmethod
    def one_sequence(cls, num_tokens: int, block_size: int, device: torch.device | None = None) -> "AttentionInput":
        """A sequence that computes all of its tokens, in the blocks from 0 on."""
        return cls(
            query_start_S1=np.array([0, num_tokens], dtype=np.int32),
            context_len_S=np.array([num_tokens], dtype=np.int32),
            block_table_SM=np.arange(-(-num_tokens // block_size), dtype=np.int32)[None],
            slot_mapping_T=torch.arange(num_tokens, device=device),
            block_size=block_size,
        )

    def rows(self, row_R: np.ndarray) -> "AttentionInput":
        """The same for some tokens of the step alone, in any order: each becomes a sequence of one query.

        Their keys and values have been written by then.
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


@dataclass(frozen=True)
class GraphShape:
    """The largest steps that are to be captured and replayed, and the heads of the model."""

    max_seqs: int
    max_blocks: int  # of a sequence
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: frozenset[int | None]  # of its layers
    max_queries: int  # tokens that a sequence computes in such a step, if the kernels can take as many
    max_tokens: int  # of a step
    max_mixed_tokens: int = 0  # of a mixed step, in which a sequence computes more than `max_queries`; 0: none are
    num_numbers: int = 0  # of the runner's own, that come with each step
    with_fp8_cache: bool = False


class FutureNumbers(NamedTuple):
    """Of the runner's numbers of a step, those that only the device knows yet (its future tokens): number p_i is
    value_N[v_i]. The numbers from `at` on are p_0 to p_count - 1, and then v_0 to v_count - 1."""

    at: int
    count: int
    value_N: torch.Tensor  # int64


class GraphAttention(Protocol):
    """What attention reads of a step, in device tensors that stay where they are.

    With one of its `plans` in an `AttentionInput`, `Kernels.attention` launches the same work whatever the step, so
    that it can be captured once, behind `unpack`, and replayed after `refill`. The first of them is for any one
    sequence; the others are for steps with work of another kind, and several sequences.
    """

    plans: tuple[dict[Hashable, Any], ...]
    numbers: torch.Tensor  # int64: the runner's own
    max_queries: int
    max_mixed_tokens: int  # 0: mixed steps cannot be captured, or none are to be

    def mixed_plans(self, num_tokens: int) -> dict[Hashable, Any]:
        """For mixed steps that are padded to so many tokens."""
        ...

    def fits_mixed(self, count_S: np.ndarray, num_tokens: int) -> bool:
        """Whether a step whose sequences compute so many tokens each can be computed by `mixed_plans(num_tokens)`."""
        ...

    def refill_mixed(self, where: AttentionInput, numbers: np.ndarray, future: FutureNumbers | None = None) -> None:
        """As `refill`, for a step that `mixed_plans` computes."""
        ...

    def refill(self, where: AttentionInput, numbers: np.ndarray, future: FutureNumbers | None = None) -> int:
        """Copy a step's numbers to the device by one copy, without waiting for it, and return which of `plans` the step
        takes. numbers (int64): of the runner, from the first on."""
        ...

    def unpack(self) -> None:
        """Bring the tensors up to the step that was copied last, by one launch: the first of what is captured."""
        ...


class LayerParts(Protocol):
    """What a decoder layer is made of, as its kernels prepared it."""

    input_norm_H: torch.Tensor
    post_norm_H: torch.Tensor
    qk_norm_D: tuple[torch.Tensor, torch.Tensor] | None
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    window: int | None


class DecodeSteps(Protocol):
    """All layers at once, of steps in which each sequence computes one token or, with drafts, a few, and all go on.

    The same numbers as layer by layer: the order of kernels is the same, and so are they.
    """

    def serves(self, where: AttentionInput, caches: Sequence[LayerCache]) -> bool:
        """Whether it is for such a step, of which every token is wanted after the last layer."""
        ...

    def run(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        cos_TD2: torch.Tensor,
        sin_TD2: torch.Tensor,
        where: AttentionInput,
        caches: Sequence[LayerCache],
    ) -> None:
        """x and residual become what they are after the last layer; keys and values are written into the caches."""
        ...


@dataclass(frozen=True)
class RoundedLinears:
    """Linears on activations that are rounded first, as `fp8.py` or `int8.py` of `kernels/activations/`
    defines it.

    prepare(weight) -> Linear as `Kernels.prepare_linear`; None for a weight that has no exact form beside them.
    """

    prepare: Callable[[LinearWeight], Linear | None]
    served_by: str


@dataclass(frozen=True)
class Kernels:
    """A frozen set of functions for one device and type, and who serves each.

    prepare_linear(weight) -> Linear: packs once at load; the caller drops its own copy.
    add_rms_norm(x_TH, residual_TH, weight_H, eps) -> (y_TH, residual_TH + x_TH); may write into its inputs.
    norm_rope_write(qkv_TMD, cos_TD2, sin_TD2, (q_norm_D, k_norm_D) or None, eps, LayerCache, slot_mapping_T) -> q_TND:
      norms each query and key head where the family does, rotates halves, the layout of Hugging Face checkpoints
      ("neox"), and writes keys and values into the cache in place, in the form that it has (see `kernels/cache.py`).
    attention(q_TND, LayerCache, AttentionInput, scale, window) -> o_TND; window None is full causal attention, else a
      query at position p sees keys p - window + 1 .. p.
    silu_mul(gate_up_T2F) -> silu(first half) * second half.
    greedy(logits_RV) -> token_and_finite_2R (int64): the best token of each row, of equal ones the first, and 1 where
      the row is finite; 0 where it holds NaN or +inf, or nothing above -inf, and its token may be any of the
      vocabulary's. Logits are float32, float16 or bfloat16.
    sample(logits_RV, how_5R) -> token_and_finite_2R, as `greedy`, with sampled rows. how_5R (float64) has of each row
      its temperature (0: its best token is taken), top_k (1 to V), top_p, min_p and a number u in [0, 1). With
      w = exp((logit - largest logit) / temperature), top_k keeps the k likeliest and what equals the last of them,
      min_p what has at least that w, and top_p, of what is left, the fewest likeliest whose sum reaches top_p of its
      sum, of equal ones the first. Sampled is the first token with w > 0 at which the running sum of what is left, by
      token, passes u times the whole. Options are rounded to float32 before.
    graph_attention(shape, device) -> GraphAttention; None: steps with this attention cannot be captured.
    decode_steps(layers, head_dim, eps) -> DecodeSteps for layers made with `prepare_linear`; None: of these layers, or
      with these kernels, there are none.
    rounded: by an `engine.activation_dtype`, linears on such activations, which serve only where asked for.
    compile_ahead(steps, say, num_threads): calls `steps` without running any kernel, so that its results mean nothing,
      and compiles all that it would have run, on so many threads; `say` is told how far it is. None: there is nothing.
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
    attention: Callable[[torch.Tensor, LayerCache, AttentionInput, float, int | None], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    greedy: Callable[[torch.Tensor], torch.Tensor]
    sample: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    served_by: dict[str, str]
    graph_attention: Callable[[GraphShape, torch.device], GraphAttention] | None = None
    decode_steps: Callable[[Sequence[LayerParts], int, float], DecodeSteps | None] | None = None
    rounded: Mapping[str, RoundedLinears] = field(default_factory=dict)
    compile_ahead: Callable[[Callable[[], None], Callable[[str], None], int], None] | None = None
