"""The controller as the engine's draft policy. No torch."""

from collections.abc import Sequence

import numpy as np

from pipeline.engine.propose.offer import Offer
from pipeline.engine.propose.policy import Chosen, StepFacts, StepOutcome
from pipeline.engine.speculation.controller import Batch, Candidates, Controller, Outcome


class ControlledDrafts:
    """Implements `DraftPolicy`. The controller's proposers are the engine's, in their order."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller

    def wants_offers(self, facts: StepFacts) -> bool:
        return self.controller.wants_candidates(_batch(facts))

    def choose(self, facts: StepFacts, offers: Sequence[Offer]) -> Chosen:
        candidates = [Candidates(offer.count_S, offer.match_len_S) for offer in offers]
        choice = self.controller.choose(_batch(facts), candidates)
        return Chosen(choice.length_S, choice.proposer_S)

    def observe(self, outcome: StepOutcome) -> None:
        drafted = bool(outcome.drafted_S.any())
        self.controller.observe(
            _batch(outcome.facts),
            Outcome(
                outcome.step_us / 1e6,
                outcome.num_generated,
                outcome.drafted_S if drafted else None,
                outcome.accepted_S if drafted else None,
                propose_s=tuple((each.offer_us + each.draft_us) / 1e6 for each in outcome.proposed),
                lookup_s=tuple(each.offer_us / 1e6 for each in outcome.proposed),
            ),
        )

    def counters(self) -> dict[str, int]:
        return self.controller.counts.flat()


def _batch(facts: StepFacts) -> Batch:
    num = len(facts.slot_S)
    kv_tokens = int(np.sum(facts.context_len_S))
    return Batch(num, kv_tokens, facts.room, facts.num_prefill, facts.num_queued)
