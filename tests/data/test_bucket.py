"""Cutting a window into units: all rows, within limits, shared prefixes together, long rows first."""

from itertools import groupby, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.bucket import SHARED_BYTES, cut_units, estimate_tokens

HEADS = [b"", b"A" * SHARED_BYTES, b"A" * 200 + b"B" * SHARED_BYTES, b"C" * 3 * SHARED_BYTES]


def cut(prompts, unit_tokens=10**9, unit_rows=10**9, budget=0):
    return [u.tolist() for u in cut_units(prompts, np.full(len(prompts), budget), unit_tokens, unit_rows)]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from(HEADS), st.binary(max_size=40), st.integers(0, 50)), max_size=60),
    unit_tokens=st.integers(1, 2000),
    unit_rows=st.integers(1, 20),
)
def test_rows_are_conserved_within_the_limits(rows, unit_tokens, unit_rows):
    prompts = [head + tail for head, tail, _ in rows]
    budgets = np.array([budget for *_, budget in rows], dtype=np.int64)
    units = cut_units(prompts, budgets, unit_tokens, unit_rows)
    assert sorted(i for u in units for i in u) == list(range(len(rows)))
    for unit in units:
        assert 1 <= len(unit) <= unit_rows
        tokens = [estimate_tokens(len(prompts[i])) + int(budgets[i]) for i in unit]
        # a row larger than a unit is alone, except for rows without tokens
        assert sum(tokens) <= unit_tokens or sum(t > 0 for t in tokens) == 1
    again = cut_units(list(prompts), budgets.copy(), unit_tokens, unit_rows)
    assert [u.tolist() for u in again] == [u.tolist() for u in units]


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(st.sampled_from(HEADS), st.sampled_from([None, "a", "b"])), max_size=40))
def test_rows_of_an_adapter_are_consecutive(rows):
    prompts, adapters = [head + b"x" for head, _ in rows], [adapter for _, adapter in rows]
    units = cut_units(prompts, np.zeros(len(rows), dtype=np.int64), 200, 5, adapters)
    order = [i for unit in units for i in unit.tolist()]
    assert sorted(order) == list(range(len(rows)))
    assert [adapter for adapter, _ in groupby(adapters[i] or "" for i in order)] == sorted({a or "" for a in adapters})
    for adapter in (None, "a"):  # the same order as without the others
        own = [i for i in range(len(rows)) if adapters[i] == adapter]
        alone = [own[i] for unit in cut([prompts[i] for i in own], 200, 5) for i in unit]
        assert alone == [i for i in order if adapters[i] == adapter]


def test_longest_first_and_near_equals_in_order():
    lengths = [10, 4000, 400, 4001, 40, 401, 4002]
    (unit,) = cut([bytes([i]) * n for i, n in enumerate(lengths)])
    assert unit == [1, 3, 6, 2, 5, 4, 0]
    assert cut([b"x", b"y", b""], budget=5)[0] == [0, 1, 2]


def documents() -> list[bytes]:
    """Return 8 questions about each of 6 documents of 4 KB, interleaved, all after the same instructions of 1 KB."""
    rng = np.random.default_rng(0)
    head = rng.bytes(1000)
    docs = [rng.bytes(4000) for _ in range(6)]
    return [head + docs[i % 6] + bytes([i]) + rng.bytes(20 + i) for i in range(48)]


def test_rows_that_share_a_prefix_are_in_one_unit():
    for unit_rows in (8, 10, 15):
        units = cut(documents(), unit_rows=unit_rows)
        assert len(units) == 6
        assert all(len({i % 6 for i in unit}) == 1 for unit in units)
    # rows without a shared prefix follow
    units = cut([*documents(), *(bytes([i]) * 9000 for i in range(4))], unit_rows=10)
    assert [i for u in units for i in u][-4:] == [48, 49, 50, 51]


def test_a_group_larger_than_a_unit_stays_in_one_stretch():
    for limit in ({"unit_rows": 3}, {"unit_tokens": 4000}):
        order = [i % 6 for u in cut(documents(), **limit) for i in u]
        assert sum(a != b for a, b in pairwise(order)) == 5, limit


def test_a_prefix_of_all_rows_groups_nothing():
    """A long instruction in every prompt must not turn the longest-first order into byte order."""
    rng = np.random.default_rng(1)
    lengths = rng.permutation(np.arange(1, 40) * 300)
    prompts = [b"I" * 5000 + rng.bytes(n) for n in lengths]
    for rows in (prompts, [*prompts, b"something else"]):
        order = [len(rows[i]) for u in cut(rows, unit_rows=7) for i in u]
        assert max(order[-7:]) < min(order[:7])


def test_many_equal_and_deeply_shared_prompts_terminate():
    assert sorted(i for u in cut([b"x" * 5000] * 300, unit_rows=7) for i in u) == list(range(300))
    ladder = [b"x" * (SHARED_BYTES * i) for i in range(1, 1200)]  # deeper than Python's recursion limit
    assert sorted(i for u in cut(ladder, unit_rows=3) for i in u) == list(range(1199))
