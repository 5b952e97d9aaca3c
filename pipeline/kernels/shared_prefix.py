"""Which sequences of a step begin with the same blocks, found in their block tables, in numpy.

A step has at most some thousand sequences, and this is asked for in every one: so there are no loops over sequences or
blocks. Suffixes: those of `kernels/contract.py`, and G groups, I members of the groups, one group after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

MOST_LEVELS = 4  # of branching below one another that are looked at
_STRETCH = 32  # blocks that are compared at once, at first


@dataclass(frozen=True)
class PrefixGroups:
    """Group g is the sequences sequence_I[start_G1[g] : start_G1[g + 1]], which begin with the same blocks_G[g] blocks.

    No sequence is in two groups. As long as the first `num_decisive` blocks of each sequence stay the same, and how
    many of those can be shared, so do the groups.
    """

    sequence_I: np.ndarray
    start_G1: np.ndarray
    blocks_G: np.ndarray
    num_decisive: int

    @property
    def group_I(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.blocks_G)), self.size_G)

    @property
    def size_G(self) -> np.ndarray:
        return self.start_G1[1:] - self.start_G1[:-1]

    def taken(self, is_taken_G: np.ndarray) -> "PrefixGroups":
        """Some of the groups, in the same order."""
        if is_taken_G.all():
            return self
        size_G = self.size_G
        start_G1, blocks_G = _starts(size_G[is_taken_G]), self.blocks_G[is_taken_G]
        return PrefixGroups(self.sequence_I[np.repeat(is_taken_G, size_G)], start_G1, blocks_G, self.num_decisive)


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
    depth_G, num_decisive = np.zeros(1, dtype=np.int64), 1
    while len(levels) < MOST_LEVELS:
        depth_I = depth_G.take(group_I)
        goes_on_I = most_blocks_S[sequence_I] > depth_I
        if not goes_on_I.all():
            sequence_I, group_I, depth_I = sequence_I[goes_on_I], group_I[goes_on_I], depth_I[goes_on_I]
        next_I = table_SM[sequence_I, depth_I] + (group_I << 32)
        if not _repeats(next_I):
            break
        order = np.argsort(next_I, kind="stable")
        next_I = next_I[order]
        begins_I1 = np.ones(len(next_I) + 1, dtype=bool)
        np.not_equal(next_I[1:], next_I[:-1], out=begins_I1[1:-1])
        start_G1 = np.flatnonzero(begins_I1)
        size_G = start_G1[1:] - start_G1[:-1]
        is_shared_G = size_G > 1
        if not is_shared_G.all():
            order = order[np.repeat(is_shared_G, size_G)]
            size_G = size_G[is_shared_G]
            start_G1 = _starts(size_G)
        parent_G, sequence_I = group_I[order[start_G1[:-1]]], sequence_I[order]
        group_I = np.repeat(np.arange(len(size_G)), size_G)
        most_G = np.minimum.reduceat(most_blocks_S[sequence_I], start_G1[:-1])
        depth_G = _common(table_SM, sequence_I, start_G1[:-1], most_G, int(depth_G.min()) + 1)
        # the block after what a group has in common decides too: it differs, or may not be shared
        num_decisive = max(num_decisive, int(depth_G.max()) + 1)
        levels.append((PrefixGroups(sequence_I, start_G1, depth_G, num_decisive), parent_G))
    return _together(_best(levels, worth), num_decisive)


def _repeats(next_I: np.ndarray) -> bool:
    """Whether any value is there twice. Sorting values is a tenth of the work of finding their order."""
    ascending = np.sort(next_I)
    return bool((ascending[1:] == ascending[:-1]).any())


def _common(
    table_SM: np.ndarray, sequence_I: np.ndarray, first_G: np.ndarray, most_G: np.ndarray, known: int
) -> np.ndarray:
    """How many blocks the members of each group have in common, of the first most_G[g]; that the first `known` ones are
    is known.

    Looked at in stretches, each twice as long as those before, until no group goes on.
    """
    common_G, most, width = np.minimum(most_G, known), int(most_G.max()), _STRETCH
    while known < most:
        end = min(known + width, most)
        of_IM = cut_rows(table_SM, sequence_I, known, end)
        differs_IM = np.empty(of_IM.shape, dtype=np.uint8)
        np.not_equal(of_IM[1:], of_IM[:-1], out=differs_IM[1:].view(bool))
        differs_IM[first_G] = 0
        differs_GM = np.bitwise_or.reduceat(differs_IM, first_G, axis=0)
        ends_G = differs_GM.any(axis=1)
        same_G = np.where(ends_G, differs_GM.argmax(axis=1), end - known)
        common_G = np.where(common_G == known, np.minimum(known + same_G, most_G), common_G)
        if ends_G.all():
            break
        known, width = end, 2 * width
    return common_G


def _best(
    levels: list[tuple[PrefixGroups, np.ndarray]], worth: Callable[[PrefixGroups], np.ndarray]
) -> list[PrefixGroups]:
    """Of each group and those inside it, what is worth more, level by level."""
    inside_G = np.zeros(len(levels[-1][0].blocks_G)) if levels else np.zeros(0)
    is_best: list[np.ndarray] = []
    for index in range(len(levels) - 1, -1, -1):
        groups, parent_G = levels[index]
        own_G = worth(groups)
        is_best.append((own_G > 0) & (own_G >= inside_G))
        above = len(levels[index - 1][0].blocks_G) if index else 1
        inside_G = np.bincount(parent_G, np.maximum(own_G, inside_G), minlength=above)
    best: list[PrefixGroups] = []
    is_covered_G = np.zeros(1, dtype=bool)
    for (groups, parent_G), is_best_G in zip(levels, reversed(is_best)):
        is_covered_G = is_covered_G[parent_G]
        best.append(groups.taken(is_best_G & ~is_covered_G))
        is_covered_G = is_covered_G | is_best_G
    return best


def _together(parts: list[PrefixGroups], num_decisive: int) -> PrefixGroups:
    nothing = np.zeros(0, dtype=np.int64)
    sequence_I, size_G, blocks_G = (
        arrays[0] if len(arrays) == 1 else np.concatenate([nothing, *arrays])
        for arrays in (
            [groups.sequence_I for groups in parts],
            [groups.size_G for groups in parts],
            [groups.blocks_G for groups in parts],
        )
    )
    return PrefixGroups(sequence_I, _starts(size_G), blocks_G, num_decisive)


def _starts(size_G: np.ndarray) -> np.ndarray:
    start_G1 = np.zeros(len(size_G) + 1, dtype=np.int64)
    np.cumsum(size_G, out=start_G1[1:])
    return start_G1


def cut_rows(table_NM: np.ndarray, row_S: np.ndarray, begin: int, end: int) -> np.ndarray:
    """table_NM[row_S, begin:end], in half the time: what is taken of a row is copied as one value."""
    assert begin < end
    whole_N = table_NM[:, begin:end].view(f"V{(end - begin) * table_NM.itemsize}")[:, 0]
    return whole_N[row_S].view(table_NM.dtype).reshape(len(row_S), end - begin)
