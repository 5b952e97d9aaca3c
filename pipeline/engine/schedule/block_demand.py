"""How many KV blocks sequences will hold at most, if they end as expected. No torch.

Sequences do not end at the same time. Those that end early give their blocks back before the others have grown to their
full length, so all together never hold the sum of what each holds in the end. From now on each grows by a token a step,
and the sum grows until one of them ends: only the moments just before an end count.

The past-future scheduler (Gong et al., ASPLOS 2025) admits requests by such a forecast. It samples each length from
those of finished requests; here the caller says what it expects.

Suffixes: S sequences, K sequences by their end, the last one first.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BlockDemand:
    """Of the sequences that run, and of those added. All numbers of blocks are beside those that are held now.

    A sequence's last block is half full on average, so half a block of each counts as empty, and numbers are floats.
    """

    block_size: int
    remaining_K: np.ndarray  # tokens of each until it ends, falling
    blocks_K: (
        np.ndarray
    )  # held just before the end of k, by it and those before it in K, but for what they grow by then
    num_gone: int  # blocks that are free when all have ended

    @classmethod
    def of(
        cls, known_S: np.ndarray, end_S: np.ndarray, held_S: np.ndarray, freed_S: np.ndarray, block_size: int
    ) -> "BlockDemand":
        """known_S and end_S: tokens of each, now and in the end; an end that is passed counts as the next step. held_S:
        blocks of each now. freed_S: those of them that are free when it has ended; others may hold the rest."""
        remaining_S, num_gone = np.maximum(end_S - known_S, 1), int(freed_S.sum())
        last_first = np.argsort(-remaining_S)
        running_K = np.cumsum((known_S / block_size + 0.5 - held_S)[last_first])
        ended_K = num_gone - np.cumsum(freed_S[last_first])
        return cls(block_size, remaining_S[last_first], running_K - ended_K, num_gone)

    def add(self, known: int, end: int, held: int) -> "BlockDemand":
        """With one more sequence. held: of its blocks, those that others hold already."""
        remaining = max(end - known, 1)
        place = int(np.searchsorted(-self.remaining_K, -remaining))
        before = self.blocks_K[place - 1] if place else -self.num_gone
        blocks_K = _inserted(self.blocks_K, place, before)
        blocks_K[place:] += known / self.block_size + 0.5 - held
        return BlockDemand(self.block_size, _inserted(self.remaining_K, place, remaining), blocks_K, self.num_gone)

    @property
    def peak(self) -> float:
        """The most blocks at once, beside those held now. At least one sequence."""
        num_K, remaining_K = np.arange(1, len(self.remaining_K) + 1), self.remaining_K
        is_moment_K = np.append(remaining_K[1:] != remaining_K[:-1], True)  # of equal ones the last has all of them
        return float((self.blocks_K + num_K * remaining_K / self.block_size)[is_moment_K].max())


def _inserted(value_K: np.ndarray, place: int, value: float) -> np.ndarray:
    """As numpy.insert, in a fraction of its time."""
    return np.concatenate([value_K[:place], np.array([value], dtype=value_K.dtype), value_K[place:]])
