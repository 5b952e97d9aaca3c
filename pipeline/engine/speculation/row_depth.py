"""How deep each sequence drafts, by what became of its last drafts, and who is slow. No torch.

Where a draft after right ones is right with chance a, the k-th one is accepted with chance a**k. A sequence drafts as
deep as that is no less than what a draft costs, in tokens: a deeper one would slow the step down by more than it gives.
A sequence that is not worth a draft tries one now and then.

Once no sequence waits to be admitted, a job ends with its slow rows. Then tokens count as slow rows get them.
"""

from math import log

import numpy as np

from pipeline.engine.drafts.policy import Verdict

REST = 8  # steps that a sequence which is not worth a draft lets pass before it tries one
OWN, ALL = 0.7, 0.97  # what earlier drafts count for after another step: a sequence's own, and those of all
FIRST = 8.0, 2.0  # right and wrong drafts that are taken to have been before the first ones
PRIOR = 2.0  # beside a sequence's own drafts so many count that went as those of all
LONG = 256.0  # steps over which it is seen how fast a sequence is
SLOW = 0.25  # share of the sequences that are the slow ones
LUCK = 1.5  # standard errors that a sequence may be slower than the others by chance
LUCK_PRIOR = 4.0  # steps at the speed of all that count beside a sequence's own, for how much its luck varies


class RowDepths:
    """By slot."""

    def __init__(self, most: int) -> None:
        self._most = self._usual = most  # usual: of a sequence that nothing is known of
        self._depth_B, self._rest_B = np.zeros((2, 1), dtype=np.int64)  # rest: steps without drafts that are left
        self._right_B, self._wrong_B = np.zeros((2, 1))  # drafts; what comes after a wrong one does not count
        self._right, self._wrong = FIRST  # the same of all sequences
        self._seen_B, self._extra_B = np.zeros((2, 1))  # steps in which it was asked, drafts accepted in them

    def admitted(self, slot: int) -> None:
        """A sequence that nothing is known of."""
        for name in ("_depth_B", "_rest_B", "_right_B", "_wrong_B", "_seen_B", "_extra_B"):
            state_B = getattr(self, name)
            if slot >= len(state_B):
                state_B = np.concatenate([state_B, np.zeros(slot + 1, state_B.dtype)])
                setattr(self, name, state_B)
            state_B[slot] = 0
        self._depth_B[slot] = self._usual

    def depths(self, slot_S: np.ndarray) -> np.ndarray:
        """Of this step, in which they are asked."""
        depth_S = self._depth_B[slot_S]
        if depth_S.all():
            return depth_S
        rest_S = self._rest_B[slot_S]
        self._rest_B[slot_S] = np.maximum(rest_S - 1, 0)
        return np.where(rest_S > 0, 0, np.maximum(depth_S, 1))

    def observe(self, verdict: Verdict, cost: float) -> None:
        """cost: of a draft, in tokens."""
        slot_D, drafted_D, accepted_D = verdict
        fell_D = accepted_D < drafted_D
        self._right = ALL * self._right + int(accepted_D.sum())
        self._wrong = ALL * self._wrong + int(np.count_nonzero(fell_D))
        if self._usual == self._most == int(accepted_D.min()):
            return  # they go on as they do, and what follows takes its time
        log_cost = log(min(max(cost, 1e-3), 0.999))
        usual = min(max(self._right / max(self._right + self._wrong, 1.0), 1e-3), 0.999)
        self._right_B[slot_D] = right_D = OWN * self._right_B[slot_D] + accepted_D
        self._wrong_B[slot_D] = wrong_D = OWN * self._wrong_B[slot_D] + fell_D
        right_D += PRIOR * usual
        depth_D = np.minimum(log_cost / np.log(right_D / (right_D + wrong_D + PRIOR * (1.0 - usual))), self._most)
        self._depth_B[slot_D] = depth_D = depth_D.astype(np.int64)
        self._usual = min(int(log_cost / log(usual)), self._most)
        if not depth_D.all():
            self._rest_B[slot_D] = np.where(depth_D == 0, REST, 0)

    def asked(self, slot_S: np.ndarray, verdict: Verdict | None) -> None:
        """In a step, and what came of it."""
        self._seen_B[slot_S] += 1.0
        if verdict is not None:
            self._extra_B[verdict.slot_D] += verdict.accepted_D

    def replayed(self, slot_O: np.ndarray, accepted_O: np.ndarray) -> np.ndarray:
        """Steps that drafts would have made: which sequence, how many drafts would have been accepted. These slots."""
        offers_B, size = np.bincount(slot_O), len(self._seen_B)
        self._seen_B[: len(offers_B)] += offers_B
        self._extra_B += np.bincount(slot_O, accepted_O, size)
        return offers_B.nonzero()[0]

    def slow_share(self, slot_S: np.ndarray) -> float:
        """Tokens that the slow ones of these get in a step with drafts, by what all of them get."""
        slot_S = slot_S[self._seen_B[slot_S] > 0.0]
        if len(slot_S) < 2:
            return 1.0
        less_S = np.minimum(LONG / self._seen_B[slot_S], 1.0)
        self._seen_B[slot_S] = seen_S = less_S * self._seen_B[slot_S]
        self._extra_B[slot_S] = extra_S = less_S * self._extra_B[slot_S]
        speed_S = extra_S / seen_S
        mean = float(speed_S.mean())
        usual_S = (extra_S + LUCK_PRIOR * mean) / (seen_S + LUCK_PRIOR)
        # Each draft is right by a chance of its own, so their number has the variance of a geometric distribution.
        lucky_S = np.sort(speed_S + LUCK * np.sqrt(usual_S * (1.0 + usual_S) / seen_S))
        slow = float(lucky_S[: max(int(SLOW * len(lucky_S)), 1)].mean())
        return min((1.0 + slow) / (1.0 + mean), 1.0)
