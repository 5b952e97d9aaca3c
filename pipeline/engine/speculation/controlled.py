"""The controller as the engine's draft policy. No torch."""

import time
from collections import deque

import numpy as np

from pipeline.engine.propose.offer import Offer
from pipeline.engine.propose.policy import StepFacts, StepOutcome
from pipeline.engine.propose.replay import Foretold
from pipeline.engine.speculation.controller import Controller
from pipeline.engine.speculation.messages import Batch, Candidates, Decided, Outcome
from pipeline.engine.speculation.unseen import UnseenSteps

STEPS_AT_ONCE = 6  # decisions that are remembered: of the step in flight and of the next one, with what is asked twice


class ControlledDrafts:
    """Implements `DraftPolicy`. The controller's proposers are the engine's, in their order."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._facts: StepFacts | None = None
        self._batch_of_facts = Batch(0, 0, 0)
        self._decided: deque[tuple[StepFacts, Decided]] = deque(maxlen=STEPS_AT_ONCE)
        self._host_ns = 0  # of what is decided and told, since the last outcome
        self._told_ns = 0  # of what the last outcome was told
        self._unseen = UnseenSteps()

    def passes(self, num_sequences: int, num_tokens: int) -> bool:
        if not self.controller.passes(num_sequences):
            return False
        self._unseen.begins(num_sequences, num_tokens, time.perf_counter_ns())
        return True

    def proposer(self, facts: StepFacts) -> int | None:
        begun_ns = time.perf_counter_ns()
        self._unseen.begins(len(facts.slot_S), facts.num_tokens, begun_ns)
        self._unseen.ends()
        number = self.controller.wants_candidates(self._batch(facts))
        self._decided.append((facts, self.controller.decided))
        self._host_ns += time.perf_counter_ns() - begun_ns
        return number

    def choose(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        choice = self.controller.choose(self._batch(facts), Candidates(offer.count_S, offer.match_len_S))
        self._decided.append((facts, self.controller.decided))
        return choice.length_S

    def observe(self, outcome: StepOutcome) -> None:
        begun_ns = time.perf_counter_ns()
        host_s, self._host_ns = self._host_ns / 1e9, 0
        drafted, num = bool(outcome.drafted_S.any()), len(outcome.facts.slot_S)
        # Nothing else measures what telling takes. It belongs to proposing, which it comes with.
        offer_s = outcome.offer_us / 1e6 + (self._told_ns / 1e9 if outcome.offer_us else 0.0)
        decided = next((each for facts, each in reversed(self._decided) if facts is outcome.facts), Decided())
        self.controller.observe(
            self._batch(outcome.facts),
            Outcome(
                outcome.step_us / 1e6,
                outcome.num_generated,
                outcome.drafted_S if drafted else None,
                outcome.accepted_S if drafted else None,
                propose_s=offer_s + outcome.draft_us / 1e6,
                lookup_s=offer_s,
                host_s=host_s,
                unseen_s=None if drafted else self._unseen.step_s(num),
            ),
            decided,
        )
        self._told_ns = time.perf_counter_ns() - begun_ns
        self._host_ns += self._told_ns

    def shadows(self, facts: StepFacts) -> int | None:
        begun_ns = time.perf_counter_ns()
        number = self.controller.shadows(self._batch(facts))
        self._host_ns += time.perf_counter_ns() - begun_ns
        return number

    def shadows_rest(self) -> bool:
        return self.controller.shadows_rest()

    def foretold(self, foretold: Foretold) -> None:
        begun_ns = time.perf_counter_ns()
        candidates = Candidates(foretold.count_O, foretold.match_len_O)
        self.controller.foretold(candidates, foretold.decided_O, foretold.agreed_O, foretold.is_rest)
        self._host_ns += 1000 * foretold.offer_us + time.perf_counter_ns() - begun_ns

    def left(self, slot: int) -> None:
        self.controller.left(slot)

    def counters(self) -> dict[str, int]:
        return self.controller.counts.flat()

    def _batch(self, facts: StepFacts) -> Batch:
        """Asked for up to three times in a step."""
        if facts is not self._facts:
            kv_tokens = int(facts.context_len_S.sum())
            self._facts = facts
            self._batch_of_facts = Batch(
                len(facts.slot_S),
                kv_tokens,
                facts.room,
                facts.num_prefill,
                facts.num_queued,
                facts.num_waiting,
                facts.slot_S,
            )
        return self._batch_of_facts
