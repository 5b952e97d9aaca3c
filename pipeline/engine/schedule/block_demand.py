"""How many KV blocks sequences will hold at most, if they end as expected. No torch.

Sequences do not end at the same time. Those that end early give their blocks back before the others have grown to their
full length, so all together never hold the sum of what each holds in the end. From now on each grows by a token a step,
and the sum grows until one of them ends: only the moments just before an end count.

The past-future scheduler (Gong et al., ASPLOS 2025) admits requests by such a forecast. It samples each length from
those of finished requests; here the caller says what it expects.

Suffixes: S sequences, K sequences by their end, the last one first.
"""

import numpy as np


class BlockDemand:
    """Of the sequences that run, and of those added. All numbers of blocks are beside those that are held now.

    A sequence's last block is half full on average, so half a block of each counts as empty and the result is a float.
    """

    def __init__(
        self, known_S: np.ndarray, end_S: np.ndarray, held_S: np.ndarray, freed_S: np.ndarray, block_size: int
    ) -> None:
        """known_S and end_S: tokens of each, now and in the end; an end that is passed counts as the next step. held_S:
        blocks of each now. freed_S: those of them that are free when it has ended; others may hold the rest."""
        remaining_S = np.maximum(end_S - known_S, 1)
        last_first = np.argsort(-remaining_S)
        self._size = block_size
        self._remaining_K = remaining_S[last_first]
        # Just before the end of the k-th, it and those before it in K run, and the others are gone.
        self._num_gone = int(freed_S.sum())  # blocks, when all have ended
        gone_K = self._num_gone - np.cumsum(freed_S[last_first])
        running_K = np.cumsum((known_S / block_size + 0.5 - held_S)[last_first])
        self._before_growth_K = running_K - gone_K

    def add(self, known: int, end: int, held: int) -> "BlockDemand":
        """With one more sequence. held: of its blocks, those that others hold already."""
        remaining, more = max(end - known, 1), object.__new__(BlockDemand)
        place = int(np.searchsorted(-self._remaining_K, -remaining))
        before = self._before_growth_K[place - 1] if place else -self._num_gone
        more._size, more._num_gone = self._size, self._num_gone
        more._remaining_K = np.insert(self._remaining_K, place, remaining)
        more._before_growth_K = np.insert(self._before_growth_K, place, before)
        more._before_growth_K[place:] += known / self._size + 0.5 - held
        return more

    @property
    def peak(self) -> float:
        """The most blocks at once, beside those held now. At least one sequence."""
        num_K = np.arange(1, len(self._remaining_K) + 1)
        return float((self._before_growth_K + num_K * self._remaining_K / self._size).max())
