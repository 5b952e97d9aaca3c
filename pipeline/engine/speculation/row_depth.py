"""How deep each sequence drafts, by what became of its last drafts. No torch.

Each time that all drafts of a sequence fall it drafts half as many the next time, and at last only now and then. The
first draft that is accepted lets it draft as many as the others again.
"""

import numpy as np

from pipeline.engine.propose.policy import Verdict

FIRST_REST = 4  # misses in a row after which a sequence rests for 2 steps, 4, and so on
MOST_REST = 8


class RowDepths:
    """By slot."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._missed_B = np.zeros(1, dtype=np.int64)  # times in a row that all drafts fell
        self._rest_B = np.zeros(1, dtype=np.int64)  # steps without drafts that are left

    def admitted(self, slot: int) -> None:
        """A sequence that nothing is known of."""
        if slot >= len(self._missed_B):
            more_B = np.zeros(slot + 1, dtype=np.int64)
            self._missed_B = np.concatenate([self._missed_B, more_B])
            self._rest_B = np.concatenate([self._rest_B, more_B])
        self._missed_B[slot] = self._rest_B[slot] = 0

    def depths(self, slot_S: np.ndarray) -> np.ndarray:
        """Of this step, in which they are asked."""
        rest_S = self._rest_B[slot_S]
        self._rest_B[slot_S] = np.maximum(rest_S - 1, 0)
        return np.where(rest_S > 0, 0, np.maximum(self._most >> self._missed_B[slot_S], 1))

    def observe(self, verdict: Verdict) -> None:
        slot_D, _, accepted_D = verdict
        missed_D = np.where(accepted_D == 0, np.minimum(self._missed_B[slot_D] + 1, 30), 0)
        self._missed_B[slot_D] = missed_D
        rest_D = np.minimum(2 << np.maximum(missed_D - FIRST_REST, 0), MOST_REST)
        self._rest_B[slot_D] = np.where(missed_D >= FIRST_REST, rest_D, 0)
