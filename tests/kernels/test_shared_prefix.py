"""Groups of sequences with a common beginning, against a search over all pairs of tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.kernels.shared_prefix import PrefixGroups, prefix_groups


def readings_saved(groups: PrefixGroups) -> np.ndarray:
    return (np.diff(groups.start_G1) - 1) * groups.blocks_G


def as_sets(groups: PrefixGroups) -> dict[tuple[int, ...], int]:
    members = np.split(groups.sequence_I, groups.start_G1[1:-1])
    return {tuple(sorted(group.tolist())): int(blocks) for group, blocks in zip(members, groups.blocks_G)}


def table_of(prefixes: list[list[int]], width: int = 160) -> tuple[np.ndarray, np.ndarray]:
    """Build a block table of shared blocks, then own ones, then arbitrary entries; return it and the lengths."""
    table = np.zeros((len(prefixes), width), dtype=np.int32)
    num_blocks_S = np.array([len(prefix) + 2 for prefix in prefixes])
    for s, prefix in enumerate(prefixes):
        own = 100_000 + 2 * s
        table[s, : num_blocks_S[s]] = [*prefix, own, own + 1]
    return table, num_blocks_S


LONG, LENGTHS = [1, 2, 3, 4, 5], (1, 31, 32, 33, 34, 64, 96, 97, 98, 150)
STEMS = [list(range(1000 * n, 1000 * n + length)) for n, length in enumerate(LENGTHS, start=1)]
DOCUMENTS = [[1, 10 * d, 10 * d + 1, 10 * d + 2] for d in (1, 2, 1, 2)]
TWO_DEEP = [[*range(1, 8), 8 + d // 2, *range(100 * d + 100, 100 * d + 106)] for d in range(4) for _ in range(2)]
CASES: dict[str, tuple[list[list[int]], dict[tuple[int, ...], int]]] = {
    "one group": ([[5, 6, 7]] * 3, {(0, 1, 2): 3}),
    "two groups": ([[5, 6], [8], [5, 6], [9, 4, 2], [8]], {(0, 2): 2, (1, 4): 1}),
    "no group": ([[5], [6], [7]], {}),
    "one sequence": ([[5, 6]], {}),
    "the same block after other blocks": ([[1, 3, 4], [2, 3, 4], [1, 3, 4]], {(0, 2): 3}),
    "nested, the inner ones save more": (DOCUMENTS, {(0, 2): 4, (1, 3): 4}),
    "nested, the outer one saves more": ([[*LONG, 10], [*LONG, 10], [*LONG, 20], LONG], {(0, 1, 2, 3): 5}),
    "two branchings deep": (TWO_DEEP, {(s, s + 1): 14 for s in (0, 2, 4, 6)}),
    "of any length": ([*STEMS, *STEMS], {(g, g + len(STEMS)): length for g, length in enumerate(LENGTHS)}),
}


@pytest.mark.parametrize("case", CASES)
def test_groups_that_save_most(case: str) -> None:
    prefixes, expected = CASES[case]
    assert as_sets(prefix_groups(*table_of(prefixes), readings_saved)) == expected


def test_a_context_ends_what_is_shared_though_the_table_continues() -> None:
    table, num_blocks_S = table_of([[5, 6, 7, 8]] * 4)
    num_blocks_S[1] = 2
    assert as_sets(prefix_groups(table, num_blocks_S, readings_saved)) == {(0, 2, 3): 4}
    num_blocks_S[:] = 0
    assert as_sets(prefix_groups(table, num_blocks_S, readings_saved)) == {}


def test_groups_that_save_nothing_are_left_out() -> None:
    table, num_blocks_S = table_of([[5, 6, 7], [5, 6, 7], [8], [8]])
    assert as_sets(prefix_groups(table, num_blocks_S, lambda groups: readings_saved(groups) - 2)) == {(0, 1): 3}


@settings(max_examples=80, deadline=None)
@given(
    prefixes=st.lists(
        st.lists(st.integers(0, 1), max_size=6).map(lambda bits: [2**n + b for n, b in enumerate(bits)]), max_size=14
    )
)
def test_groups_are_disjoint_correct_and_no_worse_than_any_single_group(prefixes: list[list[int]]) -> None:
    if not prefixes:
        return
    table, num_blocks_S = table_of(prefixes)
    groups = prefix_groups(table, num_blocks_S, readings_saved)
    members = as_sets(groups)
    assert len(groups.sequence_I) == len(set(groups.sequence_I.tolist()))
    for group, blocks in members.items():
        common = 0
        while common < min(num_blocks_S[list(group)]) and len(set(table[list(group), common].tolist())) == 1:
            common += 1
        assert (len(group) > 1, blocks) == (True, common)
    best_of_one = 0
    for s in range(len(prefixes)):
        for depth in range(1, min(len(prefixes[s]), 2) + 1):  # at least two branchings are searched
            size = sum(
                num_blocks_S[t] > depth and prefixes[t][:depth] == prefixes[s][:depth] for t in range(len(prefixes))
            )
            best_of_one = max(best_of_one, (size - 1) * depth)
    assert readings_saved(groups).sum() >= best_of_one


@pytest.mark.parametrize("num_groups", [1, 16, 1024])
def test_a_thousand_sequences(num_groups: int) -> None:
    rng = np.random.default_rng(num_groups)
    table = rng.permutation(1 << 18)[: 1024 * 44].reshape(1024, 44).astype(np.int32)
    group_S = rng.permutation(1024) % num_groups
    table[:, :32] = table[group_S, :32]
    groups = prefix_groups(table, np.full(1024, 44), readings_saved)
    if num_groups == 1024:
        assert not len(groups.blocks_G)
        return
    assert (groups.blocks_G == 32).all()
    assert as_sets(groups) == {tuple(np.flatnonzero(group_S == g).tolist()): 32 for g in range(num_groups)}
