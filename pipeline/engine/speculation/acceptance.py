"""How likely drafts are accepted: running estimates by class and position. No torch.

A class is a proposer and a bucket of match lengths. The estimate for position i is the probability that the draft there
is accepted given that all before it were. It is a weighted mean of what was seen, where each newer observation and each
step that passes makes older ones count less, of the class's mean over all positions, and of a prior: a class that was
not seen for long is thought of as at the start again, so that it gets another try. A proposer that does better than
its priors do where it was seen is thought to do so elsewhere too.

P: proposers, C: classes, K: draft positions (0-based in arrays), S: sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 120  # observations of a class and position after which older ones count less than 1/e
AT_ONCE = 32  # observations that are taken in together at most, those of one step apart
HALF_LIFE_STEPS = 1000  # steps after which what was seen counts half, seen again or not
CLASS_WEIGHT = 4.0  # observations that the class's mean counts as at each position
PRIOR_WEIGHT = 4.0  # observations that the prior counts as in the class's mean
POOLED_WEIGHT = 16.0  # observations that all priors of a proposer count as, in what its classes tell of each other
LUCKY = 2  # where match lengths tell what became of the last drafts: one was accepted,
LUCKY_DRAFTS = 4  # and so many are made in the next step
HIGHEST = 0.995  # estimates stay below 1, so that a deeper draft is never worth as much as the one before it


@dataclass(frozen=True)
class ProposerPrior:
    """What is believed of a proposer before it was seen: bucket b holds match lengths from `match_from[b]` on.

    idle: the bucket of sequences that were not drafted for a while, where match lengths tell what became of the last
    drafts; None where they come from the text.
    """

    name: str
    match_from: tuple[int, ...]
    accepted: tuple[float, ...]
    idle: int | None = None

    def __post_init__(self) -> None:
        assert len(self.match_from) == len(self.accepted) >= 1
        assert self.match_from[0] == 0
        assert all(low < high for low, high in zip(self.match_from, self.match_from[1:])), "bounds rise"
        assert all(0.0 < p < 1.0 for p in self.accepted)


NGRAM = ProposerPrior("ngram", (0, 3, 4, 6), (0.35, 0.5, 0.6, 0.75))
DRAFT_MODEL = ProposerPrior(
    "draft", (0, 1, 2, 4), (0.65, 0.5, 0.65, 0.75), idle=0
)  # by what was accepted of the last, and 1


class Acceptance:
    """Estimates of some proposers, for drafts of at most `max_draft_tokens`."""

    def __init__(self, proposers: Sequence[ProposerPrior], max_draft_tokens: int) -> None:
        assert proposers
        assert max_draft_tokens >= 1
        self.max_draft_tokens, self.idle_P = max_draft_tokens, [prior.idle for prior in proposers]
        buckets = [(at, prior, b) for at, prior in enumerate(proposers) for b in range(len(prior.accepted))]
        self.proposer_C = np.array([at for at, _, _ in buckets])
        self.num_classes = len(buckets)
        longest = max(prior.match_from[-1] for prior in proposers)
        lengths = np.arange(longest + 1)
        first_P = np.searchsorted(self.proposer_C, np.arange(len(proposers)))
        self._class_PL = np.array(  # class by proposer and match length; longer ones are in the last
            [
                first + np.searchsorted(prior.match_from, lengths, side="right") - 1
                for first, prior in zip(first_P, proposers)
            ]
        )
        shape = (self.num_classes, max_draft_tokens)
        self._prior_C1 = np.array([[prior.accepted[b]] for _, prior, b in buckets])
        self._prior_odds_C1 = self._prior_C1 / (1.0 - self._prior_C1)
        self._is_of_PC = (np.arange(len(proposers))[:, None] == self.proposer_C).astype(np.float64)
        self._weight_CK, self._accepted_CK = np.zeros(shape), np.zeros(shape)
        self._unseen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # what `observe` was told and is not in yet
        self._num_unseen = 0

    def class_of(self, proposer: int, match_length_S: np.ndarray) -> np.ndarray:
        """Classes (S,) of candidates of one proposer with these match lengths (0 where it knows none)."""
        return self._class_PL[proposer][np.minimum(match_length_S, self._class_PL.shape[1] - 1)]

    def probability(self) -> np.ndarray:
        """(C, K): the probability that a draft is accepted given that all before it were."""
        return self._mean()[0]

    def upper(self, deviations: float, is_stale: bool = False) -> np.ndarray:
        """(C, K): `probability` plus so many standard deviations of its own uncertainty: what may well be true. Where
        all of it is stale, not less than what was believed at the start."""
        mean_CK, weight_CK = self._mean()
        upper_CK = mean_CK + deviations * np.sqrt(mean_CK * (1.0 - mean_CK) / (weight_CK + 1.0))
        return np.minimum(np.maximum(upper_CK, self._prior_C1 if is_stale else 0.0), HIGHEST)

    def found_out(self, probability_CK: np.ndarray) -> np.ndarray:
        """(C,): tokens that a first draft brings beside its own by what it finds out, of these probabilities. Where
        match lengths tell what became of the last drafts, a sequence whose draft is accepted is among the lucky ones in
        the next step; who is never drafted never is. 0 where match lengths come from the text."""
        first_C, tokens_C = probability_CK[:, 0], probability_CK[:, :LUCKY_DRAFTS].cumprod(axis=1).sum(axis=1)
        found_C = np.zeros(self.num_classes)
        for p, idle in enumerate(self.idle_P):
            if idle is not None:
                own, lucky = np.flatnonzero(self.proposer_C == p)[0], self._class_PL[p, LUCKY]
                found_C[own:lucky] = (tokens_C[lucky] - first_C[own:lucky]).clip(0.0) * first_C[own:lucky]
        return found_C

    def observe(self, class_S: np.ndarray, drafted_S: np.ndarray, accepted_S: np.ndarray) -> None:
        """Of `drafted_S` drafts of each sequence the first `accepted_S` were accepted. Those of some
        steps are taken in at once where there are few sequences: a sum over one costs as much as over thirty."""
        self._unseen.append((class_S, drafted_S, accepted_S))
        self._num_unseen += len(class_S)
        if self._num_unseen >= AT_ONCE:
            self._take_in()

    def forget(self, num_steps: int, but: int | None = None) -> None:
        """So many steps passed since the last call: what was seen before counts less. but: a proposer of which enough
        is seen meanwhile."""
        self._take_in()
        self._keep(np.where(self.proposer_C == but, 1.0, math.exp2(-num_steps / HALF_LIFE_STEPS)))

    def fade(self, proposer: int, share: float) -> None:
        """What was seen of this proposer counts by that share from now on."""
        self._take_in()
        self._keep(np.where(self.proposer_C == proposer, share, 1.0))

    # -- parts

    def _keep(self, share_C: np.ndarray) -> None:
        self._weight_CK *= share_C[:, None]
        self._accepted_CK *= share_C[:, None]

    def _take_in(self) -> None:
        if not self._unseen:
            return
        class_S, drafted_S, accepted_S = (np.concatenate(parts) for parts in zip(*self._unseen))
        self._unseen.clear()
        self._num_unseen = 0
        assert (accepted_S <= drafted_S).all(), "more accepted than drafted"
        # Both at once: classes of what was verified, then classes of what was accepted.
        depth_2S = np.concatenate((np.minimum(drafted_S, accepted_S + 1), accepted_S))
        class_2S = np.concatenate((class_S, class_S + self.num_classes))
        deep_CK = count_deep(class_2S, depth_2S, 2 * self.num_classes, self.max_draft_tokens)
        verified_CK, accepted_CK = deep_CK[: self.num_classes], deep_CK[self.num_classes :]
        kept_CK = np.exp(verified_CK * (-1.0 / WINDOW))
        self._weight_CK = self._weight_CK * kept_CK + verified_CK
        self._accepted_CK = self._accepted_CK * kept_CK + accepted_CK

    def _mean(self) -> tuple[np.ndarray, np.ndarray]:
        """Estimates and the weight of what was seen, both (C, K)."""
        self._take_in()
        class_weight_C1 = self._weight_CK.sum(axis=1, keepdims=True) + PRIOR_WEIGHT
        class_C1 = (self._accepted_CK.sum(axis=1, keepdims=True) + PRIOR_WEIGHT * self._believed_C1()) / class_weight_C1
        weight_CK = self._weight_CK + CLASS_WEIGHT
        mean_CK = (self._accepted_CK + CLASS_WEIGHT * class_C1) / weight_CK
        return np.minimum(mean_CK, HIGHEST), self._weight_CK

    def _believed_C1(self) -> np.ndarray:
        """The priors, better in odds where their proposer has been better than they said. Never worse: it is known by
        its classes which drafts are bad."""
        seen_CK, accepted_CK = self._weight_CK, self._accepted_CK
        seen_P, accepted_P, prior_P = (
            self._is_of_PC @ sums_CK.sum(axis=1) for sums_CK in (seen_CK, accepted_CK, seen_CK * self._prior_C1)
        )
        half = POOLED_WEIGHT / 2.0
        better_P = (accepted_P + half) * (seen_P - prior_P + half) / ((seen_P - accepted_P + half) * (prior_P + half))
        odds_C1 = self._prior_odds_C1 * better_P.clip(1.0)[self.proposer_C][:, None]
        return odds_C1 / (1.0 + odds_C1)


def count_deep(class_S: np.ndarray, depth_S: np.ndarray, num_classes: int, max_drafts: int) -> np.ndarray:
    """(C, K): how many sequences of a class come at least as deep as position k (0-based: depth k + 1)."""
    width = max_drafts + 1
    flat = np.bincount(class_S * width + depth_S, minlength=num_classes * width)
    return flat.reshape(num_classes, width)[:, :0:-1].cumsum(axis=1)[:, ::-1]
