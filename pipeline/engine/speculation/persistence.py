"""Whether sequences that drafts make faster than others stay the faster ones. No torch.

It decides what a step with drafts is worth once no rows wait: where the same sequences are slow all the time, the end
comes with them, and what the others gain is worth little; where everybody's turn comes, all get there together.

S: sequences of a step.
"""

import numpy as np

BLOCK_STEPS = 6  # steps whose mean is compared with that of others
RECENT_BLOCKS = 12  # blocks of a sequence after which older ones count less than 1/e

AWAY, STEPS, SUM, SQUARES, BLOCKS = range(5)  # the block that is being filled, and what is kept of those before


class Persistence:
    """Which share of the differences between sequences lasts: the covariance of a sequence's blocks of steps by their
    variance, over all sequences. What is compared is how far a sequence's expected tokens are from the mean of all in
    the same steps."""

    def __init__(self) -> None:
        self.share = 0.0  # as long as nothing is known: then nothing stands against drafts that look good
        self._sums_5S = np.zeros((5, 0))  # by slot
        self._seen_at = np.zeros(0, dtype=np.int64)
        self._num_steps = 0

    def add(self, slot_S: np.ndarray, expected_S: np.ndarray) -> None:
        """In a step, so many tokens were expected for these sequences if they draft. Who was not there in the last one
        is a new sequence."""
        self._reach(slot_S)
        self._num_steps += 1
        self._sums_5S[:, slot_S[self._seen_at[slot_S] < self._num_steps - 1]] = 0.0
        self._seen_at[slot_S] = self._num_steps
        self._sums_5S[AWAY, slot_S] += expected_S - expected_S.mean()
        self._sums_5S[STEPS, slot_S] += 1.0
        if self._num_steps % BLOCK_STEPS == 0:
            self._end_block(slot_S)

    def _end_block(self, slot_S: np.ndarray) -> None:
        sums_5S = self._sums_5S
        whole = slot_S[sums_5S[STEPS, slot_S] == BLOCK_STEPS]
        mean_S = sums_5S[AWAY, whole] / BLOCK_STEPS
        block_3S = np.stack((mean_S, mean_S**2, np.ones_like(mean_S)))
        sums_5S[SUM:, whole] = (1.0 - 1.0 / RECENT_BLOCKS) * sums_5S[SUM:, whole] + block_3S
        sums_5S[:SUM, slot_S] = 0.0
        several = slot_S[sums_5S[BLOCKS, slot_S] > 1.5]
        if len(several) > 1:
            sum_S, square_S, num_S = sums_5S[SUM:, several]
            together = ((sum_S**2 - square_S) / (num_S * (num_S - 1.0))).mean()
            alone = (square_S / num_S).mean()
            self.share = float(min(max(together / max(alone, 1e-9), 0.0), 1.0))

    def _reach(self, slot_S: np.ndarray) -> None:
        missing = int(slot_S.max(initial=0)) + 1 - len(self._seen_at)
        if missing > 0:
            self._sums_5S = np.pad(self._sums_5S, ((0, 0), (0, missing)))
            self._seen_at = np.pad(self._seen_at, (0, missing))
