"""How many tokens are drafted for each sequence, by what became of its last drafts. No torch.

Where a draft after right ones is right with chance a, the k-th one is accepted with chance a**k. A sequence has as many
as that is no less than what a draft costs, in tokens: a further one would slow the step down by more than it gives. A
sequence that is not worth a draft tries one now and then.
"""

from math import log

import numpy as np

from pipeline.engine.drafts.policy import Verdict

REST = 8  # steps that a sequence which is not worth a draft lets pass before it tries one
OWN, ALL = 0.7, 0.97  # what earlier drafts count for after another step: a sequence's own, and those of all
FIRST = 8.0, 2.0  # right and wrong drafts that are taken to have been before the first ones
PRIOR = 2.0  # drafts that went as those of all and count with a sequence's own


class RowLengths:
    """State by slot."""

    def __init__(self, most: int) -> None:
        self._most = self._usual = most  # usual: of a sequence that nothing is known of
        self._length_B, self._rest_B = np.zeros((2, 1), dtype=np.int64)  # rest: steps without drafts that are left
        self._right_B, self._wrong_B = np.zeros((2, 1))  # drafts; what comes after a wrong one does not count
        self._right, self._wrong = FIRST  # the same of all sequences

    def admitted(self, slot: int) -> None:
        """Forget what is known of this slot."""
        if slot >= len(self._length_B):
            more = slot + 1
            no_steps_B, no_drafts_B = np.zeros(more, dtype=np.int64), np.zeros(more)
            self._length_B = np.append(self._length_B, no_steps_B)
            self._rest_B = np.append(self._rest_B, no_steps_B)
            self._right_B = np.append(self._right_B, no_drafts_B)
            self._wrong_B = np.append(self._wrong_B, no_drafts_B)
        self._length_B[slot], self._rest_B[slot] = self._usual, 0
        self._right_B[slot] = self._wrong_B[slot] = 0.0

    def lengths(self, slot_S: np.ndarray) -> np.ndarray:
        """Return those of this step, which counts as one of a rest."""
        length_S = self._length_B[slot_S]
        if length_S.all():
            return length_S
        rest_S = self._rest_B[slot_S]
        self._rest_B[slot_S] = np.maximum(rest_S - 1, 0)
        return np.where(rest_S > 0, 0, np.maximum(length_S, 1))

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
        length_D = np.minimum(log_cost / np.log(right_D / (right_D + wrong_D + PRIOR * (1.0 - usual))), self._most)
        self._length_B[slot_D] = length_D = length_D.astype(np.int64)
        self._usual = min(int(log_cost / log(usual)), self._most)
        if not length_D.all():
            self._rest_B[slot_D] = np.where(length_D == 0, REST, 0)
