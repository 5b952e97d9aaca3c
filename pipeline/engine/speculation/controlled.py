"""The controller as the engine's draft policy. No torch."""

import numpy as np

from pipeline.engine.propose.offer import Offer
from pipeline.engine.propose.policy import StepFacts, StepOutcome
from pipeline.engine.speculation.controller import Batch, Candidates, Controller, Outcome


class ControlledDrafts:
    """Implements `DraftPolicy`. The controller's proposers are the engine's, in their order."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller

    def passes(self, num_sequences: int) -> bool:
        return self.controller.passes(num_sequences)

    def proposer(self, facts: StepFacts) -> int | None:
        return self.controller.wants_candidates(_batch(facts))

    def choose(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        return self.controller.choose(_batch(facts), Candidates(offer.count_S, offer.match_len_S)).length_S

    def observe(self, outcome: StepOutcome) -> None:
        drafted = bool(outcome.drafted_S.any())
        self.controller.observe(
            _batch(outcome.facts),
            Outcome(
                outcome.step_us / 1e6,
                outcome.num_generated,
                outcome.drafted_S if drafted else None,
                outcome.accepted_S if drafted else None,
                propose_s=(outcome.offer_us + outcome.draft_us) / 1e6,
                lookup_s=outcome.offer_us / 1e6,
            ),
        )

    def counters(self) -> dict[str, int]:
        return self.controller.counts.flat()


def _batch(facts: StepFacts) -> Batch:
    num = len(facts.slot_S)
    kv_tokens = int(np.sum(facts.context_len_S))
    return Batch(num, kv_tokens, facts.room, facts.num_prefill, facts.num_queued, facts.num_waiting, facts.slot_S)
