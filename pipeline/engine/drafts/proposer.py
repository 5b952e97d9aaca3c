"""Who drafts tokens: what the engine asks of a proposer.

A step asks twice, because the length of drafts is another's decision (see policy.py): `offer` says how many tokens
each sequence could be drafted and on what grounds, `draft` gives those that were chosen. In between, the KV blocks of
what was chosen are given to the sequences (see drafting.py).

What was drafted never changes what is generated, only how fast.

Shapes: S sequences, K most drafts of one, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pipeline.engine.drafts.policy import Offer
from pipeline.engine.forward.in_flight import StepInFlight


class DraftsOnDevice(NamedTuple):
    """Draft k of sequence s is row row_SK[s, k] of token_ids_N, which lies on the device."""

    row_SK: np.ndarray  # int64
    token_ids_N: torch.Tensor  # int64


@dataclass(frozen=True)
class Drafts:
    """token_id_SK: the first tokens of row s, as many as were asked for, are drafts, ids that the model has; what
    follows means nothing.

    device_drafts: where a device samples them and the host does not know them (yet); then token_id_SK means nothing.

    q_SKV: the probabilities that each was sampled from, with numbers of a stream of its own (see random_numbers.py).
    None where drafts are not sampled from a known distribution, which is always right.
    """

    token_id_SK: np.ndarray  # int64
    q_SKV: torch.Tensor | None = None
    device_drafts: DraftsOnDevice | None = None


class Proposer(Protocol):
    """Batched over sequences, which it knows by their slots. It reads their tokens from the SlotTable it was made with:
    what was appended since it last looked, it finds there.

    A sequence's known tokens only grow while it holds a slot, and drafts of an earlier step are among them as far as
    they were accepted. But see `follows`.
    """

    name: str

    def admitted(self, slot: int) -> None:
        """Another sequence is in this slot now, its known tokens in the table."""
        ...

    def left(self, slot: int, finished: bool) -> None:
        """The sequence is about to leave the slot, its tokens still in the table; `finished`: it came to its end."""
        ...

    def follows(self, flight: StepInFlight) -> bool:
        """Whether it can draft with promised tokens (see `Scheduler.promise`) instead of those in flight. If there are
        drafts in flight, they are this proposer's."""
        ...

    def offer(self, slot_S: np.ndarray, flight: StepInFlight | None = None) -> Offer:
        """What could be drafted for these sequences, whose next token is computed in this step. flight: what it
        `follows`, and the tokens in flight are promised ones; None: all known tokens are there."""
        ...

    def draft(self, offer: Offer, count_S: np.ndarray, flight: StepInFlight | None = None) -> Drafts:
        """Draft count_S[s] tokens for each sequence of the offer, at most as many as it says. flight: as for it."""
        ...

    def settled(self, slot_S: np.ndarray, drafted_S: np.ndarray, accepted_S: np.ndarray) -> None:
        """Of the drafted_S tokens of each of these sequences in an earlier `draft`, the first one that was not settled
        yet, so many were accepted, and the table has them; those that came to their end have left. Not called where the
        step was undone."""
        ...

    def undone(self, slot_S: np.ndarray) -> None:
        """The step of these sequences was undone: the blocks after their computed tokens are no longer theirs."""
        ...
