"""Whether a step has drafts, and how many tokens for each sequence: what `Drafting` needs of a policy. No torch.

    select -> (the proposer makes its offer) -> lengths -> (the step is computed) -> observe

Where steps overlap, the next step is selected before the one in flight is observed. Steps are observed in the order in
which they were selected; one that was undone is never observed.

Shapes: S sequences of an offer, K most drafts of one, D those of them that have drafts in the step.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True)
class Offer:
    """Sequence slot_S[s] could be drafted up to count_S[s] tokens.

    token_id_SK: the tokens, where looking them up is all there is to drafting them; else it has no columns.
    match_len_S: of lookup, how many of the last tokens, or symbols of them, occurred before; 0 without a match.
    """

    slot_S: np.ndarray  # int64
    count_S: np.ndarray  # int64
    match_len_S: np.ndarray  # int64
    token_id_SK: np.ndarray  # int64


class StepFacts(NamedTuple):
    """A planned step before drafts. Compared by identity.

    num_sequences: those that get a token. num_prefill: its other tokens (prompts, recomputed ones). room: drafts that
    it could still take; none while prompts queue, since they fill a step first.
    """

    num_sequences: int
    num_prefill: int
    room: int


class Verdict(NamedTuple):
    """What the model said to a step's drafts. drafted_D is 1 or more; it may be less than was chosen, where blocks were
    short. accepted_D counts also what lies after the end of a sequence that ended among them."""

    slot_D: np.ndarray  # int64
    drafted_D: np.ndarray  # int64
    accepted_D: np.ndarray  # int64


class StepOutcome(NamedTuple):
    """A step that was computed. num_generated: tokens that its sequences got. verdict: None without drafts. is_last: no
    sequence is left, so the time until the next step is not that step's."""

    facts: StepFacts
    num_generated: int
    verdict: Verdict | None
    is_last: bool = False


class DraftPolicy(Protocol):
    def select(self, facts: StepFacts) -> bool:
        """Return whether this step is to have drafts. Called in every step, so it is cheap."""
        ...

    def lengths(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        """Return how many tokens (int64, S) to draft for each sequence; more than the offer has count as all of it."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Record a step, once its tokens are in the slot table."""
        ...

    def admitted(self, slot: int) -> None:
        """Forget the sequence that was in this slot: another one is in it now."""
        ...

    def paused(self, ns: int) -> None:
        """Exclude `ns` from the next step's measured time."""
        ...

    def counters(self) -> dict[str, int]:
        """Return what was counted for the report, by name; sums over engines mean the same."""
        ...


class FixedDrafts:
    """Implements `DraftPolicy`: in every step as many drafts as the proposer has."""

    def select(self, facts: StepFacts) -> bool:
        return facts.room > 0

    def lengths(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        return offer.count_S

    def observe(self, outcome: StepOutcome) -> None:
        pass

    def admitted(self, slot: int) -> None:
        pass

    def paused(self, ns: int) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {}
