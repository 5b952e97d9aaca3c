"""Interface of draft proposers.

A step calls a proposer twice, because a policy decides the number of drafts (see policy.py): `propose` returns how many
tokens each sequence could have, `draft` returns the chosen ones. In between, KV blocks for them are allocated (see
spec_decoder.py).

Drafts change only the speed of generation, never the tokens.

Shapes: S sequences, K maximum drafts of one, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pipeline.engine.drafts.policy import Proposal


@dataclass(frozen=True)
class Drafts:
    """Drafted tokens. token_id_SK: the first count_S[s] tokens of row s are valid ids of the model; the rest is
    undefined.

    q_SKV: the probabilities that each was sampled from, with numbers of a separate stream (see random_numbers.py).
    None if drafts are not sampled from a known distribution, which is always correct.
    """

    token_id_SK: np.ndarray  # int64
    q_SKV: torch.Tensor | None = None


class Proposer(Protocol):
    """Proposer of drafts for a batch of sequences, given by their slots. It reads their tokens from its SlotTable,
    including those appended since its last call.

    A sequence's known tokens only grow while it holds a slot; accepted drafts of earlier steps are among them. No
    tokens are in flight when it is called.
    """

    def admitted(self, slot: int) -> None:
        """Start with a new sequence in this slot, whose known tokens are in the table."""
        ...

    def on_evicted(self, slot: int, finished: bool) -> None:
        """End with the sequence in this slot, whose tokens are still in the table. finished: it was completed."""
        ...

    def propose(self, slot_S: np.ndarray) -> Proposal:
        """Return the available drafts of these sequences, whose next token is computed in this step."""
        ...

    def draft(self, proposal: Proposal, count_S: np.ndarray) -> Drafts:
        """Draft count_S[s] tokens for each sequence of the proposal, at most its offered count."""
        ...

    def on_verified(self, slot_S: np.ndarray, drafted_S: np.ndarray, accepted_S: np.ndarray) -> None:
        """Record that accepted_S of the drafted_S tokens of the last `draft` were accepted; they are in the table,
        except those of ended sequences. Not called if the step was undone."""
        ...

    def on_rollback(self, slot_S: np.ndarray) -> None:
        """Record that the step of these sequences was undone: blocks after their computed tokens were released."""
        ...
