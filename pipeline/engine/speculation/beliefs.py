"""What is believed of proposers: which candidates they have, how likely drafts of them are accepted, and what these are
worth by that. No torch.

S: sequences, C: classes (`Acceptance`), K: draft positions.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.engine.speculation.acceptance import Acceptance, ProposerPrior, count_deep
from pipeline.engine.speculation.choice import Values
from pipeline.engine.speculation.lately import Lately
from pipeline.engine.speculation.messages import Candidates

STALE_STEPS = 192  # steps without drafts after which a probe hopes for what was believed at the start
ON_AGEING = 3  # times as fast what was seen is forgotten while drafts are made
DEVIATIONS = 1.5  # above the estimate: the acceptance that a probe hopes for
REFRESH_STEPS = 4  # drafted steps after which what drafts are worth is reckoned anew,
REFRESH_SEEN = 32  # where so many sequences' drafts were seen in them


class Beliefs:
    """`step`: the number of the present one."""

    def __init__(self, proposers: Sequence[ProposerPrior], max_drafts: int) -> None:
        self.acceptance, self.max_drafts = Acceptance(proposers, max_drafts), max_drafts
        self.lately = [self._before_any(p) for p in range(len(proposers))]
        self.values = self._values_of(self.acceptance.probability())  # when they were reckoned last
        self._observed = self._seen = 0  # steps with drafts or offers compared, and sequences in them, since
        self._forgotten_at = 0

    def sorted(self, proposer: int, candidates: Candidates) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Class and number (S,) of candidates, and how many of a class come as deep (C, K)."""
        class_S = self.acceptance.class_of(proposer, candidates.match_length_S)
        available_S = np.minimum(candidates.available_S, self.max_drafts)
        return class_S, available_S, count_deep(class_S, available_S, self.acceptance.num_classes, self.max_drafts)

    def observe(self, class_S: np.ndarray, drafted_S: np.ndarray, accepted_S: np.ndarray) -> None:
        """Drafts were verified, or offers compared with the tokens that came."""
        self.acceptance.observe(class_S, drafted_S, accepted_S)
        self._observed += 1
        self._seen += len(class_S)

    def present(self, step: int, is_on: bool, shadowed: int | None, tried: int | None) -> Values:
        """Of the acceptance as it is estimated, reckoned in each step as long as little was seen; while a proposer is
        tried, as it may well be. The others: see `age`."""
        least = 1 + step // 16
        if self._observed >= min(REFRESH_STEPS, least) and self._seen >= min(REFRESH_SEEN, least):
            self._observed = self._seen = 0
            self.age(step, is_on, shadowed)
            estimated = self.acceptance.probability
            self.values = self._values_of(estimated()) if tried is None else self.hopeful(tried, step)
        return self.values

    def hopeful(self, proposer: int, step: int) -> Values:
        return self._values_of(self.acceptance.upper(DEVIATIONS, self.is_stale(proposer, step)))

    def is_stale(self, proposer: int, step: int) -> bool:
        """Nothing was seen of it for long."""
        return step - self.lately[proposer].seen_at > STALE_STEPS

    def renew(self) -> None:
        """What drafts are worth is reckoned when it is asked for next."""
        self._observed, self._seen = REFRESH_STEPS, REFRESH_SEEN

    def age(self, step: int, is_on: bool, shadowed: int | None) -> None:
        """What was seen before counts less. While nobody drafts that is not so where offers are compared, which are of
        the proposer `shadowed`. While drafts are made what is seen replaces what was seen, but of candidates that have
        become rare: those are likely to be others' now."""
        num_steps, self._forgotten_at = step - self._forgotten_at, step
        if is_on:
            self.acceptance.forget(ON_AGEING * num_steps)
            return
        is_seen = shadowed is not None and not self.is_stale(shadowed, step)
        self.acceptance.forget(num_steps, shadowed if is_seen else None)

    def ends(self, step: int) -> None:
        """Drafts were made, and are no more."""
        self._forgotten_at = step
        for p, lately in enumerate(self.lately):
            if self.acceptance.idle_P[p] is not None:
                lately.share_CK = lately.hoped_CK

    # -- parts

    def _values_of(self, probability_CK: np.ndarray) -> Values:
        return Values(probability_CK, self.acceptance.found_out(probability_CK))

    def _before_any(self, proposer: int) -> Lately:
        """Before it was asked: everybody has all candidates, of its idle or else its middle bucket."""
        share_CK = np.zeros((self.acceptance.num_classes, self.max_drafts))
        own = np.flatnonzero(self.acceptance.proposer_C == proposer)
        idle = self.acceptance.idle_P[proposer]
        share_CK[own[len(own) // 2 if idle is None else idle]] = 1.0
        return Lately(share_CK, share_CK)
