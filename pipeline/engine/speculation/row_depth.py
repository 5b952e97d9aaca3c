"""How deep each sequence drafts, by what became of its last drafts, and who is slow. No torch.

Each time that all drafts of a sequence fall it drafts half as many the next time, and at last only now and then. The
first draft that is accepted lets it draft as many as the others again.

Once no sequence waits to be admitted, a job ends with its slow rows. Then tokens count as slow rows get them.
"""

import numpy as np

from pipeline.engine.drafts.policy import Verdict

FIRST_REST = 4  # misses in a row after which a sequence rests for 2 steps, 4, and so on
MOST_REST = 8
LAST = 1 / 16  # share of the last step in what is known of a sequence
SLOW = 0.25  # share of the sequences that are the slow ones
LUCK = 0.22  # by so many standard deviations of a step they seem slower where all are alike


class RowDepths:
    """By slot."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._missed_B = np.zeros(1, dtype=np.int64)  # times in a row that all drafts fell
        self._rest_B = np.zeros(1, dtype=np.int64)  # steps without drafts that are left
        self._ahead_B = np.zeros(1)  # tokens a step more than others get
        self._spread = 0.0  # variance of tokens in a step

    def admitted(self, slot: int) -> None:
        """A sequence that nothing is known of."""
        if slot >= len(self._missed_B):
            more_B = np.zeros(slot + 1, dtype=np.int64)
            self._missed_B = np.concatenate([self._missed_B, more_B])
            self._rest_B = np.concatenate([self._rest_B, more_B])
            self._ahead_B = np.concatenate([self._ahead_B, more_B])
        self._missed_B[slot] = self._rest_B[slot] = self._ahead_B[slot] = 0

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

    def slow_tokens(self, slot_S: np.ndarray, verdict: Verdict | None) -> float:
        """Tokens that the slow ones of these got in a step, for which all of them were asked."""
        token_S = np.ones(len(slot_S))
        if verdict is not None:
            token_B = np.ones(len(self._ahead_B))
            token_B[verdict.slot_D] += verdict.accepted_D
            token_S = token_B[slot_S]
        mean = float(token_S.mean())
        self._spread += LAST * (float(token_S.var()) - self._spread)
        ahead_S = self._ahead_B[slot_S] + LAST * (token_S - mean - self._ahead_B[slot_S])
        self._ahead_B[slot_S] = ahead_S
        slow = float(np.sort(ahead_S)[: max(int(SLOW * len(ahead_S)), 1)].mean())
        return mean + min(slow + LUCK * self._spread**0.5, 0.0)
