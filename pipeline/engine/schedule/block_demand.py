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
    blocks_K: np.ndarray  # that k and those before it in K hold just before the end of k, when the others are gone
    num_gone: int  # blocks that are free when all have ended

    @classmethod
    def of(
        cls, known_S: np.ndarray, end_S: np.ndarray, held_S: np.ndarray, freed_S: np.ndarray, block_size: int
    ) -> "BlockDemand":
        """known_S and end_S: tokens of each, now and in the end; an end that is passed counts as the next step. held_S:
        blocks of each now. freed_S: those of them that are free when it has ended; others may hold the rest."""
        remaining_S, num_gone = np.maximum(end_S - known_S, 1), int(freed_S.sum())
        last_first = np.argsort(-remaining_S)
        remaining_K = remaining_S[last_first]
        grown_K = np.arange(1, len(remaining_K) + 1) * remaining_K / block_size
        running_K = np.cumsum((known_S / block_size + 0.5 - held_S)[last_first]) + grown_K
        return cls(block_size, remaining_K, running_K - num_gone + np.cumsum(freed_S[last_first]), num_gone)

    def add(self, known: int, end: int, held: int) -> "BlockDemand":
        """With one more sequence. held: of its blocks, those that others hold already."""
        size, remaining_K, blocks_K = self.block_size, self.remaining_K, self.blocks_K
        remaining, own = max(end - known, 1), known / self.block_size + 0.5 - held
        place = int((-remaining_K).searchsorted(-remaining, side="right"))
        # What those hold that end later, when they have grown by its remaining tokens and not yet by their own.
        beside = blocks_K[place - 1] - place * (remaining_K[place - 1] - remaining) / size if place else -self.num_gone
        after_K = remaining_K[place:]
        return BlockDemand(
            size,
            np.concatenate([remaining_K[:place], [remaining], after_K]),
            np.concatenate(
                [blocks_K[:place], [beside + remaining / size + own], blocks_K[place:] + after_K / size + own]
            ),
            self.num_gone,
        )

    @property
    def peak(self) -> float:
        """The most blocks at once, beside those held now. At least one sequence. Where several end in one step it may
        be some half blocks too high."""
        return float(self.blocks_K.max())
