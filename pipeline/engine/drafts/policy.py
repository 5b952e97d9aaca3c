"""Draft policies: whether a step has drafts, and how many tokens for each sequence. No torch.

    select -> (the proposer makes its proposal) -> lengths -> (the step is computed) -> observe

If steps overlap, the next step is selected before the one in flight is observed. Steps are observed in the order in
which they were selected; an undone step is never observed.

Shapes: S sequences of a proposal, K maximum drafts of one, D those of them that have drafts in the step.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True)
class Proposal:
    """Available drafts: up to count_S[s] tokens for sequence slot_S[s].

    token_id_SK: the tokens, if they are already known, as with lookup; otherwise it has no columns.
    match_len_S: with lookup, how many of the last tokens, or symbols of them, matched; 0 without a match.
    """

    slot_S: np.ndarray  # int64
    count_S: np.ndarray  # int64
    match_len_S: np.ndarray  # int64
    token_id_SK: np.ndarray  # int64


class StepFacts(NamedTuple):
    """A planned step before drafts. Compared by identity.

    num_sequences: sequences that sample. num_prefill: its other tokens (prompts, recomputed ones). room: maximum number
    of drafts; 0 while prompts queue, because they fill the step first.
    """

    num_sequences: int
    num_prefill: int
    room: int


class AcceptanceCounts(NamedTuple):
    """Verification result of a step's drafts. drafted_D is 1 or more; it may be less than was chosen, if blocks were
    short. accepted_D also counts drafts after the end of a sequence that ended among them."""

    slot_D: np.ndarray  # int64
    drafted_D: np.ndarray  # int64
    accepted_D: np.ndarray  # int64


class StepOutcome(NamedTuple):
    """Result of a computed step. num_generated: tokens of all its sequences. acceptance: None without drafts.
    is_last: no sequence is left, so the time until the next step does not belong to this one."""

    facts: StepFacts
    num_generated: int
    acceptance: AcceptanceCounts | None
    is_last: bool = False


class DraftPolicy(Protocol):
    def select(self, facts: StepFacts) -> bool:
        """Return whether this step should have drafts. Must be cheap: it is called in every step."""
        ...

    def lengths(self, facts: StepFacts, proposal: Proposal) -> np.ndarray:
        """Return how many tokens (int64, S) to draft for each sequence; values above the proposal mean all of it."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Record a step whose tokens are in the slot table."""
        ...

    def admitted(self, slot: int) -> None:
        """Reset the state of this slot, which has a new sequence."""
        ...

    def paused(self, ns: int) -> None:
        """Exclude `ns` from the next step's measured time."""
        ...

    def counters(self) -> dict[str, int]:
        """Return the counters for the report by name; they can be summed over engines."""
        ...


class FixedDrafts:
    """Implements `DraftPolicy`: draft everything that the proposer offers, in every step."""

    def select(self, facts: StepFacts) -> bool:
        return facts.room > 0

    def lengths(self, facts: StepFacts, proposal: Proposal) -> np.ndarray:
        return proposal.count_S

    def observe(self, outcome: StepOutcome) -> None:
        pass

    def admitted(self, slot: int) -> None:
        pass

    def paused(self, ns: int) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {}
