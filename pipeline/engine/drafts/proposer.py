"""Proposers of drafts: what the engine needs of one.

A step calls it twice, because a policy decides the number of drafts (see policy.py): `offer` says how many tokens each
sequence could be drafted, `draft` gives those that were chosen. In between, the KV blocks of what was chosen are given
to the sequences (see drafting.py).

Drafts never change what is generated, only how fast.

Shapes: S sequences, K most drafts of one, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pipeline.engine.drafts.policy import Offer


@dataclass(frozen=True)
class Drafts:
    """token_id_SK: the first tokens of row s, as many as were chosen, are drafts, ids that the model has; the others
    mean nothing.

    q_SKV: the probabilities that each was sampled from, with numbers of a stream of its own (see random_numbers.py).
    None where drafts are not sampled from a known distribution, which is always right.
    """

    token_id_SK: np.ndarray  # int64
    q_SKV: torch.Tensor | None = None


class Proposer(Protocol):
    """Batched over sequences, which it knows by their slots. It reads their tokens from the SlotTable it was made with:
    what was appended since it last looked, it finds there.

    A sequence's known tokens only grow while it holds a slot, and drafts of an earlier step are among them as far as
    they were accepted. All of them are known whenever it is called.
    """

    def admitted(self, slot: int) -> None:
        """Begin with another sequence in this slot, whose known tokens are in the table."""
        ...

    def left(self, slot: int, finished: bool) -> None:
        """End with the sequence in this slot, whose tokens are still in the table. finished: it came to its end."""
        ...

    def offer(self, slot_S: np.ndarray) -> Offer:
        """Return what could be drafted for these sequences, whose next token is computed in this step."""
        ...

    def draft(self, offer: Offer, count_S: np.ndarray) -> Drafts:
        """Draft count_S[s] tokens for each sequence of the offer, at most as many as it says."""
        ...

    def settled(self, slot_S: np.ndarray, drafted_S: np.ndarray, accepted_S: np.ndarray) -> None:
        """Take in that accepted_S of the drafted_S tokens of the last `draft` were accepted, which the table has; those
        of sequences that ended have left. Not called where the step was undone."""
        ...

    def undone(self, slot_S: np.ndarray) -> None:
        """Take in that the step of these sequences was undone: blocks after their computed tokens are not theirs."""
        ...
