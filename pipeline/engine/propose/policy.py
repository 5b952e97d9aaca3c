"""Who drafts in a step, and how many of the tokens on offer: what the engine asks of a policy. No torch.

Shapes: S sequences that get a token in the step.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.engine.propose.offer import Offer
from pipeline.engine.propose.replay import Foretold


@dataclass(frozen=True)
class StepFacts:
    """A step as it is planned, before drafts are added.

    num_tokens: that it computes, of which one belongs to each sequence of slot_S and num_prefill are others: prompts,
    and what a preemption lost. num_queued: such tokens that the step has no room for. room: tokens it could still take.
    num_waiting: sequences that are not admitted yet.
    """

    slot_S: np.ndarray  # int64: sequences that get a token, oldest first
    context_len_S: np.ndarray  # int64: their known tokens
    num_tokens: int
    num_prefill: int
    num_queued: int
    room: int
    num_waiting: int


@dataclass(frozen=True)
class StepOutcome:
    """A step that was computed; where nothing was drafted, drafted_S is all 0.

    drafted_S may be less than was chosen: drafts are cut where no block is free for them. accepted_S: how many of
    them the model confirmed, whether or not the sequence came to its end among them; num_generated: tokens that the
    sequences of the step got. step_us is the whole step without proposing; offer_us and draft_us are what the
    proposer took, 0 where none was asked.
    """

    facts: StepFacts
    num_generated: int
    step_us: int
    offer_us: int
    draft_us: int
    drafted_S: np.ndarray  # int64
    accepted_S: np.ndarray  # int64


class DraftPolicy(Protocol):
    """Where a step is launched before the one in flight is done, the next one is decided on before `observe` is told of
    that. Facts are told apart by identity."""

    def passes(self, num_sequences: int, num_tokens: int) -> bool:
        """Whether a step of so many tokens, in which so many sequences get another, is none of its concern. Asked
        first, and cheap: nothing else is asked or told of a step that passes."""
        ...

    def proposer(self, facts: StepFacts) -> int | None:
        """The number of the proposer to ask in this step; None: nobody, as looking for drafts costs something too."""
        ...

    def choose(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        """How many tokens (int64, S) to draft for each sequence; more than are on offer count as all of them."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """What became of a step, with or without drafts. Steps that were undone are not told."""
        ...

    def shadows(self, facts: StepFacts) -> int | None:
        """Asked after `observe`: the number of the proposer whose drafts are to be replayed over the tokens that came;
        None: nobody's. It must be able to (see `LooksUp`)."""
        ...

    def shadows_rest(self) -> bool:
        """Asked after `choose`: whether the offers of sequences that draft nothing are to be compared with the tokens
        that come. It must have tokens on offer (see `Offer`)."""
        ...

    def foretold(self, foretold: Foretold) -> None:
        """What became of offers that nobody drafted; no others of sequences that draft nothing are compared before
        that."""
        ...

    def left(self, slot: int) -> None:
        """The sequence leaves the slot, and another one may come into it."""
        ...

    def counters(self) -> dict[str, int]:
        """What it counted for reports, by name; sums over engines mean the same."""
        ...


class FixedDrafts:
    """Implements `DraftPolicy`: in every step as many as the first proposer has, up to a fixed number."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens

    def passes(self, num_sequences: int, num_tokens: int) -> bool:
        return False

    def proposer(self, facts: StepFacts) -> int | None:
        return 0

    def choose(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        return np.minimum(offer.count_S, self.max_draft_tokens)

    def observe(self, outcome: StepOutcome) -> None:
        pass

    def shadows(self, facts: StepFacts) -> int | None:
        return None

    def shadows_rest(self) -> bool:
        return False

    def foretold(self, foretold: Foretold) -> None:
        pass

    def left(self, slot: int) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {}
