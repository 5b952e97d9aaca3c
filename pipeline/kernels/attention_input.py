"""Layout of a step's queries and keys. Suffixes: those of `kernels/contract.py`."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from pipeline.kernels.memory import on_device


class CapturedStates(NamedTuple):
    """Sequences of a captured step, for layers with states. numbers_4P: slot, first token, number of tokens and context
    of each (int64, on the device); those that pad the step have no tokens. max_count: the most tokens of one."""

    numbers_4P: torch.Tensor
    max_count: int


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
    state_slot_S: np.ndarray | None = None  # int64: where each sequence's states are; None: no layer keeps a state
    captured_states: CapturedStates | None = None
    windowed: "AttentionInput | None" = None
    """The same step in the blocks of the layers that keep only the last tokens; None: all layers keep all."""

    def of_layer(self, is_windowed: bool) -> "AttentionInput":
        """Return the layout for a layer."""
        if not is_windowed:
            return self
        assert self.windowed is not None
        return self.windowed

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
