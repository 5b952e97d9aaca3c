"""Whether sequences that drafts make faster than others stay the faster ones. No torch.

It decides what a step with drafts is worth once no rows wait: where the same sequences are slow all the time, the end
comes with them, and what the others gain is worth little; where everybody's turn comes, all get there together.

S: sequences of a step.
"""

import math

import numpy as np

BLOCK_STEPS = 6  # steps whose mean is compared with that of others
RECENT_BLOCKS = 12  # blocks of a sequence after which older ones count less than 1/e

# Of the block that is being filled: sums of how far the sequence was from the mean of all, and of its square. Of those
# before: sums of their means, of the squares of these, of what of that square is chance within the block, their number.
AWAY, AWAY_SQUARE, STEPS, MEAN, SQUARE, CHANCE, BLOCKS = range(7)
CERTAIN = 1.5  # standard errors of it if nothing lasted, below which a covariance is called chance
LEAST_CERTAIN = 0.5  # share of the differences between blocks that counts as no chance at least


class Persistence:
    """Which share of the differences between sequences lasts: the covariance of a sequence's blocks of steps by their
    variance but for chance, over all sequences. What is compared is how far a sequence's expected tokens are from the
    mean of all in the same steps."""

    def __init__(self) -> None:
        self.share = 0.0  # as long as nothing is known: then nothing stands against drafts that look good
        self._sums_7S = np.zeros((7, 0))  # by slot
        self._seen_at = np.zeros(0, dtype=np.int64)
        self._num_steps = 0

    def add(self, slot_S: np.ndarray, expected_S: np.ndarray) -> None:
        """In a step, so many tokens were expected for these sequences if they draft. Who was not there in the last one,
        or whose slot was left since, is a new sequence."""
        self._reach(slot_S)
        self._num_steps += 1
        self._sums_7S[:, slot_S[self._seen_at[slot_S] < self._num_steps - 1]] = 0.0
        self._seen_at[slot_S] = self._num_steps
        away_S = expected_S - expected_S.mean()
        self._sums_7S[AWAY, slot_S] += away_S
        self._sums_7S[AWAY_SQUARE, slot_S] += away_S**2
        self._sums_7S[STEPS, slot_S] += 1.0
        if self._num_steps % BLOCK_STEPS == 0:
            self._end_block(slot_S)

    def left(self, slot: int) -> None:
        """The sequence there is gone; another one may be there in the very next step."""
        if slot < len(self._seen_at):
            self._seen_at[slot] = -1

    def _end_block(self, slot_S: np.ndarray) -> None:
        sums_7S = self._sums_7S
        whole = slot_S[sums_7S[STEPS, slot_S] == BLOCK_STEPS]
        mean_S = sums_7S[AWAY, whole] / BLOCK_STEPS
        chance_S = (sums_7S[AWAY_SQUARE, whole] / BLOCK_STEPS - mean_S**2) / (BLOCK_STEPS - 1)
        block_4S = np.stack((mean_S, mean_S**2, chance_S, np.ones_like(mean_S)))
        sums_7S[MEAN:, whole] = (1.0 - 1.0 / RECENT_BLOCKS) * sums_7S[MEAN:, whole] + block_4S
        sums_7S[:MEAN, slot_S] = 0.0
        several = slot_S[sums_7S[BLOCKS, slot_S] > 1.5]
        if len(several) > 1:
            sum_S, square_S, chance_S, num_S = sums_7S[MEAN:, several]
            pairs_S = num_S * (num_S - 1.0)
            alone = (square_S / num_S).mean()
            together = ((sum_S**2 - square_S) / pairs_S).mean()
            if together < CERTAIN * alone * math.sqrt(2.0 / pairs_S.sum()):
                together = 0.0
            alone = max(alone - (chance_S / num_S).mean(), LEAST_CERTAIN * alone)
            self.share = float(min(max(together / max(alone, 1e-9), 0.0), 1.0))

    def _reach(self, slot_S: np.ndarray) -> None:
        missing = int(slot_S.max(initial=0)) + 1 - len(self._seen_at)
        if missing > 0:
            self._sums_7S = np.pad(self._sums_7S, ((0, 0), (0, missing)))
            self._seen_at = np.pad(self._seen_at, (0, missing))
