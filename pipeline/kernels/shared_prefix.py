"""Groups of a step's sequences that begin with the same blocks, found in their block tables with numpy.

A step has up to some thousand sequences and needs this every time, so there are no loops over sequences or blocks.
Suffixes: those of `kernels/contract.py`, G groups, and I members of the groups, one group after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

MAX_LEVELS = 4  # of nested groups
_CHUNK = 32  # blocks compared at once, at first


@dataclass(frozen=True)
class PrefixGroups:
    """Group g is the sequences sequence_I[start_G1[g] : start_G1[g + 1]], which begin with the same blocks_G[g] blocks.

    No sequence is in two groups. The groups stay the same as long as the first `num_decisive` blocks of each sequence
    do, and the number of those that can be shared.
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

    def select(self, is_selected_G: np.ndarray) -> "PrefixGroups":
        """Return some of the groups, in the same order."""
        if is_selected_G.all():
            return self
        size_G = self.size_G
        start_G1, blocks_G = _starts(size_G[is_selected_G]), self.blocks_G[is_selected_G]
        return PrefixGroups(self.sequence_I[np.repeat(is_selected_G, size_G)], start_G1, blocks_G, self.num_decisive)


def prefix_groups(
    table_SM: np.ndarray, max_blocks_S: np.ndarray, worth: Callable[[PrefixGroups], np.ndarray]
) -> PrefixGroups:
    """Return the groups of the highest worth. Sequence s can share only its first max_blocks_S[s] blocks.

    worth(groups) returns the worth of each group by itself. A group of negative worth counts as 0 and is left out.

    Shared prefixes form a tree. Walk it from the root: sequences with the same first block are a group, with all the
    blocks that they have in common; those that continue with the same block are a group inside it, and so on,
    `MAX_LEVELS` deep. A sequence reads only one prefix, so of a group and the groups inside it, keep what is worth
    more. Thus a header that all prompts share does not hide several documents with readers of their own.
    """
    levels: list[tuple[PrefixGroups, np.ndarray]] = []  # groups, and the parent of each in the level above
    sequence_I, group_I = np.arange(len(table_SM)), np.zeros(len(table_SM), dtype=np.int64)
    depth_G, num_decisive = np.zeros(1, dtype=np.int64), 1
    while len(levels) < MAX_LEVELS:
        depth_I = depth_G.take(group_I)
        continues_I = max_blocks_S[sequence_I] > depth_I
        if not continues_I.all():
            sequence_I, group_I, depth_I = sequence_I[continues_I], group_I[continues_I], depth_I[continues_I]
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
        max_G = np.minimum.reduceat(max_blocks_S[sequence_I], start_G1[:-1])
        depth_G = _common(table_SM, sequence_I, start_G1[:-1], max_G, int(depth_G.min()) + 1)
        # the first block after a group's common ones decides too: it differs, or may not be shared
        num_decisive = max(num_decisive, int(depth_G.max()) + 1)
        levels.append((PrefixGroups(sequence_I, start_G1, depth_G, num_decisive), parent_G))
    return _together(_best(levels, worth), num_decisive)


def _repeats(next_I: np.ndarray) -> bool:
    """Return whether any value occurs twice. Sorting values takes a tenth of the time of finding their order."""
    ascending = np.sort(next_I)
    return bool((ascending[1:] == ascending[:-1]).any())


def _common(
    table_SM: np.ndarray, sequence_I: np.ndarray, first_G: np.ndarray, max_G: np.ndarray, known: int
) -> np.ndarray:
    """Return how many of their first max_G[g] blocks the members of each group share; at least `known` are shared.

    Compares chunks, each twice as long as the previous one, until every group has a difference.
    """
    common_G, limit, width = np.minimum(max_G, known), int(max_G.max()), _CHUNK
    while known < limit:
        end = min(known + width, limit)
        block_IM = cut_rows(table_SM, sequence_I, known, end)
        differs_IM = np.empty(block_IM.shape, dtype=np.uint8)
        np.not_equal(block_IM[1:], block_IM[:-1], out=differs_IM[1:].view(bool))
        differs_IM[first_G] = 0
        differs_GM = np.bitwise_or.reduceat(differs_IM, first_G, axis=0)
        ends_G = differs_GM.any(axis=1)
        same_G = np.where(ends_G, differs_GM.argmax(axis=1), end - known)
        common_G = np.where(common_G == known, np.minimum(known + same_G, max_G), common_G)
        if ends_G.all():
            break
        known, width = end, 2 * width
    return common_G


def _best(
    levels: list[tuple[PrefixGroups, np.ndarray]], worth: Callable[[PrefixGroups], np.ndarray]
) -> list[PrefixGroups]:
    """Choose between each group and the groups inside it by their worth; return the chosen ones, level by level."""
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
        best.append(groups.select(is_best_G & ~is_covered_G))
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
    """Return table_NM[row_S, begin:end] in half the time: the cut of each row is copied as a single value."""
    assert begin < end
    whole_N = table_NM[:, begin:end].view(f"V{(end - begin) * table_NM.itemsize}")[:, 0]
    return whole_N[row_S].view(table_NM.dtype).reshape(len(row_S), end - begin)
