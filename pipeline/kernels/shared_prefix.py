"""Which sequences of a step begin with the same blocks, found in their block tables, in numpy.

A step has at most some thousand sequences, and this is asked for in every one: so there are no loops over sequences or
blocks. Suffixes: those of `kernels/contract.py`, and G groups, I members of the groups, one group after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

MOST_LEVELS = 4  # of branching below one another that are looked at


@dataclass(frozen=True)
class PrefixGroups:
    """Group g is the sequences sequence_I[start_G1[g] : start_G1[g + 1]], which begin with the same blocks_G[g] blocks.

    No sequence is in two groups.
    """

    sequence_I: np.ndarray
    start_G1: np.ndarray
    blocks_G: np.ndarray

    @property
    def group_I(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.blocks_G)), np.diff(self.start_G1))

    def taken(self, is_taken_G: np.ndarray) -> "PrefixGroups":
        """Some of the groups, in the same order."""
        size_G = np.diff(self.start_G1)
        return _groups(self.sequence_I[np.repeat(is_taken_G, size_G)], size_G[is_taken_G], self.blocks_G[is_taken_G])


def prefix_groups(
    table_SM: np.ndarray, most_blocks_S: np.ndarray, worth: Callable[[PrefixGroups], np.ndarray]
) -> PrefixGroups:
    """The groups that are worth most. Of sequence s only the first most_blocks_S[s] blocks can be shared. worth(groups)
    says of each group by itself what it is worth; below 0 counts as 0, and such groups are left out.

    Shared prefixes form a tree, which is walked from the root: sequences with the same first block are a group, with as
    many blocks as all of them have in common; those of it that go on with the same block are a group inside it, and so
    on, `MOST_LEVELS` deep. A sequence is read with one prefix only: of a group and those inside it, what is worth more
    is taken. So a header that all prompts have does not hide that each of several documents has its own readers.
    """
    levels: list[tuple[PrefixGroups, np.ndarray]] = []  # groups, and which one of the level above each is in
    sequence_I, group_I = np.arange(len(table_SM)), np.zeros(len(table_SM), dtype=np.int64)
    depth_G = np.zeros(1, dtype=np.int64)
    while len(levels) < MOST_LEVELS:
        depth_I = depth_G[group_I]
        goes_on_I = most_blocks_S[sequence_I] > depth_I
        if not goes_on_I.all():
            sequence_I, group_I, depth_I = sequence_I[goes_on_I], group_I[goes_on_I], depth_I[goes_on_I]
        next_I = table_SM[sequence_I, depth_I] + (group_I << 32)
        order = np.argsort(next_I, kind="stable")
        next_I = next_I[order]
        start_G = np.flatnonzero(np.append(True, next_I[1:] != next_I[:-1])[: len(next_I)])
        size_G = np.diff(np.append(start_G, len(next_I)))
        is_shared_G = size_G > 1
        if not is_shared_G.any():
            break
        parent_G = group_I[order[start_G[is_shared_G]]]
        sequence_I = sequence_I[order[np.repeat(is_shared_G, size_G)]]
        size_G = size_G[is_shared_G]
        group_I = np.repeat(np.arange(len(size_G)), size_G)
        depth_G = _common(table_SM, most_blocks_S, sequence_I, np.cumsum(size_G) - size_G, int(depth_G.min()))
        levels.append((_groups(sequence_I, size_G, depth_G), parent_G))
    return _best(levels, worth)


def _common(
    table_SM: np.ndarray, most_blocks_S: np.ndarray, sequence_I: np.ndarray, first_G: np.ndarray, known: int
) -> np.ndarray:
    """How many blocks the members of each group have in common; that the first `known` ones are is known."""
    most_I = most_blocks_S[sequence_I]
    most = int(most_I.max())
    of_IM = table_SM[sequence_I, known:most]
    differs_IM = np.zeros((len(of_IM), most - known + 1), dtype=bool)
    np.not_equal(of_IM[1:], of_IM[:-1], out=differs_IM[1:, :-1])
    differs_IM[first_G] = False
    differs_IM[:, -1] = True
    return np.minimum.reduceat(np.minimum(differs_IM.argmax(axis=1) + known, most_I), first_G)


def _best(levels: list[tuple[PrefixGroups, np.ndarray]], worth: Callable[[PrefixGroups], np.ndarray]) -> PrefixGroups:
    """Of each group and those inside it, what is worth more."""
    inside_G = np.zeros(len(levels[-1][0].blocks_G)) if levels else np.zeros(0)
    is_best: list[np.ndarray] = []
    for index in range(len(levels) - 1, -1, -1):
        groups, parent_G = levels[index]
        own_G = worth(groups)
        is_best.append((own_G > 0) & (own_G >= inside_G))
        above = len(levels[index - 1][0].blocks_G) if index else 1
        inside_G = np.bincount(parent_G, np.maximum(own_G, inside_G), minlength=above)
    sequences, sizes, blocks = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    is_covered_G = np.zeros(1, dtype=bool)
    for (groups, parent_G), is_best_G in zip(levels, reversed(is_best)):
        is_covered_G = is_covered_G[parent_G]
        taken = groups.taken(is_best_G & ~is_covered_G)
        is_covered_G = is_covered_G | is_best_G
        sequences.append(taken.sequence_I)
        sizes.append(np.diff(taken.start_G1))
        blocks.append(taken.blocks_G)
    return _groups(np.concatenate(sequences), np.concatenate(sizes), np.concatenate(blocks))


def _groups(sequence_I: np.ndarray, size_G: np.ndarray, blocks_G: np.ndarray) -> PrefixGroups:
    return PrefixGroups(sequence_I, np.append(0, np.cumsum(size_G)), blocks_G)
