"""Number of drafts for each sequence, from the acceptance of its last drafts. No torch.

If a draft after accepted ones is accepted with probability a, the k-th is accepted with probability a**k. A sequence
gets drafts as long as that is at least the cost of a draft in tokens; a further one would cost more time than it gains.
A sequence whose drafts do not pay tries one occasionally.
"""

from math import log

import numpy as np

from pipeline.engine.drafts.policy import AcceptanceCounts

REST = 8  # steps without drafts of a sequence whose drafts do not pay, before it tries one
OWN, ALL = 0.7, 0.97  # decay per step of a sequence's own counts, and of the counts over all sequences
FIRST = 8.0, 2.0  # prior counts of accepted and rejected drafts
PRIOR = 2.0  # weight of the average over all sequences in a sequence's own counts, in drafts


class RowLengths:
    """Draft lengths and counts of accepted drafts by slot."""

    def __init__(self, max_drafts: int) -> None:
        self._max = self._usual = max_drafts  # usual: length for a new sequence
        self._length_B, self._rest_B = np.zeros((2, 1), dtype=np.int64)  # rest: remaining steps without drafts
        self._right_B, self._wrong_B = np.zeros((2, 1))  # decayed counts; drafts after a wrong one do not count
        self._right, self._wrong = FIRST  # the same over all sequences

    def admitted(self, slot: int) -> None:
        """Reset the state of this slot."""
        if slot >= len(self._length_B):
            num_slots = slot + 1
            no_steps_B, no_drafts_B = np.zeros(num_slots, dtype=np.int64), np.zeros(num_slots)
            self._length_B = np.append(self._length_B, no_steps_B)
            self._rest_B = np.append(self._rest_B, no_steps_B)
            self._right_B = np.append(self._right_B, no_drafts_B)
            self._wrong_B = np.append(self._wrong_B, no_drafts_B)
        self._length_B[slot], self._rest_B[slot] = self._usual, 0
        self._right_B[slot] = self._wrong_B[slot] = 0.0

    def lengths(self, slot_S: np.ndarray) -> np.ndarray:
        """Return the lengths for this step, and count it as a step of rest."""
        length_S = self._length_B[slot_S]
        if length_S.all():
            return length_S
        rest_S = self._rest_B[slot_S]
        self._rest_B[slot_S] = np.maximum(rest_S - 1, 0)
        return np.where(rest_S > 0, 0, np.maximum(length_S, 1))

    def observe(self, acceptance: AcceptanceCounts, cost: float) -> None:
        """Update the lengths from verified drafts. cost: of a draft, in tokens."""
        slot_D, drafted_D, accepted_D = acceptance
        rejected_D = accepted_D < drafted_D
        self._right = ALL * self._right + int(accepted_D.sum())
        self._wrong = ALL * self._wrong + int(np.count_nonzero(rejected_D))
        if self._usual == self._max == int(accepted_D.min()):
            return  # all accepted at full length: the lengths stay, and computing them takes time
        log_cost = log(min(max(cost, 1e-3), 0.999))
        usual = min(max(self._right / max(self._right + self._wrong, 1.0), 1e-3), 0.999)
        self._right_B[slot_D] = right_D = OWN * self._right_B[slot_D] + accepted_D
        self._wrong_B[slot_D] = wrong_D = OWN * self._wrong_B[slot_D] + rejected_D
        right_D += PRIOR * usual
        length_D = np.minimum(log_cost / np.log(right_D / (right_D + wrong_D + PRIOR * (1.0 - usual))), self._max)
        self._length_B[slot_D] = length_D = length_D.astype(np.int64)
        self._usual = min(int(log_cost / log(usual)), self._max)
        if not length_D.all():
            self._rest_B[slot_D] = np.where(length_D == 0, REST, 0)
