"""Who drafts in a step, and how many tokens for each sequence: what `Drafting` asks of a policy. No torch.

    select -> (a proposer makes its offer) -> depths -> (the step is computed) -> observe

Where steps overlap, the next step is decided on before `observe` is told of the one in flight. Steps are observed in
the order in which they were selected; one that was undone is never observed.

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
    """A planned step before drafts. Told apart by identity.

    num_sequences: those that get a token. num_prefill: its other tokens (prompts, recomputed ones). room: tokens it
    could still take; none while prompts queue, since they fill a step first. num_waiting: sequences not admitted yet.
    """

    num_sequences: int
    num_prefill: int
    room: int
    num_waiting: int = 0


class Verdict(NamedTuple):
    """What the model said to a step's drafts. drafted_D is 1 or more; it may be less than was chosen, where blocks were
    short. accepted_D counts also what lies after the end of a sequence that ended among them."""

    slot_D: np.ndarray  # int64
    drafted_D: np.ndarray  # int64
    accepted_D: np.ndarray  # int64


class StepOutcome(NamedTuple):
    """A step that was computed. num_generated: tokens that its sequences got. verdict: None without drafts."""

    facts: StepFacts
    num_generated: int
    verdict: Verdict | None


class DraftPolicy(Protocol):
    def select(self, facts: StepFacts) -> int | None:
        """The number of the proposer to ask in this step; None: a plain step. Asked in every step, so it is cheap."""
        ...

    def depths(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        """How many tokens (int64, S) to draft for each sequence; more than are on offer count as all of them."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """What became of a step, told when its tokens are in the slot table."""
        ...

    def admitted(self, slot: int) -> None:
        """Another sequence is in this slot now."""
        ...

    def paused(self, ns: int) -> None:
        """So long of the time since the last step was told is no step's."""
        ...

    def counters(self) -> dict[str, int]:
        """What it counted for the report, by name; sums over engines mean the same."""
        ...


class FixedDrafts:
    """Implements `DraftPolicy`: in every step as many as the first proposer has, up to a fixed number."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens

    def select(self, facts: StepFacts) -> int | None:
        return 0

    def depths(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        return np.minimum(offer.count_S, self.max_draft_tokens)

    def observe(self, outcome: StepOutcome) -> None:
        pass

    def admitted(self, slot: int) -> None:
        pass

    def paused(self, ns: int) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {}
