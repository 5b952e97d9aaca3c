"""The interface of attention in captured steps. Suffixes: those of `kernels/contract.py`."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from pipeline.kernels.attention_input import AttentionInput


class LayerKind(NamedTuple):
    """Layers with one window and with heads of one shape, which share the metadata of a step."""

    window: int | None
    num_kv_heads: int
    head_dim: int

    @property
    def heads(self) -> tuple[int, int]:
        return self.num_kv_heads, self.head_dim


@dataclass(frozen=True)
class GraphShape:
    """The largest steps to capture and replay, and the model's heads."""

    max_seqs: int
    max_blocks: int  # per sequence
    block_size: int
    num_heads: int
    kinds: tuple[LayerKind, ...]  # of the layers with attention
    max_queries: int  # tokens that a sequence computes in such a step, if the kernels support that many
    max_tokens: int  # per step
    max_mixed_tokens: int = 0  # of a mixed step, in which a sequence computes more than `max_queries`; 0: none
    num_numbers: int = 0  # of the runner, copied along with each step
    with_fp8_cache: bool = False
    has_window_blocks: bool = False  # layers with a window have the blocks of `AttentionInput.windowed`


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
